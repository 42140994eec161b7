"""What a fault cost, from hand-made histories of one iteration."""

from dataclasses import replace

from steps.adapters.attempts import AttemptRow
from steps.adapters.lease_history import UnitLeaseRow
from workflows.chaos_costs import History, cost_of
from workflows.chaos_log import FaultRecord
from workflows.chaos_report import first_difference, summarize, summary_lines

KILL = FaultRecord(
    fault=0,
    kind="sigkill",
    step="rollout",
    iteration=1,
    worker=0,
    attempt=0,
    pod="pod-a",
    started_at_s=100.0,
    struck_at_s=110.0,
    killed_at_s=None,
    released_at_s=None,
    ended_at_s=110.5,
    exit_code=137,
    damaged="",
)


def lease(
    token: str, pod: str, unit: int, leased_at: float, outcome: str | None = "done", **fields: object
) -> UnitLeaseRow:
    row = UnitLeaseRow(
        token=token,
        run_id="r",
        iteration=1,
        kind="rollout",
        unit=unit,
        attempt=1,
        worker=0,
        pod=pod,
        step_attempt_id=1,
        is_backup=False,
        leased_at=leased_at,
        last_seen_at=leased_at,
        first_commit_at=None,
        last_commit_at=None,
        ended_at=None,
        outcome=outcome,
        samples=0,
        tokens=0,
        duplicate_samples=0,
        duplicate_tokens=0,
        abandoned_tokens=0,
    )
    return replace(row, **fields)  # type: ignore[arg-type]


def attempt(pod: str, started_at: float, ended_at: float | None, code: int | None, step: str = "rollout") -> AttemptRow:
    return AttemptRow(
        attempt_id=int(started_at),
        run_id="r",
        iteration=1,
        step=step,
        worker="0" if step == "rollout" else None,
        pod=pod,
        node="n",
        capacity_type="local",
        started_at=started_at,
        ended_at=ended_at,
        exit_code=code,
        detail="",
        provenance={},
        metrics={},
        transport={},
    )


DONE = lease("1", "pod-a", 0, 101.0, ended_at=105.0, samples=8, tokens=80, first_commit_at=105.0, last_commit_at=105.0)
OTHER = lease("3", "pod-c", 2, 101.0, ended_at=111.0, samples=8, tokens=80, first_commit_at=111.0, last_commit_at=111.0)
HALF = lease(
    "2", "pod-a", 1, 105.0, "lost", ended_at=112.0, samples=2, tokens=20, first_commit_at=108.0, last_commit_at=108.0
)
REST = lease("4", "pod-b", 1, 112.0, ended_at=116.0, samples=6, tokens=66, first_commit_at=114.0, last_commit_at=116.0)
ATTEMPTS = (attempt("pod-a", 100.0, None, None), attempt("pod-b", 111.5, 117.0, 0), attempt("pod-c", 100.0, 117.0, 0))


def test_a_killed_workers_unit_is_finished_by_its_successor() -> None:
    cost = cost_of(KILL, History(attempts=ATTEMPTS, leases=(DONE, OTHER, HALF, REST)))
    assert (cost.detected_s, cost.restarted_s, cost.recovered_s) == (0.5, 1.5, 4.0)
    assert (cost.samples_completed, cost.samples_returned, cost.samples_lost) == (10, 0, 6)
    assert (cost.wasted_tokens, cost.tokens_are_bound, cost.units_wasted) == (66, True, 1)
    assert cost.wasted_s == 2.5  # from its last commit until its end


def test_a_returned_unit_is_no_loss_and_its_tokens_are_counted() -> None:
    notice = replace(KILL, kind="notice", exit_code=75)
    returned = replace(HALF, outcome="returned", ended_at=110.4, abandoned_tokens=12)
    cost = cost_of(notice, History(attempts=ATTEMPTS, leases=(DONE, OTHER, returned, REST)))
    assert (cost.samples_returned, cost.samples_lost) == (6, 0)
    assert (cost.wasted_tokens, cost.tokens_are_bound) == (12, False)


