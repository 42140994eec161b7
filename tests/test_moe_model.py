import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import LlamaConfig, LlamaForCausalLM

from moe.config import ModelConfig, MoeConfig
from moe.dispatch.base import ExpertGroup, ExpertShape
from moe.dispatch.local import LocalDispatcher
from moe.dispatch.monitor import ExchangeMonitor
from moe.experts import expert_modules, set_dispatcher
from moe.families import FAMILIES
from moe.model import (
    attach_dispatcher,
    build_model,
    default_device,
    empty_model,
    load_model,
    materialize,
    stored_dtype,
    transport_report,
)
from moe.publication import save_publication
from moe.tokenizer import build_char_tokenizer
from tests.ranks import run_ranks

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
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json of"),
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
    for layer, experts in enumerate(expert_modules(model)):
        set_dispatcher(experts, held, ExchangeMonitor(), layer)
    attach_dispatcher(model, MoeConfig())
    assert closed == ["held"]


def test_models_go_to_the_gpu_when_there_is_one() -> None:
    assert default_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module", params=list(FAMILIES))
def publication(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "num_experts": 4}
    model = build_model(ModelConfig(family=request.param, **sizes), vocab_size=16, seed=0)  # type: ignore[arg-type]
    save_publication(model, build_char_tokenizer("ab"), folder, dtype="bfloat16")
    return folder


def test_an_empty_model_is_the_loaded_one_without_its_weights(publication: Path) -> None:
    empty, loaded = empty_model(publication), load_model(publication, dtype="float32")
    assert {(p.device.type, p.dtype) for p in empty.parameters()} == {("meta", torch.float32)}
    want = dict(loaded.named_buffers())
    assert {name for name, _ in empty.named_buffers()} == want.keys()
    assert all(torch.equal(buffer, want[name]) for name, buffer in empty.named_buffers())
    assert empty.generation_config == loaded.generation_config
    assert not empty.training
    materialize(empty, torch.device("cpu"))
    empty.load_state_dict(loaded.state_dict())
    attach_dispatcher(empty, MoeConfig())
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(empty(ids).logits, loaded(ids).logits)


def test_an_empty_model_needs_no_weights_and_leaves_the_generator_alone(tmp_path: Path) -> None:
    build_model(SMALL, vocab_size=16, seed=0).config.save_pretrained(tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    assert empty_model(tmp_path).lm_head.weight.is_meta
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("load", [empty_model, load_model])
def test_an_unsupported_type_is_refused_by_name(load: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next"}))
    with pytest.raises(ValueError, match="qwen3_next is not supported"):
        load(tmp_path)


def _tied(folder: Path) -> Path:
    config = build_model(SMALL, vocab_size=16, seed=0).config
    config.tie_word_embeddings = True
    config.save_pretrained(folder)
    return folder


def test_tied_weights_stay_one_parameter(tmp_path: Path) -> None:
    model = empty_model(_tied(tmp_path))
    materialize(model, torch.device("cpu"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(parameter.is_meta for parameter in model.parameters())


def _materialize_shards(rank: int, world_size: int, folder: Path) -> tuple[bool, float, int]:
    model: Any = empty_model(folder)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialize(model, torch.device("cpu"))
    attach_dispatcher(model, MoeConfig())
    torch.manual_seed(0)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape) / 10
        own = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        first, rows = own[1][0], own[0][0]
        with torch.no_grad():
            parameter.to_local().copy_(whole[first : first + rows])
    loss = model(torch.arange(6)[None]).logits.square().sum()
    loss.backward()
    same = model.lm_head.weight is model.model.embed_tokens.weight
    return same, float(loss), sum(parameter.to_local().numel() for parameter in model.parameters())


def test_an_empty_model_is_sharded_before_it_takes_memory(tmp_path: Path) -> None:
    folder = _tied(tmp_path)
    one, two = run_ranks(1, _materialize_shards, folder), run_ranks(2, _materialize_shards, folder)
    assert [same for same, _, _ in one + two] == [True] * 3
    assert two[0][1] == pytest.approx(one[0][1], rel=1e-5)
    assert two[0][1] == two[1][1]
    assert sum(elements for _, _, elements in two) == one[0][2]


class Recorded(LocalDispatcher):
    shapes: ClassVar[list[ExpertShape]] = []

    def validate(self, shape: ExpertShape) -> None:
        self.shapes.append(shape)


@pytest.mark.parametrize(
    ("moe", "compute_dtype", "wire_dtype"),
    [
        (MoeConfig(dispatcher="all_to_all"), None, torch.float32),
        (MoeConfig(dispatcher="all_to_all"), torch.bfloat16, torch.bfloat16),
        (MoeConfig(dispatcher="all_to_all", exchange_dtype="bfloat16"), None, torch.bfloat16),
    ],
)
def test_the_backend_sees_the_shape_of_the_exchange(
    moe: MoeConfig, compute_dtype: torch.dtype | None, wire_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[MoeConfig] = []

    def build(moe: MoeConfig, group: ExpertGroup) -> LocalDispatcher:
        asked.append(moe)
        return Recorded()

    monkeypatch.setattr("moe.model.build_dispatcher", build)
    monkeypatch.setattr(Recorded, "shapes", [])
    model = build_model(SMALL, vocab_size=16, seed=0)
    group = ExpertGroup(rank=1, size=4, ranks_per_node=2, monitor=ExchangeMonitor())
    attach_dispatcher(model, moe, group, compute_dtype)
    attach_dispatcher(model, moe)
    assert [given.dispatcher for given in asked] == ["local", "all_to_all", "local"]
    assert Recorded.shapes[1] == ExpertShape(
        num_experts=4,
        top_k=2,
        hidden_size=32,
        dtype=wire_dtype,
        ep_size=4,
        ranks_per_node=2,
        tokens_per_rank=moe.max_tokens_per_rank,
    )
    assert Recorded.shapes[2].ep_size == 1
