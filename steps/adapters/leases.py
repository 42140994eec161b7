"""Leases on work units: who works on what, until when.

A lease is the right to complete a unit. Its token fences a late owner: once another worker has leased the unit, the old
token is worth nothing. A lease that expired but that nobody else took is still good: heartbeat and completion succeed,
for nobody can have done the work in between. Expiry is judged by the database's clock alone.
"""

import json
import secrets
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, func, or_, select, update

from steps.adapters.database import Database, database_clock
from steps.adapters.tables import work_units
from steps.errors import DataError
from steps.records import Lease, UnitKind, WorkUnit


def lease_unit(db: Database, run_id: str, iteration: int, kind: UnitKind, worker: str, lease_s: float) -> Lease | None:
    """Lease the first unit that is pending or whose lease expired; None when there is none at this moment."""
    token = secrets.token_hex(16)
    statement = (
        update(work_units)
        .where(
            work_units.c.run_id == run_id,
            work_units.c.iteration == iteration,
            work_units.c.kind == kind,
            work_units.c.unit == _first_free(run_id, iteration, kind).scalar_subquery(),
        )
        .values(
            state="leased",
            token=token,
            worker=worker,
            attempts=work_units.c.attempts + 1,
            leased_at=database_clock(),
            expires_at=database_clock() + lease_s,
        )
        .returning(work_units.c.unit, work_units.c.attempts, work_units.c.prompt_uids_json)
    )
    with db.transaction(durable=False) as connection:
        row = connection.execute(statement).one_or_none()
    return None if row is None else _lease(row, run_id, iteration, kind, token)


def heartbeat(db: Database, lease: Lease, lease_s: float) -> bool:
    """Extend a lease to `lease_s` from now; False when it was lost or the unit is done."""
    statement = update(work_units).where(_owned(lease)).values(expires_at=database_clock() + lease_s)
    with db.transaction(durable=False) as connection:
        return connection.execute(statement).rowcount == 1


def return_lease(db: Database, lease: Lease) -> bool:
    """Give a unit back undone, for anyone to lease at once; False when the lease was lost already."""
    statement = update(work_units).where(_owned(lease)).values(state="pending", token=None, expires_at=None)
    with db.transaction(durable=False) as connection:
        return connection.execute(statement).rowcount == 1


def outstanding(db: Database, run_id: str, iteration: int, kind: UnitKind) -> int:
    """Number of units that aren't done, leased ones included."""
    statement = select(func.count()).where(
        work_units.c.run_id == run_id,
        work_units.c.iteration == iteration,
        work_units.c.kind == kind,
        work_units.c.state != "done",
    )
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


def mark_done(connection: Connection, lease: Lease) -> str | None:
    """Complete a unit within the caller's transaction; returns its worker, or None when the lease was lost.

    Until the transaction ends nobody else can complete or lease the unit.
    """
    statement = (
        update(work_units)
        .where(_owned(lease))
        .values(state="done", completed_at=database_clock(), expires_at=None)
        .returning(work_units.c.worker)
    )
    return connection.execute(statement).scalar_one_or_none()


def _first_free(run_id: str, iteration: int, kind: UnitKind) -> Select[tuple[int]]:
    candidates = work_units.alias("candidates")
    expired = and_(candidates.c.state == "leased", candidates.c.expires_at <= database_clock())
    return (
        select(candidates.c.unit)
        .where(
            candidates.c.run_id == run_id,
            candidates.c.iteration == iteration,
            candidates.c.kind == kind,
            or_(candidates.c.state == "pending", expired),
        )
        .order_by(candidates.c.unit)
        .limit(1)
        .with_for_update(skip_locked=True)
    )


def _owned(lease: Lease) -> ColumnElement[bool]:
    return and_(
        work_units.c.run_id == lease.unit.run_id,
        work_units.c.iteration == lease.unit.iteration,
        work_units.c.kind == lease.unit.kind,
        work_units.c.unit == lease.unit.unit,
        work_units.c.state == "leased",
        work_units.c.token == lease.token,
    )


def _lease(row: Sequence[Any], run_id: str, iteration: int, kind: UnitKind, token: str) -> Lease:
    number, attempts, prompt_uids_json = row
    unit = WorkUnit(
        run_id=run_id, iteration=iteration, kind=kind, unit=number, prompt_uids=tuple(json.loads(prompt_uids_json))
    )
    return Lease(unit=unit, token=token, attempt=attempts)
