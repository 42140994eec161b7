"""The ledger of step attempts: every process that ran a step, where, how it ended, and what interrupted it."""

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update

from steps.adapters.database import Database, database_clock, insert_if_absent
from steps.adapters.tables import interruptions, step_attempts


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRow:
    """One process that ran a step. Without `ended_at` it still runs, or died without a word."""

    attempt_id: int
    run_id: str
    iteration: int | None
    step: str
    worker: str | None
    pod: str
    node: str
    capacity_type: str
    started_at: float
    ended_at: float | None
    exit_code: int | None
    detail: str
    provenance: dict[str, Any]
    metrics: dict[str, Any]
    transport: dict[str, Any]
    """How tokens reached the experts; empty for a step without such."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InterruptionRow:
    """The platform told an attempt to stop."""

    attempt_id: int
    run_id: str
    iteration: int | None
    step: str
    worker: str | None
    pod: str
    node: str
    capacity_type: str
    reason: str
    detail: str
    created_at: float


def begin_attempt(
    db: Database,
    run_id: str,
    iteration: int | None,
    step: str,
    worker: str | None,
    pod: str,
    node: str,
    capacity_type: str,
    provenance_json: str = "{}",
) -> int:
    """Record that a process starts on a step; returns the attempt's id. The run need not exist yet."""
    statement = step_attempts.insert().values(
        run_id=run_id,
        iteration=iteration,
        step=step,
        worker=worker,
        pod=pod,
        node=node,
        capacity_type=capacity_type,
        started_at=database_clock(),
        detail="",
        provenance_json=provenance_json,
        metrics_json="{}",
    )
    with db.transaction() as connection:
        key = connection.execute(statement).inserted_primary_key
        if key is None:
            raise RuntimeError("the database returned no attempt id")
        return int(key[0])


def end_attempt(
    db: Database,
    attempt_id: int,
    exit_code: int,
    detail: str = "",
    metrics_json: str = "{}",
    transport_json: str = "{}",
) -> None:
    """Record how an attempt ended; a second call changes nothing."""
    statement = (
        update(step_attempts)
        .where(step_attempts.c.attempt_id == attempt_id, step_attempts.c.ended_at.is_(None))
        .values(
            ended_at=database_clock(),
            exit_code=exit_code,
            detail=detail,
            metrics_json=metrics_json,
            transport_json=transport_json,
        )
    )
    with db.transaction() as connection:
        connection.execute(statement)


def list_attempts(db: Database, run_id: str, iteration: int | None = None) -> list[AttemptRow]:
    """The run's attempts in order of their start; of one iteration when it is given."""
    statement = select(step_attempts).where(step_attempts.c.run_id == run_id)
    if iteration is not None:
        statement = statement.where(step_attempts.c.iteration == iteration)
    with db.read() as connection:
        rows = connection.execute(statement.order_by(step_attempts.c.started_at, step_attempts.c.attempt_id))
        return [_attempt(dict(row)) for row in rows.mappings()]


def record_interruption(db: Database, attempt_id: int, reason: str, detail: str = "") -> None:
    """Record why an attempt was told to stop (`sigterm`, `spot`, ...); once for each reason."""
    values = {"attempt_id": attempt_id, "reason": reason, "detail": detail, "created_at": database_clock()}
    with db.transaction() as connection:
        insert_if_absent(connection, interruptions, values)


def list_interruptions(db: Database, run_id: str) -> list[InterruptionRow]:
    """The run's interruptions in order, each with the attempt that it hit."""
    source = interruptions.join(step_attempts)
    columns = [
        interruptions.c[name] if name in interruptions.c else step_attempts.c[name]
        for name in InterruptionRow.__dataclass_fields__
    ]
    statement = select(*columns).select_from(source).where(step_attempts.c.run_id == run_id)
    with db.read() as connection:
        rows = connection.execute(statement.order_by(interruptions.c.created_at, interruptions.c.interruption_id))
        return [InterruptionRow(**row) for row in rows.mappings()]


def _attempt(row: dict[str, Any]) -> AttemptRow:
    documents = {name: json.loads(row.pop(f"{name}_json")) for name in ("provenance", "metrics", "transport")}
    return AttemptRow(**row, **documents)
