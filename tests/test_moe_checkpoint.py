import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.batch import TrainingBatch
from moe.checkpoint import load_trainer_state, model_files, required_files, save_trainer_state, take_snapshot
from moe.checkpoint_index import STATE_FILE
from moe.checkpoint_weights import ModelWeights
from moe.config import LossConfig, ModelConfig, MoeConfig, OptimizerConfig, SamplingConfig, UpdateConfig
from moe.model import build_model
from moe.placement import Piece
from moe.update import PolicyTrainer, UpdateStopped
from tests.checkpoint_holder import Holder

torch.set_num_threads(1)
SIZES = ModelConfig(
    hidden_size=16, num_attention_heads=2, num_key_value_heads=1, num_experts=4, moe_intermediate_size=16
)
FILES = ["model-00000-of-00001.safetensors", "optimizer-00000-of-00001.safetensors", STATE_FILE]


def trainer(seed: int = 0) -> PolicyTrainer:
    return PolicyTrainer(
        build_model(SIZES, 8, seed),
        loss=LossConfig(correction="tis"),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        update=UpdateConfig(optimizer_steps_per_epoch=3),
        moe=MoeConfig(),
        sampling=SamplingConfig(max_new_tokens=4),
    )


def batch() -> TrainingBatch:
    generator = torch.Generator().manual_seed(0)
    responses = torch.randint(3, 8, (12, 4), generator=generator).tolist()
    return TrainingBatch.from_rows(
        prompts=[[1, 3 + row // 4] for row in range(12)],
        responses=responses,
        logprobs=[[-1.6] * 4] * 12,
        versions=[[0] * 4] * 12,
        rewards=[float(response[0]) for response in responses],
        groups=[row // 4 for row in range(12)],
    )


def assert_same_state(left: PolicyTrainer, right: PolicyTrainer) -> None:
    left_pieces, right_pieces = left.state_pieces(), right.state_pieces()
    assert left_pieces.keys() == right_pieces.keys()
    assert all(torch.equal(piece.tensor, right_pieces[name].tensor) for name, piece in left_pieces.items())
    assert left.progress() == right.progress()


def test_a_fresh_trainer_round_trips(tmp_path: Path) -> None:
    save_trainer_state(trainer(), tmp_path)
    loaded = trainer(seed=1)
    load_trainer_state(loaded, tmp_path)
    assert_same_state(loaded, trainer())


def test_training_through_a_checkpoint_is_bit_identical(tmp_path: Path) -> None:
    straight = trainer()
    straight.run_batch(batch(), 3, 0, lambda step: None, lambda: False)
    stopped = trainer()
    with pytest.raises(UpdateStopped):
        stopped.run_batch(batch(), 3, 0, lambda step: None, lambda: True)
    assert [path.name for path in save_trainer_state(stopped, tmp_path)] == FILES
    resumed = trainer(seed=1)
    load_trainer_state(resumed, tmp_path)
    assert resumed.batch_step == 1
    resumed.run_batch(batch(), 3, resumed.batch_step, lambda step: None, lambda: False)
    assert_same_state(resumed, straight)


def test_a_state_of_before_the_first_step_makes_a_trained_trainer_fresh(tmp_path: Path) -> None:
    save_trainer_state(trainer(), tmp_path)
    trained = trainer()
    trained.run_batch(batch(), 3, 0, lambda step: None, lambda: False)
    load_trainer_state(trained, tmp_path)
    assert_same_state(trained, trainer())


def test_equal_states_are_equal_files(tmp_path: Path) -> None:
    for name in ("first", "second"):
        own = trainer()
        own.run_batch(batch(), 3, 0, lambda step: None, lambda: False)
        save_trainer_state(own, tmp_path / name)
    for name in FILES[:2]:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_a_newer_state_replaces_the_older_one(tmp_path: Path) -> None:
    own = trainer()
    save_trainer_state(own, tmp_path)
    own.run_batch(batch(), 3, 0, lambda step: None, lambda: False)
    save_trainer_state(own, tmp_path)
    loaded = trainer(seed=1)
    load_trainer_state(loaded, tmp_path)
    assert loaded.global_step == 3


def test_a_snapshot_written_after_more_training_is_the_state_of_its_moment(tmp_path: Path) -> None:
    own = trainer()
    with pytest.raises(UpdateStopped):
        own.run_batch(batch(), 3, 0, lambda step: None, lambda: True)
    save_trainer_state(own, tmp_path / "at once")
    snapshot = take_snapshot(own, copy=True)
    own.run_batch(batch(), 3, own.batch_step, lambda step: None, lambda: False)
    snapshot.write_index(tmp_path / "later", [snapshot.write(tmp_path / "later")])
    for name in FILES:
        assert (tmp_path / "later" / name).read_bytes() == (tmp_path / "at once" / name).read_bytes()


def test_a_state_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    save_trainer_state(trainer(), tmp_path)
    state = json.loads((tmp_path / STATE_FILE).read_text())
    state["tensors"].pop("model.lm_head.weight")
    (tmp_path / STATE_FILE).write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"model\.lm_head\.weight"):
        load_trainer_state(trainer(), tmp_path)


TENSORS = {"model.a": torch.arange(6.0).view(3, 2), "optimizer.a.step": torch.tensor(4.0)}


def holder(tensors: dict[str, Tensor] = TENSORS) -> Holder:
    return Holder({name: Piece(tuple(t.shape), (0,) * t.dim(), t.clone()) for name, t in tensors.items()})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="state.json: the file is missing"):
        load_trainer_state(holder(), tmp_path)
    save_trainer_state(holder(), tmp_path)
    (tmp_path / FILES[1]).unlink()
    with pytest.raises(ValueError, match=f"{FILES[1]}: the file is missing"):
        load_trainer_state(holder(), tmp_path)


@pytest.mark.parametrize("position", [-1, 30])
def test_a_corrupt_file_is_named_and_nothing_is_loaded(tmp_path: Path, position: int) -> None:
    save_trainer_state(holder(), tmp_path)
    data = bytearray((tmp_path / FILES[0]).read_bytes())
    data[position] ^= 1
    (tmp_path / FILES[0]).write_bytes(data)
    own = holder({name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()})
    with pytest.raises(ValueError, match=f"{FILES[0]}: its checksum is wrong"):
        load_trainer_state(own, tmp_path)
    assert not any(piece.tensor.any() for piece in own.pieces.values())


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("model.b", torch.zeros(3, 2), "model.b is missing"),
        ("model.a", torch.zeros(2, 3), r"model.a is torch.float32 \[3, 2\], not torch.float32 \[2, 3\]"),
        ("model.a", torch.zeros(3, 2, dtype=torch.float64), "not torch.float64"),
        ("model.a", torch.zeros(3), r"not torch.float32 \[3\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, name: str, tensor: Tensor, reason: str) -> None:
    save_trainer_state(holder(), tmp_path)
    with pytest.raises(ValueError, match=f"tensor .*{reason}.*another model"):
        load_trainer_state(holder({name: tensor}), tmp_path)


def test_a_cut_off_file_is_named(tmp_path: Path) -> None:
    save_trainer_state(holder(), tmp_path)
    data = (tmp_path / FILES[0]).read_bytes()
    (tmp_path / FILES[0]).write_bytes(data[:-1])
    with pytest.raises(ValueError, match=f"{FILES[0]}: it has {len(data) - 1} bytes instead of {len(data)}"):
        load_trainer_state(holder(), tmp_path)


def test_only_the_files_of_the_asked_tensors_are_needed(tmp_path: Path) -> None:
    save_trainer_state(holder(), tmp_path)
    own = holder({"model.a": torch.zeros(3, 2)})
    assert required_files(holder(), tmp_path) == FILES[:2]
    assert required_files(own, tmp_path) == model_files(tmp_path) == FILES[:1]
    (tmp_path / FILES[1]).unlink()
    load_trainer_state(own, tmp_path)
    assert torch.equal(own.pieces["model.a"].tensor, TENSORS["model.a"])


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 0}', '{"format": 1}', '{"format": 2}', "\udcff"])
def test_a_state_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE_FILE).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="state.json: ") as refused:
        load_trainer_state(holder(), tmp_path)
    assert "\n" not in str(refused.value)


