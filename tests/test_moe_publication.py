import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from moe.batch import TrainingBatch
from moe.config import LossConfig, ModelConfig, MoeConfig, OptimizerConfig, SamplingConfig, UpdateConfig
from moe.model import build_model, load_model, stored_dtype
from moe.publication import save_publication, weights_sha256
from moe.sampler import Sampler
from moe.tokenizer import build_char_tokenizer, encode_prompt
from moe.update import PolicyTrainer
from tests.checkpoint_holder import tied_model

torch.set_num_threads(1)
ALPHABET = "0123456789>ab"
MODEL = ModelConfig(hidden_size=32, moe_intermediate_size=32, num_experts=4)


@pytest.fixture
def model() -> PreTrainedModel:
    model = build_model(MODEL, vocab_size=16, seed=11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return model


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    save_publication(model, build_char_tokenizer(ALPHABET), tmp_path / "publication")
    return tmp_path / "publication"


def test_plain_transformers_generates_the_tokens_of_our_sampler(model: PreTrainedModel, folder: Path) -> None:
    tokenizer, plain = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompts = [encode_prompt(tokenizer, text) for text in ("123>", "9a0>", "b>")]
    sampler = Sampler(model, (tokenizer.eos_token_id,), tokenizer.pad_token_id)
    ours = sampler.sample(prompts, [0, 1, 2], SamplingConfig(max_new_tokens=12), greedy=True)
    for prompt, response in zip(prompts, ours, strict=True):
        output = plain.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert output[0, len(prompt) :].tolist() == response.response_ids


def test_the_weights_load_bit_identical(model: PreTrainedModel, folder: Path) -> None:
    want = model.state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in load_model(folder).state_dict().items())


def test_the_config_is_readable_by_older_releases_and_holds_no_setting_of_this_process(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["num_experts"] == config["num_local_experts"] == 4
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000.0
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert not [key for key in config if "implementation" in key or key == "auto_map"]
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer_config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_every_expert_has_tensors_of_its_own(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as opened:
        names = set(opened.keys())
    experts = {name for name in names if ".experts." in name}
    want = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in range(2)
        for expert in range(4)
        for part in ("gate", "up", "down")
    }
    assert experts == want


def test_publishing_again_gives_the_same_files(model: PreTrainedModel, folder: Path, tmp_path: Path) -> None:
    save_publication(model, build_char_tokenizer(ALPHABET), tmp_path / "again")
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert all((folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


def test_a_loaded_publication_is_published_identically(folder: Path, tmp_path: Path) -> None:
    save_publication(load_model(folder), AutoTokenizer.from_pretrained(folder), tmp_path / "again")
    assert weights_sha256(tmp_path / "again") == weights_sha256(folder)
    assert (tmp_path / "again" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_the_checksum_ignores_how_tensors_are_spread_over_files(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, tmp_path / "model-2.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, tmp_path / "model-1.safetensors")
    assert weights_sha256(tmp_path) == weights_sha256(folder)


@pytest.mark.parametrize("change", ["value", "name", "shape", "dtype"])
def test_the_checksum_sees_every_change(change: str, folder: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(folder, tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    name = "model.norm.bias" if change == "name" else "model.norm.weight"
    edits = {"value": norm + 1e-6, "name": norm, "shape": norm.view(2, -1), "dtype": norm.view(torch.int32)}
    save_file({**tensors, name: edits[change]}, changed / "model.safetensors")
    assert weights_sha256(changed) != weights_sha256(folder)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no .safetensors"):
        weights_sha256(tmp_path)


def _batch(model: PreTrainedModel, sampling: SamplingConfig) -> TrainingBatch:
    prompts = [[1, 3 + row // 4] for row in range(32)]
    rows = Sampler(model, (2,), 0).sample(prompts, range(32), sampling)
    return TrainingBatch.from_rows(
        prompts=prompts,
        responses=[row.response_ids for row in rows],
        logprobs=[row.logprobs for row in rows],
        versions=[[0] * len(row.response_ids) for row in rows],
        rewards=[float(row.response_ids[0] % 3) for row in rows],
        groups=[row // 4 for row in range(32)],
    )


def test_a_bfloat16_policy_trains_in_float32_and_is_published_in_bfloat16(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    tokenizer, sampling = build_char_tokenizer(ALPHABET), SamplingConfig(max_new_tokens=6)
    save_publication(model, tokenizer, tmp_path / "0", dtype="bfloat16")
    assert model.dtype == torch.float32
    sampled = load_model(tmp_path / "0")
    assert (sampled.dtype, stored_dtype(tmp_path / "0")) == (torch.bfloat16, "bfloat16")
    policy = load_model(tmp_path / "0", dtype="float32")
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    trainer = PolicyTrainer(
        policy,
        loss=LossConfig(),
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=0),
        update=UpdateConfig(optimizer_steps_per_epoch=4),
        moe=MoeConfig(),
        sampling=sampling,
    )
    trainer.run_batch(_batch(sampled, sampling), 0, 0, lambda step: None, lambda: False)
    changed = sum(int((parameter != before[name]).sum()) for name, parameter in policy.named_parameters())
    # Tokens of the vocabulary that no response holds have no gradient in the embedding.
    assert changed > 0.9 * sum(parameter.numel() for parameter in before.values())
    save_publication(policy, tokenizer, tmp_path / "1", dtype=stored_dtype(tmp_path / "0"))
    published = load_model(tmp_path / "1")
    assert published.dtype == torch.bfloat16
    want = policy.state_dict()
    assert all(torch.equal(tensor, want[name].bfloat16()) for name, tensor in published.state_dict().items())
    assert {tensor.dtype for tensor in load_file(tmp_path / "1" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "1" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_tied_weights_are_written_once_in_another_dtype(tmp_path: Path) -> None:
    save_publication(tied_model(), build_char_tokenizer("a"), tmp_path, dtype="bfloat16")
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert load_model(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float31", "int8", "nn"])
def test_an_impossible_dtype_is_refused(model: PreTrainedModel, dtype: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"dtype '{dtype}'"):
        save_publication(model, build_char_tokenizer("a"), tmp_path, dtype=dtype)
