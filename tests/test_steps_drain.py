"""Workers that are killed, told to leave, or slow: real processes; what was stored stays, and others go on at once."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from steps.adapters import ledger
from steps.adapters.leases import lease_unit
from tests.experience import worker
from tests.fixtures_steps import RUN, STAGES, TINY_CONFIG, StepRunner, stage_argv

LONG_LEASES = TINY_CONFIG.replace("lease_s = 2.0", "lease_s = 600.0\nprompts_per_batch = 1")


def stored(steps: StepRunner, samples: int) -> Callable[[], bool]:
    """Holds once that many samples of the run are stored."""
    return lambda: sum(row.samples for row in ledger.list_unit_leases(steps.database, RUN)) >= samples


def begun_with(steps: StepRunner, config: str = LONG_LEASES) -> None:
    assert steps.init(config).code == 0
    assert steps.step("plan").code == 0


def sums(steps: StepRunner) -> tuple[int, int]:
    rows = [row for row in ledger.list_unit_leases(steps.database, RUN) if row.kind == "rollout"]
    return sum(row.samples for row in rows), sum(row.duplicate_samples for row in rows)


def test_the_successor_of_a_killed_worker_goes_on_at_once_where_it_was_killed(steps: StepRunner) -> None:
    begun_with(steps)
    killed = steps.run_together([stage_argv("rollout")], signal_when=(stored(steps, 4), signal.SIGKILL))[0]
    assert killed.code == 137
    # A lease of 600 s is not waited for.
    again = steps.step("rollout")
    assert again.code == 0, again.log
    assert sums(steps) == (32, 0), "nothing that was stored is sampled again"
    outcomes = {row.outcome for row in ledger.list_unit_leases(steps.database, RUN) if row.kind == "rollout"}
    assert outcomes <= {"done", "lost"}


def test_a_notice_file_drains_a_worker(steps: StepRunner, tmp_path: Path) -> None:
    begun_with(steps)
    notice = tmp_path / "notice"
    steps.env["MOERL_NOTICE_FILE"] = str(notice)
    notice.write_text(json.dumps({"kind": "stop", "reason": "spot", "at": 4102444800}))
    # Its units are held by another worker: it waits, and would for ever.
    held = [lease_unit(steps.database, RUN, 1, "rollout", worker(9), 600.0) for _ in range(4)]
    assert all(held)
    result = steps.step("rollout")
    assert result.code == 75, result.log
    assert "notice: stop (spot, " in result.log and "interrupted by spot; run the same command again" in result.log
    (interruption,) = ledger.list_interruptions(steps.database, RUN)
    assert (interruption.step, interruption.kind, interruption.reason) == ("rollout", "stop", "spot")
    assert interruption.deadline_at == pytest.approx(4102444800, abs=60)


def test_an_interrupted_worker_has_returned_its_lease_and_stored_its_whole_batches(steps: StepRunner) -> None:
    begun_with(steps)
    stopped = steps.run_together([stage_argv("rollout")], signal_when=(stored(steps, 4), signal.SIGTERM))[0]
    assert stopped.code == 75, stopped.log
    (attempt,) = [row for row in ledger.list_attempts(steps.database, RUN) if row.step == "rollout"]
    samples, duplicates = sums(steps)
    assert (attempt.metrics["samples"], duplicates) == (samples, 0)
    assert all(row.ended_at is not None for row in ledger.list_unit_leases(steps.database, RUN))
    other = steps.step("rollout", worker=1)
    assert other.code == 0, other.log
    assert sums(steps) == (32, 0)


def test_a_unit_of_a_worker_that_hangs_is_sampled_by_an_idle_one(steps: StepRunner) -> None:
    begun_with(steps, LONG_LEASES.replace("prompts_per_batch", "backup_after = 1.0\nprompts_per_batch"))
    held = lease_unit(steps.database, RUN, 1, "rollout", worker(9), 600.0)
    assert held is not None
    result = steps.step("rollout")
    assert result.code == 0, result.log
    assert "sampled here, too, since another worker takes long" in result.log
    assert sums(steps) == (32, 0)


def test_weights_are_the_same_whatever_was_killed(steps: StepRunner, warm_server, tmp_path: Path) -> None:
    calm = StepRunner(
        warm_server, tmp_path / "calm", f"{tmp_path}/calm/store", f"sqlite:///{tmp_path}/calm/moerl.sqlite"
    )
    calm.init(LONG_LEASES)
    calm.iterate(1)
    begun_with(steps)
    for samples, number in ((4, signal.SIGKILL), (12, signal.SIGTERM), (20, signal.SIGKILL)):
        steps.run_together([stage_argv("rollout")], signal_when=(stored(steps, samples), number))
    for stage in STAGES[1:]:
        result = steps.step(stage)
        assert result.code == 0, result.log
    assert steps.final_weights() == calm.final_weights()
