"""Trainer states that were damaged in the store: passed over loudly, and the update ends as if they had been whole."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from steps import paths
from steps.adapters import ledger
from steps.adapters.publications_manifest import read_manifest
from steps.adapters.tables import publications
from steps.report_notes import run_notes
from steps.reporting import build_run_report
from tests.fixtures_steps import RUN, StepRunner
from tests.training_runs import (
    CONFIG,
    copy_of,
    die_at_write,
    in_folder,
    outcome,
    prepare,
    states_inside,
    train_here,
    until_batch,
)
from workflows.local.warm_client import WarmServer

Outcome = tuple[str, dict[str, Any]]
Damage = Callable[[Path], None]


def remove(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def scribble(file: Path) -> None:
    file.write_bytes(b"[]")


def stored_file(steps: StepRunner, prefix: str, name: str) -> Path:
    """The one file of a directory store whose name begins with `name`."""
    (key,) = [info.key for info in steps.store.list(prefix) if info.key.rsplit("/", 1)[1].startswith(name)]
    return Path(steps.store_uri) / key


def inside(step: int, iteration: int = 1) -> str:
    return paths.partial_checkpoint_prefix(RUN, iteration, step)


def kept_after(states: int) -> Callable[[], None]:
    """A patch that kills the step once so many states exist."""

    def patch() -> None:
        import os
        import signal

        from steps import train_checkpoints

        prune, done = train_checkpoints.prune, 0

        def pruned(*arguments: Any) -> None:
            nonlocal done
            prune(*arguments)
            done += 1
            if done == states:
                os.kill(os.getpid(), signal.SIGKILL)

        train_checkpoints.prune = pruned
        slow_down(train_checkpoints)

    return patch


def slow_down(module: Any) -> None:
    """Let every state exist before training goes on, so that none is left out."""
    between = module.UpdateCheckpoints.between_steps

    def waiting(self: Any) -> bool:
        stop: bool = between(self)
        if self._underway is not None:
            self._underway.job.result()
        return stop

    module.UpdateCheckpoints.between_steps = waiting


@pytest.fixture(scope="module")
def interrupted_run(warm_server: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Killed in the first update, whose states after 2 and 4 optimizer steps exist."""
    folder = tmp_path_factory.mktemp("interrupted")
    runner = in_folder(warm_server, folder)
    prepare(runner, CONFIG)
    code, log = train_here(runner, kept_after(2))
    assert code == -9 and states_inside(runner) == [2, 4], log
    return folder


@pytest.fixture(scope="module")
def undisturbed(warm_server: WarmServer, interrupted_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    runner = copy_of(warm_server, interrupted_run, tmp_path_factory.mktemp("undisturbed") / "run")
    for step in (2, 4):
        shutil.rmtree(Path(runner.store_uri) / inside(step))
    code, log = train_here(runner)
    assert code == 0 and "continuing" not in log, log
    return outcome(runner)


@pytest.fixture
def interrupted(warm_server: WarmServer, interrupted_run: Path, tmp_path: Path) -> StepRunner:
    return copy_of(warm_server, interrupted_run, tmp_path / "run")


def passed_over(steps: StepRunner, iteration: int = 1) -> list[dict[str, str]]:
    record = ledger.get_iteration_metrics(steps.database, RUN, iteration)["train_restore"]["passed_over"]
    return list(record)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model", flip),
        ("optimizer", remove),
        ("optimizer", cut),
        ("state", scribble),
        ("manifest", cut),
        ("manifest", remove),
    ],
)
def test_a_damaged_state_is_passed_over_for_the_one_before_it(
    interrupted: StepRunner, undisturbed: Outcome, name: str, damage: Damage
) -> None:
    damage(stored_file(interrupted, inside(4), name))
    code, log = train_here(interrupted)
    assert code == 0, log
    assert "continuing after optimizer step 2" in log
    assert outcome(interrupted) == undisturbed
    if (name, damage) != ("manifest", remove):  # what has no manifest does not exist
        (warning,) = [line for line in log.splitlines() if "WARNING" in line]
        (noted,) = passed_over(interrupted)
        assert inside(4) in noted["problem"] and noted["instead"] == inside(2) and noted["problem"] in warning


