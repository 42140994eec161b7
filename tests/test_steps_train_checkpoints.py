"""States saved while an update goes on: what a kill at any write costs, and when which state is saved."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe.parallel import ParallelLayout
from moe.placement import Piece
from steps import entrypoint, paths, train_checkpoints
from steps.adapters import ledger
from steps.adapters.local_store import LocalStore
from steps.entrypoint import RankContext, StepContext
from steps.errors import ServiceUnavailable
from steps.interruption import Interruption
from steps.train_checkpoints import UpdateCheckpoints
from steps.trainers import complete_folders
from tests.checkpoint_holder import Holder
from tests.fixtures_steps import RUN, TINY_CONFIG, StepRunner, stage_argv
from tests.training_runs import CONFIG, copy_of, die_at_write, in_folder, outcome, prepare, states_inside, train_here
from workflows.local.warm_client import WarmServer

Outcome = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def prepared_run(warm_server: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(in_folder(warm_server, folder), CONFIG)
    return folder


@pytest.fixture(scope="module")
def undisturbed(warm_server: WarmServer, prepared_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    runner = copy_of(warm_server, prepared_run, tmp_path_factory.mktemp("undisturbed") / "run")
    assert train_here(runner)[0] == 0
    return outcome(runner)


@pytest.fixture
def ready(warm_server: WarmServer, prepared_run: Path, tmp_path: Path) -> StepRunner:
    """A run that is to train its first batch."""
    return copy_of(warm_server, prepared_run, tmp_path / "run")


def test_killed_at_its_every_write_one_after_the_other_an_update_ends_as_if_it_had_not_been(
    ready: StepRunner, undisturbed: Outcome
) -> None:
    continued = set()
    for number in range(1, 40):
        code, log = train_here(ready, lambda number=number: die_at_write(number))  # type: ignore[misc]
        assert code in (0, -9), log
        assert "WARNING" not in log
        continued |= {line.split("optimizer step ")[1] for line in log.splitlines() if "continuing after" in line}
        if code == 0:
            break
    assert code == 0 and number > 4
    assert len(continued) > 1, continued
    assert outcome(ready) == undisturbed
    assert not [info.key for info in ready.store.list("") if "-partial" in info.key]


def test_states_do_not_change_what_an_update_computes(
    warm_server: WarmServer, tmp_path: Path, undisturbed: Outcome
) -> None:
    without = in_folder(warm_server, tmp_path)
    prepare(without, TINY_CONFIG)
    code, log = train_here(without)
    assert code == 0, log
    assert outcome(without) == undisturbed


def test_the_attempt_says_how_many_states_it_saved_and_how_long_training_waited(ready: StepRunner) -> None:
    assert train_here(ready)[0] == 0
    (attempt,) = [row for row in ledger.list_attempts(ready.database, RUN, 1) if row.step == "train"]
    assert 1 <= attempt.metrics["states_saved"] <= 3
    assert 0.0 < attempt.metrics["saving_blocked_s"]


@pytest.mark.parametrize("kind", ["rebalance", "scheduled"])
def test_a_notice_of_an_end_saves_the_state_and_training_goes_on(
    warm_server: WarmServer, tmp_path: Path, kind: Any, undisturbed: Outcome
) -> None:
    runner = in_folder(warm_server, tmp_path)
    prepare(runner, TINY_CONFIG)

    def notice_after_two_steps() -> None:
        progress = StepContext.progress

        def noticed(self: StepContext, done: int, total: int) -> None:
            progress(self, done, total)
            if done == 2:
                self.interruption.request("test", kind=kind, time_left_s=600.0)

        entrypoint.StepContext.progress = noticed  # type: ignore[method-assign]

    code, log = train_here(runner, notice_after_two_steps)
    assert code == 0, log
    assert "notice of an end: saving the state, training goes on" in log
    (attempt,) = [row for row in ledger.list_attempts(runner.database, RUN, 1) if row.step == "train"]
    assert attempt.metrics["states_saved"] == 1
    assert outcome(runner) == undisturbed


def test_a_state_that_cannot_be_saved_ends_the_step_with_the_cause(ready: StepRunner) -> None:
    def refuse() -> None:
        def fail(*_: Any) -> None:
            raise ServiceUnavailable("store: it refuses to serve")

        train_checkpoints.upload_part = fail  # type: ignore[assignment]

    code, log = train_here(ready, refuse)
    assert (code, log.splitlines()[-1]) == (69, "train: store: it refuses to serve")
    assert states_inside(ready) == []


class Trainer(Holder):
    """A trainer whose only work is to count."""

    batch_step = 0

    def step(self) -> None:
        self.batch_step += 1
        self.pieces["model.weight"].tensor.fill_(self.batch_step)


def saver(folder: Path, every: int) -> tuple[UpdateCheckpoints, Trainer, Interruption]:
    interruption = Interruption()
    context = RankContext(
        step="train",
        run_id=RUN,
        environment=Any,
        store=LocalStore(folder),
        interruption=interruption,  # type: ignore[arg-type]
    )
    context.config = SimpleNamespace(train=SimpleNamespace(checkpoint_every=every))  # type: ignore[assignment]
    trainer = Trainer({"model.weight": Piece((2,), (0,), torch.zeros(2))})
    return UpdateCheckpoints(context, trainer, ParallelLayout.single(), 1), trainer, interruption  # type: ignore[arg-type]


def steps_stored(folder: Path) -> list[str]:
    prefix = paths.partial_checkpoints_prefix(RUN, 1)
    return [state.removeprefix(f"{prefix}/") for state in complete_folders(LocalStore(folder), prefix)]


def weight_stored(folder: Path, step: int) -> float:
    from safetensors.torch import load

    store = LocalStore(folder)
    prefix = paths.partial_checkpoint_prefix(RUN, 1, step)
    (key,) = [info.key for info in store.list(prefix) if info.key.endswith(".safetensors")]
    return float(load(store.get_bytes(key))["model.weight"][0])


def test_what_falls_due_while_a_state_is_on_its_way_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_upload, upload = threading.Event(), train_checkpoints.upload_part

    def slow_upload(*arguments: Any) -> Any:
        may_upload.wait()
        return upload(*arguments)

    monkeypatch.setattr(train_checkpoints, "upload_part", slow_upload)
    checkpoints, trainer, _ = saver(tmp_path, every=2)
    with checkpoints:
        for _ in range(5):  # due after 2 and after 4
            trainer.step()
            assert not checkpoints.between_steps()
        assert steps_stored(tmp_path) == []
        may_upload.set()
        checkpoints._underway.job.result()  # type: ignore[union-attr]
        trainer.step()
        checkpoints.between_steps()
        assert steps_stored(tmp_path) == ["00002"]
    assert steps_stored(tmp_path) == ["00002", "00006"]
    assert [weight_stored(tmp_path, step) for step in (2, 6)] == [2.0, 6.0]  # as they were at that step


def test_the_newest_two_states_are_kept(tmp_path: Path) -> None:
    checkpoints, trainer, _ = saver(tmp_path, every=1)
    with checkpoints:
        for _ in range(4):
            trainer.step()
            assert checkpoints.save_now() == trainer.batch_step
    assert steps_stored(tmp_path) == ["00003", "00004"]
    assert checkpoints.count == 4


def test_asked_to_stop_what_is_on_its_way_is_stored_before_the_newest_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []
    finish = train_checkpoints.finish_state

    def recorded(*arguments: Any) -> None:
        finish(*arguments)
        order.append(int(arguments[2][-5:]))

    monkeypatch.setattr(train_checkpoints, "finish_state", recorded)
    checkpoints, trainer, interruption = saver(tmp_path, every=2)
    with checkpoints:
        for _ in range(2):
            trainer.step()
            assert not checkpoints.between_steps()
        trainer.step()
        interruption.request("SIGTERM")
        assert checkpoints.between_steps()
        assert checkpoints.save_now() == 3
        assert checkpoints.save_now() == 3  # it exists already
    assert order == [2, 3]


def test_without_an_interval_nothing_is_saved_unasked(tmp_path: Path) -> None:
    checkpoints, trainer, interruption = saver(tmp_path, every=0)
    with checkpoints:
        for step in range(1, 5):
            trainer.step()
            if step == 2:
                interruption.request("calendar", kind="scheduled", time_left_s=3600.0)
            assert not checkpoints.between_steps()
    assert steps_stored(tmp_path) == ["00002"]


def test_two_trainers_of_the_same_batch_save_the_same_states(ready: StepRunner, undisturbed: Outcome) -> None:
    results = ready.run_together([stage_argv("train"), stage_argv("train")])
    assert [result.code for result in results] == [0, 0], results[0].log + results[1].log
    assert outcome(ready) == undisturbed
