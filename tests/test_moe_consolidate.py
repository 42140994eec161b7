import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.checkpoint import MODEL_PREFIX, model_files, save_trainer_state
from moe.checkpoint_index import STATE_FILE
from moe.config import ModelConfig
from moe.consolidate import consolidate
from moe.families import FAMILIES
from moe.model import build_model, load_model
from moe.publication import save_publication, weights_sha256
from moe.publication_weights import weight_specs
from moe.tokenizer import build_char_tokenizer
from tests.checkpoint_holder import Grid, Holder, tied_model
from tests.ranks import run_ranks

torch.set_num_threads(1)
VOCAB_SIZE = 16


def model_of(family: str, seed: int) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "num_experts": 4}
    return build_model(ModelConfig(family=family, **sizes), VOCAB_SIZE, seed)  # type: ignore[arg-type]


def publish(model: PreTrainedModel, folder: Path, dtype: str = "float32") -> Path:
    save_publication(model, build_char_tokenizer("abc"), folder, dtype)
    return folder


def state_of(model: PreTrainedModel) -> dict[str, Tensor]:
    state = model.state_dict()
    return {MODEL_PREFIX + spec.name: state[spec.name] for spec in weight_specs(model, model.dtype)}


def save_alone(tensors: Mapping[str, Tensor], folder: Path) -> Path:
    save_trainer_state(Holder(Grid().pieces(0, tensors)), folder)
    return folder


def assert_same_files(left: Path, right: Path) -> None:
    names = sorted(path.name for path in left.iterdir())
    assert names == sorted(path.name for path in right.iterdir())
    assert all((left / name).read_bytes() == (right / name).read_bytes() for name in names)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_consolidated_state_is_the_publication_of_its_model(family: str, dtype: str, tmp_path: Path) -> None:
    parent = publish(model_of(family, 0), tmp_path / "parent", dtype)
    trained = model_of(family, 1)
    consolidate(save_alone(state_of(trained), tmp_path / "state"), parent, tmp_path / "out", dtype)
    assert_same_files(tmp_path / "out", publish(trained, tmp_path / "want", dtype))
    assert weights_sha256(tmp_path / "out") != weights_sha256(parent)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_streamed_weights_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = model_of(family, 0)
    publish(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert weights_sha256(tmp_path / "ours") == weights_sha256(tmp_path / "theirs")


def test_what_the_model_computes_in_float32_is_published_in_float32(tmp_path: Path) -> None:
    model = model_of("deepseek_v3", 0)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.tensor([1.0, 1.001, 1.002, 1.003]))  # one value in bfloat16
    loaded = load_model(publish(model, tmp_path / "out", "bfloat16"))
    biases = {name: b for name, b in loaded.named_buffers() if name.endswith("e_score_correction_bias")}
    assert len(biases) == 2
    assert all(torch.equal(bias, model.get_buffer(name)) for name, bias in biases.items())
    assert loaded.dtype == torch.bfloat16


def _save(rank: int, world_size: int, grid: Grid, tensors: dict[str, Tensor], folder: Path) -> None:
    save_trainer_state(Holder(grid.pieces(rank, tensors)), folder, rank, world_size)


@pytest.mark.parametrize("grid", [Grid(4, 4, 1), Grid(4, 2, 4), Grid(4, 1, 2)])
def test_the_layout_of_the_ranks_leaves_no_trace(grid: Grid, tmp_path: Path) -> None:
    model = model_of("qwen3_moe", 0)
    parent = publish(model, tmp_path / "parent")
    tensors = state_of(model) | {"optimizer.lm_head.weight.step": torch.tensor(1.0)}
    run_ranks(4, _save, grid, tensors, tmp_path / "state")
    for path in set((tmp_path / "state").iterdir()):
        if path.name not in {STATE_FILE, *model_files(tmp_path / "state")}:
            path.unlink()
    consolidate(tmp_path / "state", parent, tmp_path / "out", "float32")
    assert_same_files(tmp_path / "out", parent)


