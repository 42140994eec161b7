"""Updates by several ranks, as real processes: what they leave behind, and what happens when one is killed."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from steps import gang, paths, train
from steps.adapters import ledger
from steps.adapters.ledger import AttemptRow
from steps.errors import DataError
from tests import forked
from tests.fixtures_steps import REPOSITORY, RUN, TINY_CONFIG, StepResult, StepRunner, stage_argv
from tests.training_runs import copy_of, in_folder, prepare, states_inside, train_here
from workflows.local.warm_client import WarmServer

PARALLEL = "\n[train]\nranks = 2\ncheckpoint_every = 3\n[moe]\ndispatcher = 'all_to_all'\n"
CONFIG = TINY_CONFIG.replace("optimizer_steps_per_epoch = 8", "optimizer_steps_per_epoch = 8\nepochs = 6") + PARALLEL
"""Long enough to be met in the middle of an update."""
NOTHING = 0
"""As a signal it only asks whether the process is there."""


def train_record(steps: StepRunner, iteration: int = 1) -> dict[str, Any]:
    return ledger.get_iteration_metrics(steps.database, RUN, iteration)["train"]


@pytest.fixture(scope="session")
def prepared_run(warm_server: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared-ranks")
    prepare(in_folder(warm_server, folder), CONFIG)
    return folder


@pytest.fixture
def ready(warm_server: WarmServer, prepared_run: Path, tmp_path: Path) -> StepRunner:
    """A copy of a run that is to train its first batch."""
    return copy_of(warm_server, prepared_run, tmp_path / "run")


def attempts(steps: StepRunner, iteration: int = 1) -> list[AttemptRow]:
    return [row for row in ledger.list_attempts(steps.database, RUN, iteration) if row.step == "train"]


def optimizer_steps_done(progress: Path) -> int:
    return len(progress.read_text().splitlines()) if progress.exists() else 0


def rank_processes() -> list[psutil.Process]:
    """Ranks that were forked by a step, which the warm server of these tests forked."""
    (server,) = [child for child in psutil.Process().children() if "warm_server" in " ".join(child.cmdline())]
    return [rank for step in server.children() for rank in ranks_of(step)]


def ranks_of(launcher: psutil.Process) -> list[psutil.Process]:
    """In order of their start, which is that of their numbers."""
    return sorted(launcher.children(), key=lambda rank: rank.pid)


def run_and_do(
    steps: StepRunner, argv: list[str], when: Callable[[], bool], action: Callable[[list[psutil.Process]], None]
) -> StepResult:
    """Run a step, and do something to its ranks once `when` holds."""
    done = False

    def condition() -> bool:
        nonlocal done
        if not done and when() and len(ranks := rank_processes()) == 2:
            action(ranks)
            done = True
        return done

    result = steps.run_together([argv], signal_when=(condition, NOTHING))[0]  # type: ignore[arg-type]
    assert done, result.log
    return result


def tracked_progress(steps: StepRunner, folder: Path) -> Path:
    progress = folder / "progress"
    steps.env["ARGO_PROGRESS_FILE"] = str(progress)
    return progress


@pytest.fixture(scope="session")
def undisturbed_weights(warm_server: WarmServer, prepared_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    runner = copy_of(warm_server, prepared_run, tmp_path_factory.mktemp("undisturbed") / "run")
    for stage in ("train", "publish"):
        assert runner.step(stage).code == 0
    return runner.final_weights()


def test_two_ranks_train_a_version_that_one_process_publishes(ready: StepRunner, undisturbed_weights: str) -> None:
    for stage in ("train", "publish"):
        result = ready.step(stage)
        assert result.code == 0, result.log
    names = {info.key.rsplit("/", 1)[1] for info in ready.store.list(paths.checkpoint_prefix(RUN, 1))}
    assert names == {
        "manifest.json",
        "state.json",
        *(f"{kind}-0000{rank}-of-00002.safetensors" for kind in ("model", "optimizer") for rank in (0, 1)),
    }
    record = train_record(ready)
    assert (record["transport"]["observed"], record["transport"]["ranks"]) == ("all_to_all", 2)
    assert record["transport"]["sent_bytes"] > 0
    numbers = [step["step"] for step in record["router_steps"]]
    assert numbers == sorted(set(numbers)) and 1 < len(numbers) <= 48
    (attempt,) = attempts(ready)
    assert attempt.transport == record["transport"]
    assert ready.final_weights() == undisturbed_weights


def test_a_finished_update_is_not_made_again_by_any_rank(ready: StepRunner) -> None:
    assert ready.step("train").code == 0
    before = {info.key: info.etag for info in ready.store.list("")}
    again = ready.step("train")
    assert again.code == 0 and "exists already" in again.log
    assert {info.key: info.etag for info in ready.store.list("")} == before


@pytest.mark.parametrize("victim", ["launcher", "everyone"])
def test_sigterm_saves_the_state_of_every_rank_and_the_next_attempt_continues(
    ready: StepRunner, tmp_path: Path, undisturbed_weights: str, victim: str
) -> None:
    progress = tracked_progress(ready, tmp_path)

    def stop(ranks: list[psutil.Process]) -> None:
        launcher = ranks[0].ppid()
        os.kill(launcher, signal.SIGTERM) if victim == "launcher" else os.killpg(launcher, signal.SIGTERM)

    stopped = run_and_do(ready, stage_argv("train"), lambda: optimizer_steps_done(progress) >= 2, stop)
    assert stopped.code == 75, stopped.log
    assert stopped.log.count("state saved after optimizer step") == 1
    resumed = ready.step("train")
    assert resumed.code == 0 and "continuing after optimizer step" in resumed.log, resumed.log
    assert ready.step("publish").code == 0
    assert ready.final_weights() == undisturbed_weights
    assert not [info for info in ready.store.list("") if "-partial" in info.key]


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_is_killed_ends_the_step_and_another_attempt_goes_on_from_the_newest_state(
    ready: StepRunner, undisturbed_weights: str, number: int
) -> None:
    killed = run_and_do(
        ready, stage_argv("train"), lambda: bool(states_inside(ready)), lambda ranks: ranks[number].kill()
    )
    assert killed.code == 137, killed.log
    assert "Traceback" not in killed.log
    assert f"rank {number}" in killed.log.splitlines()[-1]
    (attempt,) = attempts(ready)
    # A first rank that is killed can't say so in the ledger; for another one it does.
    assert attempt.exit_code == (None if number == 0 else 137)
    again = ready.step("train")
    assert again.code == 0 and "continuing after optimizer step" in again.log, again.log
    assert ready.step("publish").code == 0
    assert ready.final_weights() == undisturbed_weights


def test_a_rank_that_fails_for_its_own_reason_gives_the_ledger_the_code_that_the_pod_ends_with(
    ready: StepRunner,
) -> None:
    def refuse_on_the_second_rank() -> None:
        load = train.load_batch

        def loaded(folder: Path) -> Any:
            if os.environ["RANK"] == "1":
                raise DataError("the batch is not what it should be")
            return load(folder)

        train.load_batch = loaded

    code, log = train_here(ready, refuse_on_the_second_rank)
    assert code == 65, log
    (attempt,) = attempts(ready)
    assert (attempt.exit_code, attempt.detail) == (65, "rank 1: the batch is not what it should be")


def test_a_state_that_one_rank_cannot_read_is_passed_over_by_all(ready: StepRunner, undisturbed_weights: str) -> None:
    killed = run_and_do(
        ready, stage_argv("train"), lambda: len(states_inside(ready)) == 2, lambda ranks: ranks[0].kill()
    )
    assert killed.code == 137, killed.log
    older, newest = states_inside(ready)[-2:]
    prefix = paths.partial_checkpoint_prefix(RUN, 1, newest)
    (own,) = [info.key for info in ready.store.list(prefix) if "/optimizer-00001" in info.key]
    (Path(ready.store_uri) / own).unlink()
    again = ready.step("train")
    assert again.code == 0, again.log
    assert "WARNING" in again.log and f"continuing after optimizer step {older} " in again.log
    assert ready.step("publish").code == 0
    assert ready.final_weights() == undisturbed_weights


def test_a_rank_that_hangs_is_named_and_killed(steps: StepRunner, tmp_path: Path) -> None:
    prepare(steps, f"{CONFIG}exchange_timeout_s = 1.0\n")
    progress = tracked_progress(steps, tmp_path)

    def launch() -> None:
        gang.LOST_PEER_GRACE_S = 0.2
        sys.argv = stage_argv("train")
        train.main()

    launcher = forked.start(launch, steps.env)
    while optimizer_steps_done(progress) < 2:
        time.sleep(0.001)
    ranks_of(psutil.Process(launcher.pid))[1].suspend()
    code, log = launcher.finish()
    assert code == 75, log
    assert "rank 1" in log.splitlines()[-1]
    assert steps.step("train").code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_gang_killed_at_a_random_moment_and_run_again_ends_with_the_same_weights(
    ready: StepRunner, number: signal.Signals, undisturbed_weights: str
) -> None:
    moment = random.Random(str(number))
    for _ in range(3):
        due = time.monotonic() + moment.uniform(0.0, 1.0)
        killed = ready.run_together(
            [stage_argv("train")], signal_when=(lambda due=due: time.monotonic() > due, number)
        )[0]
        assert killed.code in (0, 75, 128 + number), killed.log
    result = ready.step("train")
    assert result.code == 0, result.log
    assert ready.step("publish").code == 0
    assert ready.final_weights() == undisturbed_weights


def test_two_gangs_at_the_same_time_have_one_outcome(ready: StepRunner, undisturbed_weights: str) -> None:
    results = ready.run_together([stage_argv("train"), stage_argv("train")])
    assert [result.code for result in results] == [0, 0], results[0].log + results[1].log
    assert ready.step("publish").code == 0
    assert ready.final_weights() == undisturbed_weights


def test_torchruns_ranks_are_taken_as_they_come(ready: StepRunner, undisturbed_weights: str) -> None:
    command = [sys.executable, "-m", "steps.torchrun", "--nproc-per-node=2", "--standalone", "-m", "--"]
    done = subprocess.run(
        [*command, *stage_argv("train")], cwd=REPOSITORY, env=os.environ | ready.env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ready.step("publish").code == 0
    assert ready.final_weights() == undisturbed_weights


def test_another_number_of_ranks_than_configured_is_refused(ready: StepRunner) -> None:
    ready.env |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ready.env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    result = ready.step("train")
    assert result.code == 78
    assert "train.ranks = 2: 1 ranks were started (WORLD_SIZE)" in result.log.splitlines()[-1]


def test_what_the_first_rank_finds_missing_is_one_line_and_keeps_nobody_waiting(steps: StepRunner) -> None:
    assert steps.init(CONFIG).code == 0
    result = steps.step("train")
    assert result.code == 65
    (line,) = result.log.splitlines()
    assert line.startswith("train: ") and "plan" in line


def test_weights_spread_by_fsdp_and_a_reference_model_train_too(steps: StepRunner) -> None:
    config = TINY_CONFIG + PARALLEL.replace("ranks = 2", "ranks = 2\nfsdp_size = 2\nloss = { kl_coefficient = 0.1 }")
    prepare(steps, config)
    result = steps.step("train")
    assert result.code == 0, result.log
    assert train_record(steps)["metrics"]["actor/kl_loss"] > 0.0
    assert steps.step("publish").code == 0
