"""Rollout units that take too long: an idle worker does them, too, or an iteration goes on without them."""

import json
import secrets
import statistics

from sqlalchemy import ColumnElement, Connection, Select, and_, exists, func, or_, select, update

from steps.adapters import lease_history
from steps.adapters.database import Database, database_clock
from steps.adapters.leases import abandoned_tokens, read_lease
from steps.adapters.retries import retried
from steps.adapters.runs import add_unit, drop_open_prompts, lock_run
from steps.adapters.sample_rows import committed_groups
from steps.adapters.tables import unit_leases, work_units
from steps.records import Lease, Worker, WorkUnit

DROP_REASON = "not sampled before the straggler deadline"
LEAST_WAIT_S = 2.0
"""Shorter delays are no reason to sample a unit twice."""


def lease_backup(
    db: Database,
    run_id: str,
    iteration: int,
    worker: Worker,
    lease_s: float,
    after: float,
    least_wait_s: float = LEAST_WAIT_S,
) -> Lease | None:
    """A second lease on the rollout unit that has made no progress for longest; None when none is slow.

    Slow is a unit on which nothing was committed for `after` times the median seconds of the iteration's leases that
    completed a unit, and for at least `least_wait_s`. Both workers may commit: the first one to commit a group wins.
    To be called when nothing is free. A unit has at most one backup at a time.
    """
    wait_s = _wait_for_slow(db, run_id, iteration, worker, after, least_wait_s)
    if wait_s is None:
        return None
    return _lease_backup(db, run_id, iteration, worker, lease_s, wait_s, secrets.token_hex(16))


@retried
def _wait_for_slow(
    db: Database, run_id: str, iteration: int, worker: Worker, after: float, least_wait_s: float
) -> float | None:
    """Seconds without progress that make a unit slow; None when there is no such unit."""
    with db.read() as connection:
        seconds = _seconds_of_units(connection, run_id, iteration)
        if not seconds:
            return None
        wait_s = max(least_wait_s, after * statistics.median(seconds))
        found = connection.execute(_slowest(run_id, iteration, worker, wait_s)).one_or_none()
    return None if found is None else wait_s


@retried
def _lease_backup(
    db: Database, run_id: str, iteration: int, worker: Worker, lease_s: float, wait_s: float, token: str
) -> Lease | None:
    """As `leases._lease_unit`: may be repeated with the same token."""
    slowest = _slowest(run_id, iteration, worker, wait_s, lock=True).scalar_subquery()
    statement = (
        update(work_units)
        .where(_of_iteration(run_id, iteration), work_units.c.unit == slowest)
        .values(backup_token=token, backup_expires_at=database_clock() + lease_s, attempts=work_units.c.attempts + 1)
        .returning(work_units.c.unit, work_units.c.attempts)
    )
    with db.transaction(durable=False) as connection:
        known = lease_history.find_attempt(connection, token)
        if known is not None:
            return read_lease(connection, run_id, iteration, "rollout", known, worker, token, is_backup=True)
        row = connection.execute(statement).one_or_none()
        if row is None:
            return None
        found = (row.unit, row.attempts)
        lease = read_lease(connection, run_id, iteration, "rollout", found, worker, token, is_backup=True)
        lease_history.begin_lease(connection, lease)
    return lease


@retried
def drop_late_units(db: Database, run_id: str, iteration: int, after_s: float) -> int:
    """End the rollout units that aren't done, and record their open prompts as dropped; returns how many units.

    Only when at least one unit is done and `after_s` seconds have passed since the first of those was leased. What was
    committed of a unit stays and goes on to be scored. A worker that still holds one has lost its lease: what it would
    commit is refused.
    """
    of_iteration = _of_iteration(run_id, iteration)
    begun = select(func.min(work_units.c.leased_at)).where(of_iteration, work_units.c.state == "done")
    late = and_(of_iteration, work_units.c.state != "done", begun.scalar_subquery() + after_s <= database_clock())
    drop = (
        update(work_units)
        .where(late)
        .values(
            state="done",
            token=None,
            expires_at=None,
            backup_token=None,
            backup_expires_at=None,
            completed_at=database_clock(),
        )
        .returning(work_units.c.unit, work_units.c.prompt_uids_json)
    )
    # Every idle worker asks many times a second: only one that finds something takes the run's lock.
    with db.read() as connection:
        if not connection.execute(select(exists().where(late))).scalar_one():
            return 0
    with db.transaction() as connection:
        lock_run(connection, run_id)
        dropped = connection.execute(drop).all()
        for number, uids_json in dropped:
            uids = tuple(json.loads(uids_json))
            unit = WorkUnit(run_id=run_id, iteration=iteration, kind="rollout", unit=number, prompt_uids=uids)
            _end_unsampled(connection, unit)
    return len(dropped)


def _end_unsampled(connection: Connection, unit: WorkUnit) -> None:
    sampled = committed_groups(connection, unit)
    drop_open_prompts(
        connection,
        unit.run_id,
        unit.iteration,
        {uid: DROP_REASON for uid in unit.prompt_uids if uid not in sampled},
    )
    if sampled:
        scorable = [uid for uid in unit.prompt_uids if uid in sampled]
        add_unit(connection, unit.run_id, unit.iteration, "reward", unit.unit, scorable)
    lease_history.end_of_unit(connection, unit, completed_by=None)


def _seconds_of_units(connection: Connection, run_id: str, iteration: int) -> list[float]:
    statement = select(unit_leases.c.ended_at - unit_leases.c.leased_at).where(
        unit_leases.c.run_id == run_id,
        unit_leases.c.iteration == iteration,
        unit_leases.c.kind == "rollout",
        unit_leases.c.outcome == "done",
    )
    return list(connection.execute(statement).scalars())


def _slowest(run_id: str, iteration: int, worker: Worker, wait_s: float, *, lock: bool = False) -> Select[tuple[int]]:
    """The unit whose lease, another worker's, has made no progress for longest, of those for more than `wait_s`."""
    slow, lease = work_units.alias("slow"), unit_leases.alias("lease")
    progress_at = func.coalesce(lease.c.last_commit_at, lease.c.leased_at)
    has_no_backup = or_(
        slow.c.backup_token.is_(None),
        slow.c.backup_expires_at <= database_clock(),
        slow.c.backup_token.in_(abandoned_tokens(run_id, iteration, "rollout", worker)),
    )
    statement = (
        select(slow.c.unit)
        .join(lease, lease.c.token == slow.c.token)
        .where(
            slow.c.run_id == run_id,
            slow.c.iteration == iteration,
            slow.c.kind == "rollout",
            slow.c.state == "leased",
            has_no_backup,
            lease.c.step_attempt_id != worker.step_attempt_id,
            progress_at + wait_s < database_clock(),
        )
        .order_by(progress_at, slow.c.unit)
        .limit(1)
    )
    return statement.with_for_update(skip_locked=True, of=slow) if lock else statement


def _of_iteration(run_id: str, iteration: int) -> ColumnElement[bool]:
    return and_(work_units.c.run_id == run_id, work_units.c.iteration == iteration, work_units.c.kind == "rollout")
