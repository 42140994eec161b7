import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moe.config import ModelConfig, MoeConfig
from moe.dispatch.local import LocalDispatcher
from moe.experts import expert_modules, set_dispatcher
from moe.model import (
    attach_dispatcher,
    build_model,
    default_device,
    load_model,
    stored_dtype,
    transport_report,
)

torch.set_num_threads(1)
SMALL = ModelConfig(hidden_size=32, moe_intermediate_size=32, num_experts=4)


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


def test_special_token_ids_are_set_and_weights_are_float32_whatever_is_published() -> None:
    model = build_model(ModelConfig(dtype="bfloat16"), vocab_size=16, seed=0)
    assert (model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id) == (0, 1, 2)
    assert model.dtype == torch.float32


@pytest.mark.parametrize(
    ("cfg", "field"),
    [
        (ModelConfig(hidden_size=90), "model.hidden_size = 90"),
        (ModelConfig(num_key_value_heads=3), "model.num_attention_heads = 4"),
        (ModelConfig(num_experts=1), "model.num_experts_per_token = 2"),
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


def _config(**fields: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> object:
        config = json.loads((folder / "config.json").read_text())
        return (folder / "config.json").write_text(json.dumps(config | fields))

    return edit


def _weights(edit: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors").write_bytes(edit((folder / "model.safetensors").read_bytes()))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (_weights(lambda data: data[:5000]), "SafetensorError"),
        (_weights(lambda data: b"junk"), "SafetensorError"),
        (_weights(lambda data: b""), "SafetensorError"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no .safetensors file"),
        (lambda folder: (folder / "config.json").write_text("{"), "not a valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "model of"),
        (_config(model_type="unheard_of"), "unheard_of"),
        (_config(model_type="own", auto_map={"AutoConfig": "own.Config"}), "custom code"),
        (_config(hidden_size="wide"), "hidden_size"),
        (_config(num_hidden_layers=3), "weight model.layers.2"),
        (_config(hidden_size=64), "weight "),
        (_config(dtype="float31"), "float31"),
    ],
)
def test_a_malformed_folder_is_refused_in_one_line(edit: Callable[[Path], object], reason: str, tmp_path: Path) -> None:
    build_model(SMALL, vocab_size=16, seed=0).save_pretrained(tmp_path)
    edit(tmp_path)
    with pytest.raises(ValueError) as refused:
        load_model(tmp_path)
    message = str(refused.value)
    assert reason in message
    assert str(tmp_path) in message
    assert "\n" not in message


def test_pickled_weights_are_named_and_never_opened(tmp_path: Path) -> None:
    model = build_model(SMALL, vocab_size=16, seed=0)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has pytorch_model\.bin and no \.safetensors file: .*convert"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_the_stored_dtype_is_read_from_the_config(config: dict[str, str], dtype: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stored_dtype(tmp_path) == dtype


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_stored_dtype_needs_a_readable_config(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json of"):
        stored_dtype(tmp_path)


def test_the_transport_report_is_json() -> None:
    report = transport_report(build_model(SMALL, vocab_size=16, seed=0))
    assert json.loads(json.dumps(report)) == {"requested": "local", "observed": "local", "details": {}}


def test_a_replaced_dispatcher_is_closed() -> None:
    closed: list[str] = []

    class Held(LocalDispatcher):
        def close(self) -> None:
            closed.append("held")

    model = build_model(SMALL, vocab_size=16, seed=0)
    held = Held()
    for experts in expert_modules(model):
        set_dispatcher(experts, held)
    attach_dispatcher(model, MoeConfig())
    assert closed == ["held"]


def test_models_go_to_the_gpu_when_there_is_one() -> None:
    assert default_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
