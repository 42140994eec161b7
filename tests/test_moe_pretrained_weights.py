import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe.checkpoint import save_trainer_state
from moe.config import LossConfig, MoeConfig, OptimizerConfig, SamplingConfig, UpdateConfig
from moe.families import FAMILIES
from moe.initial_state import write_initial_state
from moe.model import attach_dispatcher, empty_model, load_model
from moe.pretrained_weights import PretrainedWeights
from moe.publication import save_publication, write_publication
from moe.update import PolicyTrainer
from tests.checkpoint_holder import tied_model
from tests.checkpoint_layouts import misshape, model_of, write_checkpoint

torch.set_num_threads(1)
KEPT = ("LICENSE", "chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """In float32: DeepSeek's routers are published in it whatever the dtype, as transformers computes them."""
    return {name: tensor.float() for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def stream(source: Path, folder: Path, dtype: str = "bfloat16", max_shard_bytes: int = 30_000) -> Path:
    write_publication(empty_model(source), source, folder, dtype, PretrainedWeights(source).read, max_shard_bytes)
    return folder


def trainer_of(model) -> PolicyTrainer:
    attach_dispatcher(model, MoeConfig())
    return PolicyTrainer(
        model,
        loss=LossConfig(),
        optimizer=OptimizerConfig(),
        update=UpdateConfig(),
        moe=MoeConfig(),
        sampling=SamplingConfig(),
    )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_published_as_the_hub_has_it_from_any_layout(family: str, fused: bool, tmp_path: Path) -> None:
    model = model_of(family)
    source = write_checkpoint(model, tmp_path / "source", fused=fused)
    assert len(list(source.glob("*.safetensors"))) > 3
    folder = stream(source, tmp_path / "published")
    hub = write_checkpoint(model, tmp_path / "hub")
    ours, theirs = tensors_of(folder), tensors_of(hub)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    want = model.state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in load_model(folder, "float32").state_dict().items())
    for name in KEPT:
        assert (folder / name).read_bytes() == (source / name).read_bytes(), name
    assert not (folder / "README.md").exists()


@pytest.mark.parametrize("fused", [False, True])
def test_a_loaded_model_is_published_like_a_streamed_one(fused: bool, tmp_path: Path) -> None:
    source = write_checkpoint(model_of("qwen3_moe"), tmp_path / "source", fused=fused)
    folder = stream(source, tmp_path / "streamed", max_shard_bytes=1 << 30)
    save_publication(load_model(source, "float32"), source, tmp_path / "loaded", "bfloat16")
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "loaded").iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "loaded" / name).read_bytes(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_streamed_state_is_that_of_a_trainer_which_has_done_nothing(family: str, tmp_path: Path) -> None:
    source = write_checkpoint(model_of(family), tmp_path / "source")
    save_trainer_state(trainer_of(load_model(source, "float32")), tmp_path / "want")
    (tmp_path / "state").mkdir()
    write_initial_state(trainer_of(empty_model(source)), PretrainedWeights(source).read, tmp_path / "state")
    names = sorted(path.name for path in (tmp_path / "want").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "state").iterdir())
    for name in names:
        assert (tmp_path / "state" / name).read_bytes() == (tmp_path / "want" / name).read_bytes(), name


def test_tied_weights_are_read_once(tmp_path: Path) -> None:
    model = tied_model()
    model.save_pretrained(tmp_path / "source")
    weights = PretrainedWeights(tmp_path / "source")
    embedding = weights.read("model.embed_tokens.weight", torch.float32)
    assert torch.equal(embedding, model.get_input_embeddings().weight)


def test_weights_are_read_in_any_order_and_dtype(tmp_path: Path) -> None:
    model = model_of("mixtral")
    weights = PretrainedWeights(write_checkpoint(model, tmp_path / "source"))
    for name in reversed(model.state_dict()):
        tensor = weights.read(name, torch.float64)
        assert torch.equal(tensor, model.state_dict()[name].double()), name


def test_a_missing_file_or_weight_is_named_before_anything_is_written(tmp_path: Path) -> None:
    source = write_checkpoint(model_of("qwen3_moe"), tmp_path / "source")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    misshape(source, name)
    with pytest.raises(ValueError, match="weight model.layers.1.mlp.experts.gate_up_proj is missing or not of the sh"):
        PretrainedWeights(source)
    (source / index["weight_map"]["model.norm.weight"]).unlink()
    with pytest.raises(ValueError, match="is missing or not of the shape that config.json says"):
        PretrainedWeights(source)


def test_a_truncated_file_is_refused_in_one_line(tmp_path: Path) -> None:
    source = write_checkpoint(model_of("qwen3_moe"), tmp_path / "source")
    file = sorted(source.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match="weights of .*; give a complete Hugging Face checkpoint folder") as error:
        PretrainedWeights(source)
    assert "\n" not in str(error.value)


def test_quantized_weights_are_refused_by_name(tmp_path: Path) -> None:
    source = write_checkpoint(model_of("gpt_oss"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    for load in (PretrainedWeights, load_model):
        with pytest.raises(ValueError, match="quantized; give a checkpoint in bfloat16"):
            load(source)


_PEAK = """
import re, sys
from pathlib import Path
import torch
from tests.test_moe_pretrained_weights import stream, trainer_of
from moe.initial_state import write_initial_state
from moe.model import empty_model
from moe.pretrained_weights import PretrainedWeights

def anonymous_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def start(folder, state, shard_bytes):
    state.mkdir()
    weights = PretrainedWeights(folder)
    write_initial_state(trainer_of(empty_model(folder)), weights.read, state, shard_bytes)
    stream(folder, state / "published", "bfloat16", shard_bytes)

folder = Path(sys.argv[1])
torch.set_num_threads(1)
start(folder / "small", folder / "small_out", 64 << 20)  # imports are not counted
peaks, before = [0], anonymous_bytes()
import moe.checkpoint_files
original = moe.checkpoint_files.tensor_bytes
def watched(tensor):
    peaks.append(anonymous_bytes() - before)
    return original(tensor)
moe.checkpoint_files.tensor_bytes = watched
start(folder / "large", folder / "large_out", 64 << 20)
print(max(peaks))
"""


def test_memory_is_bounded_by_the_layers_and_not_by_the_model(tmp_path: Path) -> None:
    num_layers = 8
    model = model_of("qwen3_moe", hidden_size=256, moe_intermediate_size=256, num_experts=16, num_layers=num_layers)
    layer_bytes = sum(parameter.numel() * 4 for parameter in model.parameters()) / num_layers
    write_checkpoint(model, tmp_path / "large", shard_bytes=32 << 20)
    write_checkpoint(model_of("qwen3_moe"), tmp_path / "small")
    del model
    # What glibc keeps of freed memory depends on the moment; with a fixed threshold it gives large blocks back at once.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env=environment,
    )
    assert layer_bytes / 2 < int(done.stdout) < 3 * layer_bytes
