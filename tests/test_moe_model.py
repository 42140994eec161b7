from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moe.config import ModelConfig, MoeConfig
from moe.model import attach_dispatcher, build_model, load_model

torch.set_num_threads(1)


def test_the_default_model_has_half_a_million_parameters() -> None:
    model = build_model(ModelConfig(), vocab_size=16, seed=0)
    assert 500_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 800_000


def test_a_seed_fixes_the_weights_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = (build_model(ModelConfig(), vocab_size=16, seed=7).state_dict() for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = build_model(ModelConfig(), vocab_size=16, seed=8).state_dict()
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_special_token_ids_and_dtype_are_set() -> None:
    model = build_model(ModelConfig(dtype="bfloat16"), vocab_size=16, seed=0)
    assert (model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id) == (0, 1, 2)
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("cfg", "field"),
    [
        (ModelConfig(hidden_size=90), "hidden_size 90"),
        (ModelConfig(num_key_value_heads=3), "num_attention_heads 4"),
        (ModelConfig(num_experts=1), "num_experts_per_token 2"),
    ],
)
def test_sizes_that_do_not_fit_are_named(cfg: ModelConfig, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        build_model(cfg, vocab_size=16, seed=0)


def test_a_saved_model_loads_bit_identical(tmp_path: Path) -> None:
    model = build_model(ModelConfig(), vocab_size=16, seed=0)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    want = model.state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in loaded.state_dict().items())
    assert load_model(tmp_path, dtype="bfloat16").dtype == torch.bfloat16


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no config.json"):
        load_model(tmp_path)


def test_a_model_without_experts_is_refused() -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(ValueError, match="LlamaForCausalLM has no fused experts"):
        attach_dispatcher(LlamaForCausalLM(config), MoeConfig())
