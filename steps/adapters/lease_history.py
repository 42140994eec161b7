"""The history of leases: who had which unit when, how it ended, and what came of it."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, case, func, select, update

from steps.adapters.database import Database, database_clock
from steps.adapters.retries import retried
from steps.adapters.tables import unit_leases
from steps.records import Lease, WorkUnit


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitLeaseRow:
    """One lease; times are UTC seconds by the database's clock. Without `ended_at` nobody has missed it yet."""

    token: str
    run_id: str
    iteration: int
    kind: str
    unit: int
    attempt: int
    worker: int
    """Number of the worker in its iteration."""
    pod: str
    step_attempt_id: int
    """The process's entry among the attempts."""
    is_backup: bool
    leased_at: float
    last_seen_at: float
    """Of the lease, its last heartbeat or its last commit."""
    first_commit_at: float | None
    last_commit_at: float | None
    ended_at: float | None
    outcome: str | None
    """done: it completed the unit. returned: given back. expired: taken by another worker after a silence. lost: taken
    by the worker's own successor, or the unit ended without it."""
    samples: int
    """Stored under this lease (of a reward unit: scored)."""
    tokens: int
    """Response tokens of those."""
    duplicate_samples: int
    """Sampled, but another lease's commit was first; counted again when such a commit had to be repeated."""
    duplicate_tokens: int
    abandoned_tokens: int
    """Sampled and thrown away: the drain budget was spent, or the lease lost. A killed worker leaves no count."""


@retried
def list_unit_leases(db: Database, run_id: str) -> list[UnitLeaseRow]:
    """All leases of the run in the order of their beginning."""
    statement = select(unit_leases).where(unit_leases.c.run_id == run_id)
    with db.read() as connection:
        rows = connection.execute(statement.order_by(unit_leases.c.leased_at, unit_leases.c.token)).mappings()
        return [UnitLeaseRow(**row) for row in rows]


def begin_lease(connection: Connection, lease: Lease) -> None:
    """Add an open lease, and end the one in whose place it comes."""
    worker = lease.worker
    succeeds = and_(unit_leases.c.worker == worker.number, unit_leases.c.step_attempt_id < worker.step_attempt_id)
    if lease.attempt > 1:
        predecessor = and_(of_unit(lease.unit), unit_leases.c.is_backup.is_(lease.is_backup))
        _end(connection, predecessor, case((succeeds, "lost"), else_="expired"))
    connection.execute(
        unit_leases.insert().values(
            token=lease.token,
            run_id=lease.unit.run_id,
            iteration=lease.unit.iteration,
            kind=lease.unit.kind,
            unit=lease.unit.unit,
            attempt=lease.attempt,
            worker=worker.number,
            pod=worker.pod,
            step_attempt_id=worker.step_attempt_id,
            is_backup=lease.is_backup,
            leased_at=database_clock(),
            last_seen_at=database_clock(),
        )
    )


def see(connection: Connection, lease: Lease) -> None:
    """Its worker was heard of."""
    connection.execute(update(unit_leases).where(_is(lease)).values(last_seen_at=database_clock()))


def end_returned(connection: Connection, lease: Lease) -> None:
    """Its worker gave the unit back."""
    _end(connection, _is(lease), "returned")


def end_of_unit(connection: Connection, unit: WorkUnit, completed_by: Lease | None) -> None:
    """The unit is done: end all its open leases, that of `completed_by` as done and the others as lost."""
    token = None if completed_by is None else completed_by.token
    _end(connection, of_unit(unit), case((unit_leases.c.token == token, "done"), else_="lost"))


def outcome_of(connection: Connection, lease: Lease) -> str | None:
    """How a lease ended; None while it is open."""
    return connection.execute(select(unit_leases.c.outcome).where(_is(lease))).scalar_one_or_none()


def find_attempt(connection: Connection, token: str) -> tuple[int, int] | None:
    """(unit, attempt) of the lease with this token."""
    row = connection.execute(
        select(unit_leases.c.unit, unit_leases.c.attempt).where(unit_leases.c.token == token)
    ).one_or_none()
    return None if row is None else (row.unit, row.attempt)


def add_counts(
    connection: Connection,
    lease: Lease,
    *,
    samples: int = 0,
    tokens: int = 0,
    duplicate_samples: int = 0,
    duplicate_tokens: int = 0,
    abandoned_tokens: int = 0,
) -> None:
    """Add what came of a lease, open or ended."""
    columns = unit_leases.c
    values: dict[str, Any] = {
        "last_seen_at": database_clock(),
        "duplicate_samples": columns.duplicate_samples + duplicate_samples,
        "duplicate_tokens": columns.duplicate_tokens + duplicate_tokens,
        "abandoned_tokens": columns.abandoned_tokens + abandoned_tokens,
    }
    if samples:
        values |= {
            "samples": columns.samples + samples,
            "tokens": columns.tokens + tokens,
            "first_commit_at": func.coalesce(columns.first_commit_at, database_clock()),
            "last_commit_at": database_clock(),
        }
    connection.execute(update(unit_leases).where(_is(lease)).values(**values))


def of_unit(unit: WorkUnit) -> ColumnElement[bool]:
    """Condition on `unit_leases`: a lease of this unit."""
    return and_(
        unit_leases.c.run_id == unit.run_id,
        unit_leases.c.iteration == unit.iteration,
        unit_leases.c.kind == unit.kind,
        unit_leases.c.unit == unit.unit,
    )


def _is(lease: Lease) -> ColumnElement[bool]:
    return unit_leases.c.token == lease.token


def _end(connection: Connection, which: ColumnElement[bool], outcome: Any) -> None:
    connection.execute(
        update(unit_leases)
        .where(which, unit_leases.c.ended_at.is_(None))
        .values(ended_at=database_clock(), outcome=outcome)
    )
