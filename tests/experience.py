"""Runs, units, samples and rewards for the database's tests, and what those tests run in other processes."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from sqlalchemy import event

from steps.adapters.buffer import commit_groups, complete_reward, select_batch, unit_samples
from steps.adapters.database import Database, migrate, open_database
from steps.adapters.leases import finish_unit, lease_unit, return_lease
from steps.adapters.ledger import IterationRow, create_run, list_draws, plan_iteration
from steps.adapters.runs import drop_open_prompts
from steps.adapters.stragglers import drop_late_units, lease_backup
from steps.records import Lease, Reward, RewardStatus, Sample, UnitKind, Worker


def make_sample(uid: str, index: int, versions_T: Sequence[int] = (0, 0, 0)) -> Sample:
    length = len(versions_T)
    return Sample(
        prompt_uid=uid,
        sample_index=index,
        seed=2**64 - 1 - index,
        prompt_ids=(1, 7, 8),
        response_ids_T=tuple(range(3, 3 + length)),
        response_text=f"{uid} é {index}",
        logprobs_T=tuple(-0.5 * (1 + token) for token in range(length)),
        versions_T=tuple(versions_T),
        finish_reason="stop",
        temperature=1.0,
        top_p=0.9,
    )


def make_reward(uid: str, index: int, status: RewardStatus = "ok", value: float = 0.5) -> Reward:
    failed = status != "ok"
    return Reward(
        prompt_uid=uid,
        sample_index=index,
        status=status,
        value=None if failed else value,
        detail=status if failed else "",
    )


def plan(
    db: Database, units: Sequence[Sequence[str]], *, run_id: str = "run-1", iteration: int = 1, policy_version: int = 0
) -> IterationRow:
    """A run (if there is none yet) and a planned iteration with these units of prompt uids."""
    create_run(db, run_id, "{}", "hash")
    uids = [uid for unit in units for uid in unit]
    start = 1000 * (iteration - 1)
    prompts = [(uid, start + position) for position, uid in enumerate(uids)]
    return plan_iteration(db, run_id, iteration, policy_version, prompts, units, start, start + len(uids))


def worker(number: int, step_attempt_id: int = 1) -> Worker:
    return Worker(number=number, pod=f"pod-{number}-{step_attempt_id}", step_attempt_id=step_attempt_id)


def take(
    db: Database,
    kind: UnitKind,
    *,
    run_id: str = "run-1",
    iteration: int = 1,
    lease_s: float = 60.0,
    by: Worker | None = None,
) -> Lease:
    lease = lease_unit(db, run_id, iteration, kind, by or worker(0), lease_s)
    assert lease is not None
    return lease


def roll_out(lease: Lease, versions_T: Sequence[int] = (0, 0, 0), group_size: int = 2) -> list[Sample]:
    return [make_sample(uid, index, versions_T) for uid in lease.unit.prompt_uids for index in range(group_size)]


def complete_rollout(db: Database, lease: Lease, samples: Sequence[Sample]) -> bool:
    """Commit samples; whether that, or an earlier call with this lease, completed the unit."""
    outcome = commit_groups(db, lease, samples)
    return outcome.unit_done and not outcome.lost


def end_without_samples(db: Database, lease: Lease) -> None:
    """A unit that is done and has nothing to score."""
    with db.transaction() as connection:
        reasons = {uid: "no sample" for uid in lease.unit.prompt_uids}
        drop_open_prompts(connection, lease.unit.run_id, lease.unit.iteration, reasons)
        finish_unit(connection, lease)


def complete_next_rollout(db: Database, versions_T: Sequence[int] = (0, 0, 0), **where: Any) -> Lease:
    lease = take(db, "rollout", **where)
    assert complete_rollout(db, lease, roll_out(lease, versions_T))
    return lease


def complete_next_reward(db: Database, statuses: Sequence[RewardStatus] = ("ok", "ok"), **where: Any) -> Lease:
    """Score one unit; sample i of each group gets statuses[i]."""
    lease = take(db, "reward", **where)
    unit = lease.unit
    drawn = unit_samples(db, unit.run_id, unit.iteration, unit.prompt_uids)
    scores = [make_reward(sample.prompt_uid, sample.sample_index, statuses[sample.sample_index]) for sample in drawn]
    assert complete_reward(db, lease, scores)
    return lease


def in_processes(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run the calls at the same time, each in a process of its own, and return their results."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.experience"])
    barrier = context.Barrier(len(calls))
    with ProcessPoolExecutor(len(calls), context, initializer=_remember, initargs=(barrier,)) as pool:
        return [future.result() for future in [pool.submit(_together, function, *call) for call in calls]]


def run_until_killed(function: Callable[..., None], *arguments: Any) -> None:
    """Run a function that kills its own process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.experience"])
    process = context.Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def kill_before(db: Database, statement: str) -> None:
    """SIGKILL this process when it is about to run an SQL statement that starts like this."""

    @event.listens_for(db.engine, "before_cursor_execute")
    def kill(_connection: Any, _cursor: Any, sql: str, *_: Any) -> None:
        if sql.startswith(statement):
            os.kill(os.getpid(), signal.SIGKILL)