def test_small_shards_load_as_one_model(tmp_path: Path) -> None:
    model = model_of("deepseek_v3", 0)
    parent = publish(model, tmp_path / "parent", "bfloat16")
    consolidate(save_alone(state_of(model), tmp_path / "state"), parent, tmp_path / "out", "bfloat16", 9000)
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 5
    assert max(path.stat().st_size for path in shards) < 9000 + 3000  # one header more
    assert weights_sha256(tmp_path / "out") == weights_sha256(parent)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    want = load_model(parent).state_dict()
    assert all(torch.equal(t, want[name]) for name, t in load_model(tmp_path / "out").state_dict().items())


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    model = tied_model()
    parent = publish(model, tmp_path / "parent")
    assert "model.lm_head.weight" not in state_of(model)
    consolidate(save_alone(state_of(model), tmp_path / "state"), parent, tmp_path / "out", "float32")
    assert_same_files(tmp_path / "out", parent)


def test_a_state_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    model = model_of("qwen3_moe", 0)
    parent = publish(model, tmp_path / "parent")
    tensors = state_of(model)
    tensors["model.lm_head.weight"] = tensors["model.lm_head.weight"][:8]
    with pytest.raises(ValueError, match=r"weight lm_head\.weight is \(8, 32\), but \(16, 32\) in the model of"):
        consolidate(save_alone(tensors, tmp_path / "state"), parent, tmp_path / "out", "float32")
    del tensors["model.lm_head.weight"]
    with pytest.raises(ValueError, match=r"weight lm_head\.weight is None"):
        consolidate(save_alone(tensors, tmp_path / "state"), parent, tmp_path / "out", "float32")
    assert not (tmp_path / "out").exists()


def test_a_missing_or_corrupt_file_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = model_of("qwen3_moe", 0)
    parent, state = publish(model, tmp_path / "parent"), save_alone(state_of(model), tmp_path / "state")
    (name,) = model_files(state)
    data = bytearray((state / name).read_bytes())
    data[-1] ^= 1
    (state / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name}: its checksum is wrong"):
        consolidate(state, parent, tmp_path / "out", "float32")
    (state / name).unlink()
    with pytest.raises(ValueError, match=f"{name}: the file is missing"):
        consolidate(state, parent, tmp_path / "out", "float32")
    with pytest.raises(ValueError, match="has no config.json"):
        consolidate(state, tmp_path / "nowhere", tmp_path / "out", "float32")
    assert not (tmp_path / "out").exists()


_PEAK = """
import re, sys
from pathlib import Path
import torch
from moe.consolidate import consolidate
from moe.publication import weights_sha256

def anonymous_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

folder = Path(sys.argv[1])
torch.set_num_threads(1)
consolidate(folder / "small", folder / "small_parent", folder / "small_out", "float32")  # imports are not counted
peaks, before = [0], anonymous_bytes()
import moe.checkpoint_files, moe.publication
original = moe.checkpoint_files.tensor_bytes
def watched(tensor):
    data = original(tensor)
    peaks.append(anonymous_bytes() - before)
    return data
moe.checkpoint_files.tensor_bytes = moe.publication.tensor_bytes = watched
consolidate(folder / "state", folder / "parent", folder / "out", sys.argv[2], 64 << 20)
weights_sha256(folder / "out")
print(max(peaks))
"""


def test_memory_is_bounded_by_the_layers_and_not_by_the_model(tmp_path: Path) -> None:
    num_layers = 12
    sizes = ModelConfig(hidden_size=256, moe_intermediate_size=256, num_experts=32, num_layers=num_layers)
    model = build_model(sizes, VOCAB_SIZE, 0)
    model_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert model_bytes > 300e6
    publish(model_of("qwen3_moe", 0), tmp_path / "small_parent")
    save_alone(state_of(model_of("qwen3_moe", 0)), tmp_path / "small")
    save_alone(state_of(model), tmp_path / "state")
    shutil.copytree(tmp_path / "small_parent", tmp_path / "parent")
    model.config.save_pretrained(tmp_path / "parent")
    del model
    command = [sys.executable, "-c", _PEAK, str(tmp_path), "float32"]
    # What glibc keeps of freed memory depends on the moment; with a fixed threshold it gives large blocks back at once.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1], env=environment
    )
    layer_bytes = model_bytes / num_layers
    peak_bytes = int(done.stdout)
    assert layer_bytes / 2 < peak_bytes < 2.5 * layer_bytes
