"""What an audit reads of a run: every row, in one snapshot of the database, as plain records.

Nothing is written. Payloads are read for one batch at a time; of all other samples only their lengths are.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, exists, func, select, text

from steps.adapters.attempts import AttemptRow
from steps.adapters.buffer import BatchRow
from steps.adapters.database import Database
from steps.adapters.publications_ledger import EVALUATION_COLUMNS, PUBLICATION_COLUMNS
from steps.adapters.runs import IterationRow, PromptDraw, RunRow
from steps.adapters.tables import (
    batches,
    evaluations,
    iteration_metrics,
    iterations,
    prompt_draws,
    publications,
    rewards,
    runs,
    samples,
    step_attempts,
    unit_leases,
    work_units,
)
from steps.errors import DataError
from steps.records import Evaluation, Publication


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFacts:
    """A sample without its payload, and its reward's status and value (None: not scored)."""

    prompt_uid: str
    sample_index: int
    unit: int
    min_version: int
    num_tokens: int
    seed: int
    """As stored: the int64 of the same bits."""
    temperature: float
    top_p: float
    versions: bytes
    """int32 pairs of (version, number of tokens)."""
    response_bytes: int
    logprob_bytes: int
    prompt_bytes: int | None
    status: str | None
    value: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePayload:
    """A scored sample of a batch, as blobs: little-endian int32 ids, float32 log-probabilities."""

    prompt_uid: str
    sample_index: int
    prompt_ids: bytes
    response_ids: bytes
    logprobs: bytes
    versions: bytes
    value: float | None
    routing: bytes | None
    routing_uri: str | None
    mask: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitFacts:
    """A work unit."""

    iteration: int
    kind: str
    unit: int
    state: str
    attempts: int
    prompt_uids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseFacts:
    """One lease of a unit, from its history."""

    token: str
    iteration: int
    kind: str
    unit: int
    attempt: int
    is_backup: bool
    outcome: str | None
    samples: int
    tokens: int
    duplicate_samples: int
    duplicate_tokens: int
    abandoned_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedGroups:
    """Samples of the groups that one lease committed, and their response tokens."""

    samples: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One run as it is at one moment."""

    connection: Connection
    run_id: str

    def run(self) -> RunRow:
        """Raises DataError when there is no such run."""
        row = self.connection.execute(select(runs).where(runs.c.run_id == self.run_id)).mappings().one_or_none()
        if row is None:
            raise DataError(f"run {self.run_id}: not in the database; check the run id and MOERL_DATABASE_URL")
        return RunRow(**row)

    def iterations(self) -> list[IterationRow]:
        """In order."""
        statement = select(iterations).where(iterations.c.run_id == self.run_id).order_by(iterations.c.iteration)
        return [IterationRow(**row) for row in self.connection.execute(statement).mappings()]

    def draws(self, iteration: int) -> list[PromptDraw]:
        """By position."""
        statement = select(*(prompt_draws.c[name] for name in PromptDraw.__dataclass_fields__)).where(
            prompt_draws.c.run_id == self.run_id, prompt_draws.c.iteration == iteration
        )
        rows = self.connection.execute(statement.order_by(prompt_draws.c.position)).mappings()
        return [PromptDraw(**row) for row in rows]

    def samples(self, iteration: int) -> list[SampleFacts]:
        """By (prompt uid, sample index)."""
        own = ("prompt_uid", "sample_index", "unit", "min_version", "num_tokens", "seed", "temperature", "top_p")
        statement = (
            select(
                *(samples.c[name] for name in (*own, "versions")),
                func.length(samples.c.response_ids).label("response_bytes"),
                func.length(samples.c.logprobs).label("logprob_bytes"),
                func.length(prompt_draws.c.prompt_ids).label("prompt_bytes"),
                rewards.c.status,
                rewards.c.value,
            )
            .select_from(samples.outerjoin(prompt_draws, _SAME_GROUP).outerjoin(rewards, _SAME_SAMPLE))
            .where(samples.c.run_id == self.run_id, samples.c.iteration == iteration)
        )
        return sorted((SampleFacts(**row) for row in self.connection.execute(statement).mappings()), key=_sample_key)

    def orphans(self) -> list[str]:
        """Rows that belong to nothing: samples of no drawn prompt, rewards of no sample."""
        lone_samples = _keys(samples).where(samples.c.run_id == self.run_id, ~exists().where(_SAME_GROUP))
        lone_rewards = _keys(rewards).where(rewards.c.run_id == self.run_id, ~exists().where(_SAME_SAMPLE))
        return [
            f"{kind} {iteration}/{uid}/{index}"
            for kind, statement in (("sample", lone_samples), ("reward", lone_rewards))
            for iteration, uid, index in self.connection.execute(statement)
        ]

    def units(self, iteration: int) -> list[UnitFacts]:
        """Rollout units first, then reward units, by number."""
        names = ("iteration", "kind", "unit", "state", "attempts", "prompt_uids_json")
        statement = (
            select(*(work_units.c[name] for name in names))
            .where(work_units.c.run_id == self.run_id, work_units.c.iteration == iteration)
            .order_by(work_units.c.kind.desc(), work_units.c.unit)
        )
        return [_unit(row) for row in self.connection.execute(statement)]

    def leases(self, iteration: int) -> list[LeaseFacts]:
        """In order of their beginning."""
        statement = select(*(unit_leases.c[name] for name in LeaseFacts.__dataclass_fields__)).where(
            unit_leases.c.run_id == self.run_id, unit_leases.c.iteration == iteration
        )
        rows = self.connection.execute(statement.order_by(unit_leases.c.leased_at, unit_leases.c.attempt)).mappings()
        return [LeaseFacts(**row) for row in rows]

    def committed_groups(self, iteration: int) -> dict[str, CommittedGroups]:
        """What the rows of samples say that each lease committed, by the lease's token."""
        statement = (
            select(prompt_draws.c.lease_token, func.count(), func.sum(samples.c.num_tokens))
            .select_from(prompt_draws.join(samples, _SAME_GROUP))
            .where(prompt_draws.c.run_id == self.run_id, prompt_draws.c.iteration == iteration)
            .group_by(prompt_draws.c.lease_token)
        )
        return {
            token or "": CommittedGroups(samples=count, tokens=int(tokens))
            for token, count, tokens in self.connection.execute(statement)
        }

    def batches(self) -> list[BatchRow]:
        """By iteration."""
        statement = select(batches).where(batches.c.run_id == self.run_id).order_by(batches.c.iteration)
        return [BatchRow(**row) for row in self.connection.execute(statement).mappings()]

    def batch_payloads(self, iteration: int) -> list[SamplePayload]:
        """The scored samples of the groups that this iteration's batch consumed, by (prompt uid, sample index)."""
        columns = {**samples.c, "prompt_ids": prompt_draws.c.prompt_ids, "value": rewards.c.value}
        statement = (
            select(*(columns[name] for name in SamplePayload.__dataclass_fields__))
            .select_from(prompt_draws.join(samples, _SAME_GROUP).join(rewards, _SAME_SAMPLE))
            .where(prompt_draws.c.run_id == self.run_id, prompt_draws.c.consumed_by == iteration)
        )
        return sorted((SamplePayload(**row) for row in self.connection.execute(statement).mappings()), key=_sample_key)

    def metrics(self) -> dict[int, dict[str, dict[str, Any]]]:
        """What the phases recorded: iteration -> phase -> values."""
        statement = select(
            iteration_metrics.c.iteration, iteration_metrics.c.phase, iteration_metrics.c.metrics_json
        ).where(iteration_metrics.c.run_id == self.run_id)
        found: dict[int, dict[str, dict[str, Any]]] = {}
        for iteration, phase, encoded in self.connection.execute(statement):
            values = _decoded(encoded)
            found.setdefault(iteration, {})[phase] = values if isinstance(values, dict) else {}
        return found

    def publications(self) -> list[Publication]:
        """By policy version."""
        statement = select(*PUBLICATION_COLUMNS).where(publications.c.run_id == self.run_id)
        rows = self.connection.execute(statement.order_by(publications.c.policy_version)).mappings()
        return [Publication(**row) for row in rows]

    def evaluations(self) -> list[Evaluation]:
        """By policy version."""
        statement = select(*EVALUATION_COLUMNS).where(evaluations.c.run_id == self.run_id)
        rows = self.connection.execute(statement.order_by(evaluations.c.policy_version)).mappings()
        return [Evaluation(**row) for row in rows]

    def attempts(self) -> list[AttemptRow]:
        """In order of their start."""
        names = [name for name in AttemptRow.__dataclass_fields__ if name not in _DOCUMENTS]
        statement = select(*(step_attempts.c[name] for name in names)).where(step_attempts.c.run_id == self.run_id)
        rows = self.connection.execute(statement.order_by(step_attempts.c.started_at, step_attempts.c.attempt_id))
        return [AttemptRow(**row, provenance={}, metrics={}, transport={}) for row in rows.mappings()]