def lease_and_complete_all(url: str, number: int) -> list[int]:
    """Lease rollout units until there is none, complete each; returns their numbers."""
    db = open_database(url)
    numbers = []
    while (lease := lease_unit(db, "run-1", 1, "rollout", worker(number), 60.0)) is not None:
        assert complete_rollout(db, lease, roll_out(lease))
        numbers.append(lease.unit.unit)
    return numbers


def lease_once(url: str, number: int, step_attempt_id: int) -> int | None:
    lease = lease_unit(open_database(url), "run-1", 1, "rollout", worker(number, step_attempt_id), 60.0)
    return None if lease is None else lease.unit.unit


def back_up_once(url: str, number: int) -> int | None:
    lease = lease_backup(open_database(url), "run-1", 1, worker(number, number), 60.0, after=0.0, least_wait_s=0.0)
    return None if lease is None else lease.unit.unit


def commit_each(url: str, leases: Sequence[Lease], version: int) -> list[tuple[int, int]]:
    """Commit each lease's unit; numbers of samples (stored, thrown away)."""
    db = open_database(url)
    outcomes = [commit_groups(db, lease, roll_out(lease, [version])) for lease in leases]
    return [(outcome.committed, outcome.duplicates) for outcome in outcomes]


def complete_lease(url: str, lease: Lease, version: int) -> bool:
    return complete_rollout(open_database(url), lease, roll_out(lease, [version]))


def plan_with_version(url: str, policy_version: int) -> int:
    return plan(open_database(url), [[f"p{policy_version}"]], policy_version=policy_version).policy_version


def select_with_staleness(url: str, max_staleness: int) -> tuple[int, int]:
    batch = select_batch(open_database(url), "run-1", 1, 1, max_staleness)
    return batch.num_groups, batch.num_dropped


def migrate_database(url: str) -> None:
    migrate(url)


def lease_and_die(url: str, lease_s: float) -> None:
    take(open_database(url), "rollout", lease_s=lease_s)
    os.kill(os.getpid(), signal.SIGKILL)


def commit_samples_and_die(url: str) -> None:
    complete_next_rollout(open_database(url))
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_lease(url: str, statement: str) -> None:
    db = open_database(url)
    kill_before(db, statement)
    take(db, "rollout")


def die_in_backup(url: str, statement: str) -> None:
    db = open_database(url)
    kill_before(db, statement)
    lease_backup(db, "run-1", 1, worker(5, 5), 60.0, after=0.0, least_wait_s=0.0)


def die_in_return(url: str, lease: Lease, statement: str) -> None:
    db = open_database(url)
    kill_before(db, statement)
    return_lease(db, lease)


def die_in_drop(url: str, statement: str) -> None:
    db = open_database(url)
    kill_before(db, statement)
    drop_late_units(db, "run-1", 1, 0.0)


def die_in_rollout(url: str, lease: Lease, statement: str) -> None:
    db = open_database(url)
    kill_before(db, statement)
    complete_rollout(db, lease, roll_out(lease))


def die_in_reward(url: str, statement: str) -> None:
    db = open_database(url)
    kill_before(db, statement)
    complete_next_reward(db, lease_s=0.0)


def die_in_selection(url: str, statement: str) -> None:
    db = open_database(url)
    kill_before(db, statement)
    select_batch(db, "run-1", 1, 0, 0)


def die_in_plan(url: str, statement: str) -> None:
    db = open_database(url)
    kill_before(db, statement)
    plan(db, [["a"], ["b"]])


def _remember(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _together(function: Callable[..., Any], *arguments: Any) -> Any:
    _barrier.wait(60)
    return function(*arguments)


def fates(db: Database, iteration: int = 1, run_id: str = "run-1") -> dict[str, str]:
    """What came of each prompt: its status, or the first words of the reason why it was dropped."""
    draws = list_draws(db, run_id, iteration)
    return {draw.prompt_uid: (draw.drop_reason or draw.status).split(":")[0] for draw in draws}
