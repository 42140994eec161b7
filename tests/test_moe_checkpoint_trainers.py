from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe.checkpoint import load_trainer_state, required_files, save_trainer_state
from moe.checkpoint_index import STATE_FILE
from moe.config import LossConfig, MoeConfig, OptimizerConfig
from moe.consolidate import consolidate
from moe.model import build_model, empty_model, materialize
from moe.parallel import ParallelLayout, parallelize
from moe.publication import save_publication, weights_sha256
from moe.tokenizer import build_char_tokenizer
from moe.update import PolicyTrainer, UpdateStopped
from tests.parallel_updates import SIZES, VOCAB, Case, batch_of, layout_of
from tests.ranks import run_ranks

torch.set_num_threads(1)
ALONE = Case(loss=LossConfig(correction="tis"))  # a state inside a batch then holds its log-probabilities


def ep(size: int, fsdp_size: int = 1) -> Case:
    return replace(ALONE, moe=MoeConfig(dispatcher="all_to_all", expert_parallel_size=size), fsdp_size=fsdp_size)


def trainer_of(case: Case, layout: ParallelLayout, parent: Path) -> PolicyTrainer:
    """As the train step builds it: the shapes come from a publication, all values from a state."""
    model = empty_model(parent)
    parallelize(model, case.moe, case.update, layout)
    materialize(model, torch.device("cpu"))
    return PolicyTrainer(
        model,
        loss=case.loss,
        optimizer=OptimizerConfig(learning_rate=1e-2, epsilon=1e-3),
        update=case.update,
        moe=case.moe,
        sampling=case.sampling,
        layout=layout,
    )


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parent")
    save_publication(build_model(SIZES, VOCAB, 0), build_char_tokenizer("abcdefgh"), folder)
    return folder


@pytest.fixture(scope="module")
def interrupted(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of one process, stopped inside a batch."""
    folder = tmp_path_factory.mktemp("interrupted")
    trainer = trainer_of(ALONE, ParallelLayout.single(), parent)
    trainer.model.load_state_dict(build_model(SIZES, VOCAB, 0).state_dict())
    with pytest.raises(UpdateStopped):
        trainer.run_batch(batch_of(ALONE), 3, 0, lambda step: None, lambda: True)
    save_trainer_state(trainer, folder)
    return folder


def read_alone(state: Path, parent: Path) -> tuple[dict[str, Tensor], object]:
    """A state as one process sees it."""
    trainer = trainer_of(ALONE, ParallelLayout.single(), parent)
    load_trainer_state(trainer, state)
    return {name: piece.tensor for name, piece in trainer.state_pieces().items()}, trainer.progress()


def _continue(rank: int, world_size: int, case: Case, parent: Path, source: Path, target: Path, train: bool) -> int:
    trainer = trainer_of(case, layout_of(case, world_size), parent)
    own = target.parent / f"{target.name}-needed-by-{rank}"
    own.mkdir()
    (own / STATE_FILE).symlink_to(source / STATE_FILE)
    for name in required_files(trainer, own):
        (own / name).symlink_to(source / name)
    load_trainer_state(trainer, own)
    if train:
        trainer.run_batch(batch_of(case), 3, trainer.batch_step, lambda step: None, lambda: False)
    save_trainer_state(trainer, target, rank, world_size)
    return trainer.global_step


def test_a_state_goes_from_layout_to_layout_unchanged(parent: Path, interrupted: Path, tmp_path: Path) -> None:
    chain = [
        (2, ep(2)),
        (4, ep(4)),
        (4, ep(2, fsdp_size=4)),
        (3, replace(ALONE, fsdp_size=0)),
        (4, ep(2, fsdp_size=2)),
        (2, ALONE),
    ]
    want, progress = read_alone(interrupted, parent)
    assert {"batch.old_logprobs", "optimizer.lm_head.weight.exp_avg_sq", "model.lm_head.weight"} < want.keys()
    state = interrupted
    for number, (world_size, case) in enumerate(chain):
        target = tmp_path / str(number)
        assert run_ranks(world_size, _continue, case, parent, state, target, False) == [1] * world_size
        found, found_progress = read_alone(target, parent)
        assert found.keys() == want.keys() and found_progress == progress
        assert all(torch.equal(tensor, want[name]) for name, tensor in found.items()), case
        state = target


@pytest.mark.parametrize(("world_size", "case"), [(2, ep(2)), (4, ep(2, fsdp_size=4)), (4, ep(4))])
def test_ranks_finish_the_batch_of_one_process_and_are_published_whole(
    world_size: int, case: Case, parent: Path, interrupted: Path, tmp_path: Path
) -> None:
    run_ranks(1, _continue, ALONE, parent, interrupted, tmp_path / "alone", True)
    run_ranks(world_size, _continue, case, parent, interrupted, tmp_path / "ranks", True)
    want, _ = read_alone(tmp_path / "alone", parent)
    found, _ = read_alone(tmp_path / "ranks", parent)
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    consolidate(tmp_path / "ranks", parent, tmp_path / "published", "float32")
    whole = trainer_of(ALONE, ParallelLayout.single(), parent)
    load_trainer_state(whole, tmp_path / "ranks")
    save_publication(whole.model, build_char_tokenizer("abcdefgh"), tmp_path / "want")
    assert weights_sha256(tmp_path / "published") == weights_sha256(tmp_path / "want") != weights_sha256(parent)
