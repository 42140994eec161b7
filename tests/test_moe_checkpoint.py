import json
from pathlib import Path

import pytest
import torch

from moe.batch import TrainingBatch
from moe.checkpoint import STATE_FILE, load_trainer_state, save_trainer_state
from moe.config import LossConfig, ModelConfig, MoeConfig, OptimizerConfig, SamplingConfig, UpdateConfig
from moe.model import build_model
from moe.update import PolicyTrainer, UpdateStopped

SIZES = ModelConfig(
    hidden_size=16, num_attention_heads=2, num_key_value_heads=1, num_experts=4, moe_intermediate_size=16
)


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
    left_tensors, right_tensors = left.state_tensors(), right.state_tensors()
    assert left_tensors.keys() == right_tensors.keys()
    assert all(torch.equal(tensor, right_tensors[name]) for name, tensor in left_tensors.items())
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
    save_trainer_state(stopped, tmp_path)
    resumed = trainer(seed=1)
    load_trainer_state(resumed, tmp_path)
    assert resumed.batch_step == 1
    resumed.run_batch(batch(), 3, resumed.batch_step, lambda step: None, lambda: False)
    assert_same_state(resumed, straight)


def test_a_newer_state_replaces_the_older_one(tmp_path: Path) -> None:
    own = trainer()
    save_trainer_state(own, tmp_path)
    own.run_batch(batch(), 3, 0, lambda step: None, lambda: False)
    save_trainer_state(own, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    loaded = trainer(seed=1)
    load_trainer_state(loaded, tmp_path)
    assert loaded.global_step == 3


def test_a_crash_before_the_last_file_leaves_the_older_state(tmp_path: Path) -> None:
    own = trainer()
    save_trainer_state(own, tmp_path)
    old_state = (tmp_path / STATE_FILE).read_bytes()
    old_tensors = {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    own.run_batch(batch(), 3, 0, lambda step: None, lambda: False)
    save_trainer_state(own, tmp_path)
    (tmp_path / STATE_FILE).write_bytes(old_state)
    for path, data in old_tensors.items():
        path.write_bytes(data)
    loaded = trainer(seed=1)
    load_trainer_state(loaded, tmp_path)
    assert loaded.global_step == 0


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="state.json: the file is missing"):
        load_trainer_state(trainer(), tmp_path)
    save_trainer_state(trainer(), tmp_path)
    (tensors,) = tmp_path.glob("*.safetensors")
    tensors.unlink()
    with pytest.raises(ValueError, match=f"{tensors.name}: the file is missing"):
        load_trainer_state(trainer(), tmp_path)


def test_a_corrupt_file_is_named(tmp_path: Path) -> None:
    save_trainer_state(trainer(), tmp_path)
    (tensors,) = tmp_path.glob("*.safetensors")
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(ValueError, match=f"{tensors.name}: its checksum is wrong"):
        load_trainer_state(trainer(), tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 0}', '{"format": 1}', "\udcff"])
def test_a_state_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE_FILE).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="state.json"):
        load_trainer_state(trainer(), tmp_path)


def test_the_state_file_is_plain_json(tmp_path: Path) -> None:
    save_trainer_state(trainer(), tmp_path)
    state = json.loads((tmp_path / STATE_FILE).read_text())
    assert state["progress"]["global_step"] == 0
    assert (tmp_path / state["tensors_file"]).stat().st_size == state["size_bytes"]