def _set(*keys: Any, value: object) -> Callable[[dict[str, Any]], None]:
    def edit(state: Any) -> None:
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (_set("files", value={}), "has no checksum"),
        (_set("files", value={"../elsewhere": {"sha256": "", "size_bytes": 1}}), "leaves the folder"),
        (_set("files", FILES[0], value={"sha256": ""}), "malformed"),
        (_set("tensors", "model.a", "dtype", value="float31"), "malformed"),
        (_set("tensors", "model.a", "dtype", value="nn"), "malformed"),
        (_set("tensors", "model.a", "pieces", value=[]), "model.a is incomplete"),
        (_set("tensors", "model.a", "pieces", value=[[FILES[0], [0, 0], [2, 2]]]), "model.a is incomplete"),
        (_set("tensors", "model.a", "pieces", value=[[FILES[1], [0, 0], [3, 2]]]), "go back to an older checkpoint"),
        (_set("tensors", "model.a", "pieces", value=7), "malformed"),
        (_set("tensors", "model.a", "pieces", value=[[FILES[0], [0], [3]]]), "malformed"),
        (_set("tensors", "model.a", "pieces", value=[[FILES[0], [1, 0], [3, 2]]]), "sticks out of its tensor"),
        (_set("tensors", "model.a", "pieces", value=[[FILES[0], [-1, 0], [3, 2]]]), "sticks out of its tensor"),
        (_set("progress", value=[1]), "malformed"),
    ],
)
def test_a_malformed_index_is_refused_in_one_line(
    tmp_path: Path, edit: Callable[[dict[str, Any]], None], reason: str
) -> None:
    save_trainer_state(holder(), tmp_path)
    state = json.loads((tmp_path / STATE_FILE).read_text())
    edit(state)
    (tmp_path / STATE_FILE).write_text(json.dumps(state))
    with pytest.raises(ValueError, match=reason) as refused:
        load_trainer_state(holder(), tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("offset", [0, 1])
def test_pieces_that_do_not_make_up_the_tensor_are_not_saved(tmp_path: Path, offset: int) -> None:
    part = Holder({"model.a": Piece((3, 2), (offset, 0), torch.zeros(2, 2))})
    with pytest.raises(ValueError, match="hold 4 of 6 elements of model.a"):
        save_trainer_state(part, tmp_path)
    assert not (tmp_path / STATE_FILE).exists()


def test_a_state_without_elements_round_trips(tmp_path: Path) -> None:
    save_trainer_state(holder({"batch.empty": torch.zeros(0, 3)}), tmp_path)
    load_trainer_state(holder({"batch.empty": torch.zeros(0, 3)}), tmp_path)
    assert json.loads((tmp_path / STATE_FILE).read_text())["tensors"]["batch.empty"]["shape"] == [0, 3]


def test_the_weights_alone_are_loaded_into_a_model(tmp_path: Path) -> None:
    own = trainer()
    own.run_batch(batch(), 3, 0, lambda step: None, lambda: False)
    save_trainer_state(own, tmp_path)
    reference = ModelWeights(build_model(SIZES, 8, 1))
    assert required_files(reference, tmp_path) == FILES[:1]
    (tmp_path / FILES[1]).unlink()
    load_trainer_state(reference, tmp_path)
    want = own.model.state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in reference.model.state_dict().items())
    other = ModelConfig(**{**asdict(SIZES), "num_layers": 1})
    with pytest.raises(ValueError, match=r"model\.layers\.1.* is missing or unknown"):
        load_trainer_state(ModelWeights(build_model(other, 8, 1)), tmp_path)
