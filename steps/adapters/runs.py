"""The ledger of runs and iterations: what was planned, which prompts were drawn, and what came of each."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, update

from steps.adapters.database import Database, database_clock, insert_if_absent, insert_into
from steps.adapters.retries import retried
from steps.adapters.tables import iteration_metrics, iterations, prompt_draws, runs, work_units
from steps.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """A training run; times are UTC seconds by the database's clock."""

    run_id: str
    config_hash: str
    created_at: float
    config_json: str


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationRow:
    """A frozen plan: iteration `iteration` samples from `policy_version` and moved the data cursor."""

    run_id: str
    iteration: int
    policy_version: int
    cursor_start: int
    cursor_end: int
    num_prompts: int
    num_units: int
    created_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptDraw:
    """What came of one drawn prompt: `drawn` (still open), `consumed` by a batch, or `dropped` with the reason."""

    prompt_uid: str
    position: int
    unit: int
    status: str
    drop_reason: str | None
    consumed_by: int | None
    """The iteration whose batch trained on the group."""


@retried
def create_run(db: Database, run_id: str, config_json: str, config_hash: str) -> RunRow:
    """Record a run, or return the one that is there.

    Raises:
        ConfigError: the run exists with another configuration.
    """
    values = {"run_id": run_id, "config_json": config_json, "config_hash": config_hash, "created_at": database_clock()}
    with db.transaction() as connection:
        insert_if_absent(connection, runs, values)
        run = _require_run(connection, run_id)
    if run.config_hash != config_hash:
        raise ConfigError(
            f"run {run_id}: it was started with another configuration ({run.config_hash[:12]}, "
            f"not {config_hash[:12]}); choose another run id, or use the run's own configuration"
        )
    return run


@retried
def get_run(db: Database, run_id: str) -> RunRow:
    """Raises DataError when there is no such run."""
    with db.read() as connection:
        return _require_run(connection, run_id)


@retried
def list_runs(db: Database) -> list[RunRow]:
    """All runs, oldest first."""
    with db.read() as connection:
        rows = connection.execute(select(runs).order_by(runs.c.created_at, runs.c.run_id))
        return [RunRow(**row) for row in rows.mappings()]


@retried
def plan_iteration(
    db: Database,
    run_id: str,
    iteration: int,
    policy_version: int,
    prompts: Sequence[tuple[str, int]],
    units: Sequence[Sequence[str]],
    cursor_start: int,
    cursor_end: int,
) -> IterationRow:
    """Freeze an iteration: its policy version, prompts (uid, position) and rollout units; or return the frozen one.

    Whoever comes second, at the same time or later, with the same arguments or others, gets the first one's plan.

    Raises:
        DataError: there is no such run, or a prompt is drawn twice in this iteration.
        ValueError: the units don't hold each prompt once.
    """
    _check_plan(run_id, iteration, prompts, units)
    with db.transaction() as connection:
        lock_run(connection, run_id)
        existing = _find_iteration(connection, run_id, iteration)
        if existing is not None:
            return existing
        key = {"run_id": run_id, "iteration": iteration}
        connection.execute(
            iterations.insert().values(
                **key,
                policy_version=policy_version,
                cursor_start=cursor_start,
                cursor_end=cursor_end,
                num_prompts=len(prompts),
                num_units=len(units),
                created_at=database_clock(),
            )
        )
        unit_of = {uid: number for number, uids in enumerate(units) for uid in uids}
        connection.execute(
            prompt_draws.insert(),
            [
                {**key, "prompt_uid": uid, "position": position, "unit": unit_of[uid], "status": "drawn"}
                for uid, position in prompts
            ],
        )
        for number, uids in enumerate(units):
            add_unit(connection, run_id, iteration, "rollout", number, uids)
        return require_iteration(connection, run_id, iteration)


def add_unit(
    connection: Connection, run_id: str, iteration: int, kind: str, unit: int, prompt_uids: Sequence[str]
) -> None:
    """Insert a pending work unit, within the caller's transaction."""
    connection.execute(
        work_units.insert().values(
            run_id=run_id,
            iteration=iteration,
            kind=kind,
            unit=unit,
            state="pending",
            attempts=0,
            prompt_uids_json=json.dumps(list(prompt_uids)),
        )
    )


@retried
def get_iteration(db: Database, run_id: str, iteration: int) -> IterationRow:
    """Raises DataError when the iteration isn't planned."""
    with db.read() as connection:
        return require_iteration(connection, run_id, iteration)


@retried
def list_iterations(db: Database, run_id: str) -> list[IterationRow]:
    """All planned iterations of the run, in order."""
    with db.read() as connection:
        rows = connection.execute(
            select(iterations).where(iterations.c.run_id == run_id).order_by(iterations.c.iteration)
        )
        return [IterationRow(**row) for row in rows.mappings()]