def test_a_worker_that_was_killed_between_two_units_wastes_nothing() -> None:
    cost = cost_of(KILL, History(attempts=ATTEMPTS, leases=(DONE, OTHER)))
    assert (cost.units_wasted, cost.wasted_tokens, cost.wasted_s, cost.samples_completed) == (0, 0, 0.0, 8)
    assert cost.recovered_s == 7.0  # nothing was left to commit: its successor has seen that


def test_a_frozen_worker_is_noticed_when_its_unit_is_leased_again_and_its_late_work_is_duplicated() -> None:
    freeze = replace(KILL, kind="freeze", exit_code=0, released_at_s=115.0, ended_at_s=118.0)
    late = replace(HALF, outcome="expired", duplicate_samples=6, duplicate_tokens=66)
    taken = replace(REST, pod="pod-c", is_backup=True)
    cost = cost_of(freeze, History(attempts=ATTEMPTS[::2], leases=(DONE, OTHER, late, taken)))
    assert (cost.detected_s, cost.restarted_s, cost.recovered_s) == (2.0, None, 4.0)
    assert (cost.samples_duplicated, cost.wasted_tokens, cost.tokens_are_bound) == (6, 66, False)


def test_a_step_that_commits_once_has_recovered_when_a_later_attempt_has_ended_well() -> None:
    killed = replace(KILL, step="train", worker=-1)
    attempts = (
        attempt("pod-a", 100.0, None, None, "train"),
        attempt("pod-b", 111.0, 112.0, 75, "train"),
        attempt("pod-c", 113.0, 119.0, 0, "train"),
    )
    cost = cost_of(killed, History(attempts=attempts, leases=()))
    assert (cost.restarted_s, cost.recovered_s, cost.wasted_s) == (1.0, 9.0, 10.5)


def test_a_step_that_ended_well_all_the_same_cost_nothing() -> None:
    asked = replace(KILL, kind="sigterm", step="publish", worker=-1, exit_code=0)
    cost = cost_of(asked, History(attempts=(attempt("pod-a", 100.0, 110.4, 0, "publish"),), leases=()))
    assert (cost.detected_s, cost.restarted_s, cost.recovered_s, cost.wasted_s) == (None, None, None, 0.0)


def test_a_summary_counts_pods_that_ended_and_units() -> None:
    history = History(attempts=ATTEMPTS, leases=(DONE, OTHER, HALF, REST))
    asked = replace(KILL, kind="sigterm", step="publish", worker=-1, exit_code=0)
    summary = summarize([cost_of(KILL, history), cost_of(asked, history)])
    assert (summary["struck"], summary["ended_a_pod"], summary["by_kind"]) == (2, 1, {"sigkill": 1, "sigterm": 1})
    assert summary["rollout_recovery_s"] == {"median": 4.0, "max": 4.0}
    assert (summary["units_wasted_per_kill_max"], summary["samples_lost"]) == (1, 6)


def test_the_first_version_that_differs_is_named() -> None:
    assert first_difference(["a", "b"], ["a", "b"]) is None
    assert first_difference(["a", "b", "c"], ["a", "x", "c"]) == 1
    assert first_difference(["a", "b"], ["a", "b", "c"]) == 2


def test_weights_that_are_still_missing_are_not_called_different() -> None:
    report = {"summary": summarize([]), "missed": 0, "baseline": "calm", "first_different_version": 2, "versions": 2}
    assert summary_lines(report | {"state": "interrupted"})[-1] == (
        "weights so far the same as the undisturbed run calm: 2 versions; this run is interrupted"
    )
    assert summary_lines(report | {"state": "finished"})[-1].startswith("weights NOT those of")


def test_nothing_is_said_of_rollout_workers_that_were_not_hit() -> None:
    report = {"summary": summarize([]), "missed": 0, "baseline": None}
    assert not any(line.startswith("again") for line in summary_lines(report))
