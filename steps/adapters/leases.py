"""Leases on work units: who works on what, until when.

A lease is the right to complete a unit. Its token fences a late owner: once another worker has leased the unit, the old
token is worth nothing. A lease that expired but that nobody else took is still good: heartbeat and commits succeed, for
nobody can have done the work in between. Expiry is judged by the database's clock alone.

A worker need not wait for the leases of its own predecessor, the process that had its number before: whoever starts a
worker again knows that the last one is gone, and if it is not, its token is worth nothing any more.

Every function may be repeated with the same lease: what is done already is not done again.
"""

import json
import secrets
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Select, and_, func, or_, select, update

from steps.adapters import lease_history
from steps.adapters.database import Database, database_clock
from steps.adapters.retries import retried
from steps.adapters.tables import unit_leases, work_units
from steps.errors import DataError
from steps.records import Lease, UnitKind, Worker, WorkUnit

CLOCK_JITTER_S = 1.0
"""What the database's clock may be set back by without a lease being questioned."""


@dataclass(frozen=True, slots=True)
class UnitState:
    """What a lease finds of its unit, which stays so until the transaction ends."""

    is_owned: bool
    """The unit isn't done, and the lease is good."""
    is_done: bool


def lease_unit(
    db: Database, run_id: str, iteration: int, kind: UnitKind, worker: Worker, lease_s: float
) -> Lease | None:
    """Lease the first unit that is free; None when there is none at this moment.

    Free is what is pending, whose lease has expired, and what the worker's predecessor had.
    """
    return _lease_unit(db, run_id, iteration, kind, worker, lease_s, secrets.token_hex(16))


@retried
def _lease_unit(
    db: Database, run_id: str, iteration: int, kind: UnitKind, worker: Worker, lease_s: float, token: str
) -> Lease | None:
    statement = (
        update(work_units)
        .where(*_of_kind(run_id, iteration, kind), work_units.c.unit == _first_free(run_id, iteration, kind, worker))
        .values(
            state="leased",
            token=token,
            worker=worker.name,
            attempts=work_units.c.attempts + 1,
            leased_at=database_clock(),
            expires_at=database_clock() + lease_s,
        )
        .returning(work_units.c.unit, work_units.c.attempts, work_units.c.prompt_uids_json)
    )
    with db.transaction(durable=False) as connection:
        known = lease_history.find_attempt(connection, token)
        if known is not None:  # the answer of an earlier call was lost
            return read_lease(connection, run_id, iteration, kind, known, worker, token)
        row = connection.execute(statement).one_or_none()
        if row is None:
            return None
        uids = tuple(json.loads(row.prompt_uids_json))
        unit = WorkUnit(run_id=run_id, iteration=iteration, kind=kind, unit=row.unit, prompt_uids=uids)
        lease = Lease(unit=unit, token=token, attempt=row.attempts, worker=worker, is_backup=False)
        lease_history.begin_lease(connection, lease)
    return lease


def heartbeat(db: Database, lease: Lease, lease_s: float) -> bool:
    """Extend a lease to `lease_s` from now; False when it was lost or the unit is done.

    Raises ServiceUnavailable at the first failure: the next heartbeat is the repetition.
    """
    until = "backup_expires_at" if lease.is_backup else "expires_at"
    statement = update(work_units).where(_owned(lease)).values({until: database_clock() + lease_s})
    with db.transaction(durable=False) as connection:
        if connection.execute(statement).rowcount == 0:
            return False
        lease_history.see(connection, lease)
    return True


def is_owned(db: Database, lease: Lease) -> bool:
    """False when the lease was lost or the unit is done. Raises ServiceUnavailable at the first failure."""
    with db.read() as connection:
        return connection.execute(select(work_units.c.unit).where(_owned(lease))).one_or_none() is not None


@retried
def return_lease(db: Database, lease: Lease) -> bool:
    """Give a unit back undone, for anyone to lease at once; False when the lease was lost, or the unit is done."""
    place: dict[str, str | None] = {"backup_token": None, "backup_expires_at": None}
    if not lease.is_backup:
        place = {"state": "pending", "token": None, "expires_at": None}
    with db.transaction(durable=False) as connection:
        if connection.execute(update(work_units).where(_owned(lease)).values(place)).rowcount == 1:
            lease_history.end_returned(connection, lease)
        return lease_history.outcome_of(connection, lease) == "returned"


@retried
def record_abandoned(db: Database, lease: Lease, tokens: int) -> None:
    """Count response tokens that were sampled under a lease and thrown away."""
    with db.transaction(durable=False) as connection:
        lease_history.add_counts(connection, lease, abandoned_tokens=tokens)


@retried
def outstanding(db: Database, run_id: str, iteration: int, kind: UnitKind) -> int:
    """Number of units that aren't done, leased ones included."""
    statement = select(func.count()).where(*_of_kind(run_id, iteration, kind), work_units.c.state != "done")
    with db.read() as connection:
        return int(connection.execute(statement).scalar_one())