def test_when_all_states_inside_are_damaged_the_update_starts_anew(
    interrupted: StepRunner, undisturbed: Outcome
) -> None:
    for step in (2, 4):
        flip(stored_file(interrupted, inside(step), "model"))
    code, log = train_here(interrupted)
    assert code == 0 and "continuing" not in log, log
    assert [entry["instead"] for entry in passed_over(interrupted)] == [inside(2), paths.checkpoint_prefix(RUN, 0)]
    assert outcome(interrupted) == undisturbed
    told = [note for note in run_notes(build_run_report(interrupted.database, RUN)) if "damaged trainer state" in note]
    assert ["Iteration 1" in note for note in told] == [True, True]


def test_a_state_saved_after_going_on_is_that_of_an_update_that_was_not_interrupted(interrupted: StepRunner) -> None:
    straight = read_manifest(interrupted.store, inside(4)).sha256
    shutil.rmtree(Path(interrupted.store_uri) / inside(4))
    code, log = train_here(interrupted, kept_after(1))
    assert code == -9 and "continuing after optimizer step 2" in log
    assert read_manifest(interrupted.store, inside(4)).sha256 == straight


def test_a_damaged_first_checkpoint_is_one_line_that_says_what_to_do(interrupted: StepRunner) -> None:
    for step in (2, 4):
        shutil.rmtree(Path(interrupted.store_uri) / inside(step))
    flip(stored_file(interrupted, paths.checkpoint_prefix(RUN, 0), "model"))
    code, log = train_here(interrupted)
    assert code == 65, log
    *_, last = log.splitlines()
    assert "there is no checkpoint before it: restore the files of checkpoint 0" in last
    assert "Traceback" not in log


@pytest.fixture(scope="module")
def second_run(warm_server: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is to train its second batch."""
    folder = tmp_path_factory.mktemp("second")
    runner = in_folder(warm_server, folder)
    assert runner.init(CONFIG).code == 0
    runner.iterate(1)
    until_batch(runner, 2)
    return folder


@pytest.fixture(scope="module")
def undisturbed_second(warm_server: WarmServer, second_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    runner = copy_of(warm_server, second_run, tmp_path_factory.mktemp("undisturbed-second") / "run")
    assert train_here(runner, iteration=2)[0] == 0
    return outcome(runner, 2)


@pytest.fixture
def damaged_second(warm_server: WarmServer, second_run: Path, tmp_path: Path) -> StepRunner:
    """Its checkpoint 1 is corrupt."""
    runner = copy_of(warm_server, second_run, tmp_path / "run")
    flip(stored_file(runner, paths.checkpoint_prefix(RUN, 1), "optimizer"))
    return runner


def test_a_damaged_checkpoint_is_made_again_from_the_one_before_it(
    damaged_second: StepRunner, undisturbed_second: Outcome
) -> None:
    code, log = train_here(damaged_second, iteration=2)
    assert code == 0, log
    (warning,) = [line for line in log.splitlines() if "WARNING" in line]
    assert "the file is corrupt" in warning and warning.endswith("making the update before it again")
    assert [entry["instead"] for entry in passed_over(damaged_second, 2)] == [""]
    assert outcome(damaged_second, 2) == undisturbed_second


def test_killed_at_every_write_while_a_checkpoint_is_made_again_the_outcome_is_the_same(
    damaged_second: StepRunner, undisturbed_second: Outcome
) -> None:
    for number in (1, 3, 4, 5):  # model and optimizer, state.json, manifest, and the first write after it
        code, log = train_here(damaged_second, lambda number=number: die_at_write(number), iteration=2)  # type: ignore[misc]
        assert code == -9, log
    code, log = train_here(damaged_second, iteration=2)
    assert code == 0, log
    assert outcome(damaged_second, 2) == undisturbed_second


def test_what_is_made_again_must_have_the_published_weights(damaged_second: StepRunner) -> None:
    with damaged_second.database.transaction() as connection:
        connection.execute(
            update(publications).where(publications.c.policy_version == 1).values(weights_sha256="0" * 64)
        )
    for _ in range(2):  # it is not trusted later either
        code, log = train_here(damaged_second, iteration=2)
        assert code == 65, log
        *_, last = log.splitlines()
        assert "checkpoint 1 was made again and has other weights" in last and "restore its files from a copy" in last
        assert states_inside(damaged_second, 2) == []


def test_two_damaged_checkpoints_in_a_row_are_one_line(damaged_second: StepRunner) -> None:
    cut(stored_file(damaged_second, paths.checkpoint_prefix(RUN, 0), "state"))
    code, log = train_here(damaged_second, iteration=2)
    assert code == 65, log
    *_, last = log.splitlines()
    assert "nor can the one before it be used" in last and "restore the files of checkpoint 1" in last
    assert "Traceback" not in log
