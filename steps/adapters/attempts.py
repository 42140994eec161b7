"""The ledger of step attempts: every process that ran a step, where, how it ended, and what interrupted it."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update

from steps.adapters.database import Database, database_clock, insert_if_absent
from steps.adapters.retries import retried
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
    """When the attempt noticed it."""
    kind: str
    """stop, rebalance or scheduled (`steps.interruption`)."""
    deadline_at: float | None
    """When the place ends, as the platform said; None when it didn't say."""


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
    values = {
        "token": secrets.token_hex(16),
        "run_id": run_id,
        "iteration": iteration,
        "step": step,
        "worker": worker,
        "pod": pod,
        "node": node,
        "capacity_type": capacity_type,
        "started_at": database_clock(),
        "detail": "",
        "provenance_json": provenance_json,
        "metrics_json": "{}",
    }
    return _insert_attempt(db, values)


@retried
def _insert_attempt(db: Database, values: Mapping[str, Any]) -> int:
    """Insert the attempt unless an earlier try did, whose answer was lost: its token tells."""
    with db.transaction() as connection:
        insert_if_absent(connection, step_attempts, values)
        found = connection.execute(select(step_attempts.c.attempt_id).where(step_attempts.c.token == values["token"]))
        return int(found.scalar_one())


@retried
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


@retried
def list_attempts(db: Database, run_id: str, iteration: int | None = None) -> list[AttemptRow]:
    """The run's attempts in order of their start; of one iteration when it is given."""
    statement = select(step_attempts).where(step_attempts.c.run_id == run_id)
    if iteration is not None:
        statement = statement.where(step_attempts.c.iteration == iteration)
    with db.read() as connection:
        rows = connection.execute(statement.order_by(step_attempts.c.started_at, step_attempts.c.attempt_id))
        return [_attempt(dict(row)) for row in rows.mappings()]


@retried
def record_interruption(
    db: Database,
    attempt_id: int,
    reason: str,
    detail: str = "",
    *,
    kind: str = "stop",
    age_s: float = 0.0,
    time_left_s: float | None = None,
) -> None:
    """Record what an attempt was told (`SIGTERM`, `spot`, ...) `age_s` seconds ago; once for each reason.

    `time_left_s`: seconds from now until the place ends.
    """
    values = {
        "attempt_id": attempt_id,
        "reason": reason,
        "detail": detail,
        "created_at": database_clock() - age_s,
        "kind": kind,
        "deadline_at": None if time_left_s is None else database_clock() + time_left_s,
    }
    with db.transaction() as connection:
        insert_if_absent(connection, interruptions, values)


@retried
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
    del row["token"]  # only tells a repeated insert from a new one
    documents = {name: json.loads(row.pop(f"{name}_json")) for name in ("provenance", "metrics", "transport")}
    return AttemptRow(**row, **documents)