@contextmanager
def snapshot(db: Database, run_id: str) -> Iterator[Snapshot]:
    """See the run as it is at one moment, whatever is written meanwhile; raises as `Database.read` does."""
    with db.read() as connection:
        if connection.dialect.name == "postgresql":  # SQLite's readers see one snapshot anyway
            connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
        yield Snapshot(connection=connection, run_id=run_id)


_DOCUMENTS = ("provenance", "metrics", "transport")
_SAME_GROUP = and_(
    samples.c.run_id == prompt_draws.c.run_id,
    samples.c.iteration == prompt_draws.c.iteration,
    samples.c.prompt_uid == prompt_draws.c.prompt_uid,
)
_SAME_SAMPLE = and_(
    rewards.c.run_id == samples.c.run_id,
    rewards.c.iteration == samples.c.iteration,
    rewards.c.prompt_uid == samples.c.prompt_uid,
    rewards.c.sample_index == samples.c.sample_index,
)


def _keys(table: Any) -> Select[Any]:
    return select(table.c.iteration, table.c.prompt_uid, table.c.sample_index)


def _sample_key(row: SampleFacts | SamplePayload) -> tuple[str, int]:
    return row.prompt_uid, row.sample_index


def _unit(row: Row[Any]) -> UnitFacts:
    iteration, kind, unit, state, attempts, uids_json = tuple(row)
    uids = _decoded(uids_json)
    prompt_uids = tuple(map(str, uids)) if isinstance(uids, list) else ()
    return UnitFacts(iteration=iteration, kind=kind, unit=unit, state=state, attempts=attempts, prompt_uids=prompt_uids)


def _decoded(text: str) -> Any:
    """None for what is no JSON: what is missing then is a finding."""
    try:
        return json.loads(text)
    except ValueError:
        return None
