"""Sizes of real models from their configuration alone, and the limits of the exchanges on them."""

import json
from pathlib import Path

import pytest

from moe.config import ModelConfig, MoeConfig
from moe.families import FAMILIES
from moe.model import build_model
from moe.model_size import exchange_problems, measure

MODELS = Path(__file__).parents[1] / "configs" / "models"


def folder_of(tmp_path: Path, name: str) -> Path:
    (tmp_path / "config.json").write_text((MODELS / f"{name}.json").read_text())
    return tmp_path


@pytest.mark.parametrize(
    ("name", "total", "active"),
    # What the makers publish: 30.5 B with 3.3 B active and 235 B with 22 B, embeddings included.
    [("qwen3-30b-a3b", 30.5e9, 3.3e9), ("qwen3-235b-a22b", 235e9, 22e9)],
)
def test_real_models_have_their_published_sizes(tmp_path: Path, name: str, total: float, active: float) -> None:
    size = measure(folder_of(tmp_path, name))
    assert size.total_parameters == pytest.approx(total, rel=0.005)
    assert size.active_parameters + size.embedding_parameters == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_counted_as_the_model_that_is_built(tmp_path: Path, family: str) -> None:
    shape = ModelConfig(family=family)  # type: ignore[arg-type]
    model = build_model(shape, vocab_size=32, seed=0)
    model.config.save_pretrained(tmp_path)
    size = measure(tmp_path)
    assert size.total_parameters == sum(parameter.numel() for parameter in model.parameters())
    experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    assert size.expert_parameters == experts
    assert (size.num_experts, size.top_k) == (shape.num_experts, shape.num_experts_per_token)
    assert size.expert_width == shape.moe_intermediate_size


def test_a_cache_of_latent_attention_is_smaller(tmp_path: Path) -> None:
    text = {"model_type": "deepseek_v3", "num_hidden_layers": 4, "first_k_dense_replace": 1, "hidden_size": 512}
    text |= {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    text |= {"vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(text))
    size = measure(tmp_path)
    assert size.key_value_values == 4 * (512 + 64)
    assert size.num_moe_layers == 3


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": 1, "hidden_size": 64}')
    with pytest.raises(ValueError, match="qwen3"):
        measure(tmp_path)


@pytest.mark.parametrize(
    ("dispatcher", "ranks", "problem"),
    [
        ("deepep", 24, "no multiple of the 24 ranks"),
        ("uccl_ep", 128, "128 ranks, it has kernels for"),
        ("nccl_ep", 16, "9000 tokens"),
        ("deepep", 16, "9000 tokens"),
    ],
)
def test_limits_of_the_exchange_are_named(tmp_path: Path, dispatcher: str, ranks: int, problem: str) -> None:
    size = measure(folder_of(tmp_path, "qwen3-30b-a3b"))
    moe = MoeConfig(dispatcher=dispatcher, max_tokens_per_rank=8192)  # type: ignore[arg-type]
    assert problem in " ".join(exchange_problems(size, moe, ranks, 8, 9000))


def test_a_setting_within_the_limits_has_no_problem(tmp_path: Path) -> None:
    size = measure(folder_of(tmp_path, "qwen3-30b-a3b"))
    for dispatcher in ("local", "all_to_all", "deepep", "uccl_ep", "nccl_ep"):
        moe = MoeConfig(dispatcher=dispatcher, expert_parallel_size=0 if dispatcher == "local" else 16)  # type: ignore[arg-type]
        assert not list(exchange_problems(size, moe, 16, 8, 8192))