@retried
def last_cursor(db: Database, run_id: str) -> int:
    """Where the data cursor stands after the last planned iteration; 0 before the first."""
    with db.read() as connection:
        last = connection.execute(select(func.max(iterations.c.cursor_end)).where(iterations.c.run_id == run_id))
        return int(last.scalar_one() or 0)


@retried
def list_draws(db: Database, run_id: str, iteration: int) -> list[PromptDraw]:
    """The iteration's prompts by position, each with what came of it."""
    columns = [prompt_draws.c[name] for name in PromptDraw.__dataclass_fields__]
    with db.read() as connection:
        rows = connection.execute(
            select(*columns)
            .where(prompt_draws.c.run_id == run_id, prompt_draws.c.iteration == iteration)
            .order_by(prompt_draws.c.position, prompt_draws.c.prompt_uid)
        )
        return [PromptDraw(**row) for row in rows.mappings()]


def drop_open_prompts(connection: Connection, run_id: str, iteration: int, reasons: Mapping[str, str]) -> None:
    """Record that prompts (uid -> reason) won't be trained on; what is consumed or dropped already stays as it is."""
    statement = (
        update(prompt_draws)
        .where(
            prompt_draws.c.run_id == run_id,
            prompt_draws.c.iteration == iteration,
            prompt_draws.c.prompt_uid == bindparam("uid"),
            prompt_draws.c.status == "drawn",
        )
        .values(status="dropped", drop_reason=bindparam("reason"))
    )
    if reasons:
        connection.execute(statement, [{"uid": uid, "reason": reason} for uid, reason in sorted(reasons.items())])


@retried
def set_iteration_metrics(db: Database, run_id: str, iteration: int, phase: str, metrics: Mapping[str, Any]) -> None:
    """Store a phase's metrics, replacing those of an earlier attempt.

    Raises:
        DataError: there is no such run.
    """
    encoded = json.dumps(dict(metrics), sort_keys=True)
    with db.transaction() as connection:
        _require_run(connection, run_id)
        statement = insert_into(connection, iteration_metrics).values(
            run_id=run_id, iteration=iteration, phase=phase, metrics_json=encoded
        )
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=["run_id", "iteration", "phase"], set_={"metrics_json": encoded}
            )
        )


@retried
def get_iteration_metrics(db: Database, run_id: str, iteration: int) -> dict[str, dict[str, Any]]:
    """The metrics of each phase that has some."""
    with db.read() as connection:
        rows = connection.execute(
            select(iteration_metrics.c.phase, iteration_metrics.c.metrics_json)
            .where(iteration_metrics.c.run_id == run_id, iteration_metrics.c.iteration == iteration)
            .order_by(iteration_metrics.c.phase)
        )
        return {phase: json.loads(encoded) for phase, encoded in rows}


def lock_run(connection: Connection, run_id: str) -> RunRow:
    """Hold the run's row until the transaction ends, so that decisions on one run come one after the other.

    PostgreSQL locks the row but still lets others insert rows that refer to it; SQLite's writers are alone anyway.
    """
    statement = select(runs).where(runs.c.run_id == run_id).with_for_update(key_share=True)
    row = connection.execute(statement).mappings().one_or_none()
    if row is None:
        raise _no_such_run(run_id)
    return RunRow(**row)


def _require_run(connection: Connection, run_id: str) -> RunRow:
    row = connection.execute(select(runs).where(runs.c.run_id == run_id)).mappings().one_or_none()
    if row is None:
        raise _no_such_run(run_id)
    return RunRow(**row)


def _no_such_run(run_id: str) -> DataError:
    return DataError(f"run {run_id}: not in the database; check the run id, or start it with python -m steps.init_run")


def _find_iteration(connection: Connection, run_id: str, iteration: int) -> IterationRow | None:
    statement = select(iterations).where(iterations.c.run_id == run_id, iterations.c.iteration == iteration)
    row = connection.execute(statement).mappings().one_or_none()
    return None if row is None else IterationRow(**row)


def require_iteration(connection: Connection, run_id: str, iteration: int) -> IterationRow:
    """`get_iteration` within the caller's transaction."""
    found = _find_iteration(connection, run_id, iteration)
    if found is None:
        raise DataError(f"run {run_id}, iteration {iteration}: not planned yet; run python -m steps.plan first")
    return found


def _check_plan(
    run_id: str, iteration: int, prompts: Sequence[tuple[str, int]], units: Sequence[Sequence[str]]
) -> None:
    uids = [uid for uid, _ in prompts]
    if len(set(uids)) != len(uids):
        twice = next(uid for uid in uids if uids.count(uid) > 1)
        raise DataError(
            f"run {run_id}, iteration {iteration}: prompt {twice} is drawn twice; "
            "give the data set more prompts than rollout.prompts_per_iteration"
        )
    if not uids or sorted(uid for unit in units for uid in unit) != sorted(uids) or not all(units):
        raise ValueError(f"iteration {iteration}: the units must hold each of the {len(uids)} prompts once")