def require_all_done(connection: Connection, run_id: str, iteration: int) -> None:
    """Raise DataError while a rollout or reward unit of the iteration isn't done; within the caller's transaction.

    A unit that is done stays so, and a rollout unit creates its reward unit as it ends: once this holds, it holds.
    """
    statement = (
        select(work_units.c.kind, func.count())
        .where(
            work_units.c.run_id == run_id,
            work_units.c.iteration == iteration,
            work_units.c.state != "done",
        )
        .group_by(work_units.c.kind)
        .order_by(work_units.c.kind.desc())
    )
    counts = [(kind, count) for kind, count in connection.execute(statement)]
    if counts:
        units = " and ".join(f"{count} {kind} unit{'s' if count > 1 else ''}" for kind, count in counts)
        verb = "is" if sum(count for _, count in counts) == 1 else "are"
        raise DataError(
            f"run {run_id}, iteration {iteration}: {units} {verb} not done yet; "
            "run rollout and reward to their end first"
        )


def lock_unit(connection: Connection, lease: Lease) -> UnitState:
    """Hold the lease's unit until the transaction ends: nobody else can commit to it or lease it meanwhile."""
    unit = lease.unit
    statement = select(work_units.c.state, work_units.c.token, work_units.c.backup_token).where(
        *_of_kind(unit.run_id, unit.iteration, unit.kind), work_units.c.unit == unit.unit
    )
    row = connection.execute(statement.with_for_update()).one()
    is_done = row.state == "done"
    token = row.backup_token if lease.is_backup else row.token
    return UnitState(is_owned=not is_done and token == lease.token, is_done=is_done)


def finish_unit(connection: Connection, lease: Lease) -> None:
    """Mark a locked unit as done by this lease, within the caller's transaction."""
    statement = (
        update(work_units)
        .where(_owned(lease))
        .values(
            state="done",
            completed_at=database_clock(),
            expires_at=None,
            backup_token=None,
            backup_expires_at=None,
        )
    )
    connection.execute(statement)
    lease_history.end_of_unit(connection, lease.unit, completed_by=lease)


def read_lease(
    connection: Connection,
    run_id: str,
    iteration: int,
    kind: UnitKind,
    found: tuple[int, int],
    worker: Worker,
    token: str,
    *,
    is_backup: bool = False,
) -> Lease:
    """The lease of `found`: (unit, attempt)."""
    number, attempt = found
    uids = connection.execute(
        select(work_units.c.prompt_uids_json).where(*_of_kind(run_id, iteration, kind), work_units.c.unit == number)
    ).scalar_one()
    unit = WorkUnit(run_id=run_id, iteration=iteration, kind=kind, unit=number, prompt_uids=tuple(json.loads(uids)))
    return Lease(unit=unit, token=token, attempt=attempt, worker=worker, is_backup=is_backup)


def abandoned_tokens(run_id: str, iteration: int, kind: UnitKind, worker: Worker) -> Select[tuple[str]]:
    """Tokens of open leases that `worker` need not wait for.

    Those of the processes that had its number before, and those that were last seen later than now: the database's
    clock was set back since, and nobody knows when they expire.
    """
    is_predecessors = and_(
        unit_leases.c.worker == worker.number, unit_leases.c.step_attempt_id < worker.step_attempt_id
    )
    return select(unit_leases.c.token).where(
        unit_leases.c.run_id == run_id,
        unit_leases.c.iteration == iteration,
        unit_leases.c.kind == kind,
        unit_leases.c.ended_at.is_(None),
        or_(is_predecessors, unit_leases.c.last_seen_at > database_clock() + CLOCK_JITTER_S),
    )


def _of_kind(run_id: str, iteration: int, kind: UnitKind) -> tuple[ColumnElement[bool], ...]:
    return work_units.c.run_id == run_id, work_units.c.iteration == iteration, work_units.c.kind == kind


def _first_free(run_id: str, iteration: int, kind: UnitKind, worker: Worker) -> ColumnElement[int]:
    # PostgreSQL judges again a row that it had to wait for, but only by the row itself: what is taken says so there.
    candidates = work_units.alias("candidates")
    is_free = or_(
        candidates.c.expires_at <= database_clock(),
        candidates.c.token.in_(abandoned_tokens(run_id, iteration, kind, worker)),
    )
    return (
        select(candidates.c.unit)
        .where(
            candidates.c.run_id == run_id,
            candidates.c.iteration == iteration,
            candidates.c.kind == kind,
            or_(candidates.c.state == "pending", and_(candidates.c.state == "leased", is_free)),
        )
        .order_by(candidates.c.unit)
        .limit(1)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )


def _owned(lease: Lease) -> ColumnElement[bool]:
    token = work_units.c.backup_token if lease.is_backup else work_units.c.token
    return and_(
        *_of_kind(lease.unit.run_id, lease.unit.iteration, lease.unit.kind),
        work_units.c.unit == lease.unit.unit,
        work_units.c.state != "done",
        token == lease.token,
    )
