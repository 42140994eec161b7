"""The experience buffer: samples and rewards go in by leases, batches of whole groups come out.

Every function is one transaction, so that a process killed at any line leaves all of it or nothing, and each may be
called again by anyone. Samples are written once and never changed; a group (the samples of one prompt in one iteration)
is consumed or dropped as a whole, in the prompt ledger.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, select, update

from steps.adapters import lease_history
from steps.adapters.database import Database, database_clock
from steps.adapters.leases import finish_unit, lock_unit, require_all_done
from steps.adapters.retries import retried
from steps.adapters.runs import add_unit, drop_open_prompts, lock_run, require_iteration
from steps.adapters.sample_rows import (
    REWARD_COLUMNS,
    SAMPLE_COLUMNS,
    check_samples,
    check_scores,
    committed_groups,
    decode_sample,
    decode_scored_sample,
    pack_int32,
    sample_key,
    sample_values,
)
from steps.adapters.selection import (
    SAME_GROUP,
    SAME_SAMPLE,
    ScoredGroup,
    drop_reasons,
    nothing_to_train,
    scored_groups,
)
from steps.adapters.tables import batches, prompt_draws, rewards, samples
from steps.errors import DataError
from steps.records import Lease, Reward, Sample, ScoredSample, WorkUnit


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRow:
    """The frozen selection that iteration `iteration` trains on; `uri` is None until flush has written its files."""

    run_id: str
    iteration: int
    policy_version: int
    num_groups: int
    num_samples: int
    num_tokens: int
    """Response tokens."""
    num_dropped: int
    """Groups dropped while selecting."""
    created_at: float
    uri: str | None
    manifest_sha256: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitOutcome:
    """What came of a commit of groups; numbers of samples."""

    committed: int
    """Stored under this lease, now or by an earlier call."""
    duplicates: int
    """Thrown away, since another lease's commit of their group was first."""
    unit_done: bool
    """Every group of the unit is stored, or nobody waits for the rest."""
    lost: bool
    """The lease was lost: whatever wasn't stored before is refused."""


@retried
def commit_groups(db: Database, lease: Lease, new_samples: Sequence[Sample]) -> CommitOutcome:
    """Store whole groups of a rollout unit, those that aren't stored yet.

    With the unit's last group the unit is done and the reward unit of the same number created. A commit whose answer
    was lost may be repeated.

    Raises:
        ValueError: not a rollout lease, a sample of another unit, or a sample whose lengths don't match.
    """
    check_samples(lease, new_samples)
    unit = lease.unit
    with db.transaction() as connection:
        state = lock_unit(connection, lease)
        stored = committed_groups(connection, unit)
        mine = [sample for sample in new_samples if stored.get(sample.prompt_uid) == lease.token]
        others = [s for s in new_samples if s.prompt_uid in stored and stored[s.prompt_uid] != lease.token]
        missing = [sample for sample in new_samples if sample.prompt_uid not in stored]
        fresh = missing if state.is_owned else []
        if fresh:
            _insert_groups(connection, lease, fresh)
        if new_samples:
            lease_history.add_counts(
                connection,
                lease,
                samples=len(fresh),
                tokens=_num_tokens(fresh),
                duplicate_samples=len(others),
                duplicate_tokens=_num_tokens(others),
                abandoned_tokens=0 if state.is_owned else _num_tokens(missing),
            )
        is_complete = {*stored, *(sample.prompt_uid for sample in fresh)} >= set(unit.prompt_uids)
        if state.is_owned and is_complete:
            finish_unit(connection, lease)
            add_unit(connection, unit.run_id, unit.iteration, "reward", unit.unit, unit.prompt_uids)
        return CommitOutcome(
            committed=len(mine) + len(fresh),
            duplicates=len(others),
            unit_done=state.is_done or is_complete,
            lost=not state.is_owned and lease_history.outcome_of(connection, lease) != "done",
        )


@retried
def stored_prompts(db: Database, unit: WorkUnit) -> set[str]:
    """The prompts of a rollout unit whose samples are stored."""
    with db.read() as connection:
        return set(committed_groups(connection, unit))


@retried
def unit_samples(db: Database, run_id: str, iteration: int, prompt_uids: Sequence[str]) -> list[Sample]:
    """The samples of some prompts, ordered by (prompt_uid, sample_index)."""
    statement = (
        select(*SAMPLE_COLUMNS)
        .select_from(prompt_draws.join(samples, SAME_GROUP))
        .where(samples.c.run_id == run_id, samples.c.iteration == iteration, samples.c.prompt_uid.in_(prompt_uids))
    )
    with db.read() as connection:
        rows = connection.execute(statement).all()
    return [decode_sample(row) for row in sorted(rows, key=sample_key)]


@retried
def complete_reward(db: Database, lease: Lease, scores: Sequence[Reward]) -> bool:
    """Store a reward unit's scores, one for each sample, and mark the unit done.

    False, and nothing is stored, when the lease was lost. A call whose answer was lost may be repeated.

    Raises:
        ValueError: not a reward lease, a score too many or missing, or a value that doesn't fit the status.
    """
    check_scores(lease, scores)
    unit = lease.unit
    key = {"run_id": unit.run_id, "iteration": unit.iteration}
    with db.transaction() as connection:
        if not lock_unit(connection, lease).is_owned:
            return lease_history.outcome_of(connection, lease) == "done"
        _check_all_scored(connection, lease, scores)
        connection.execute(
            rewards.insert(),
            [
                {
                    **key,
                    "prompt_uid": score.prompt_uid,
                    "sample_index": score.sample_index,
                    "status": score.status,
                    "value": score.value,
                    "detail": score.detail,
                    "worker": lease.worker.name,
                }
                for score in scores
            ],
        )
        lease_history.add_counts(connection, lease, samples=len(scores))
        finish_unit(connection, lease)
    return True


@retried
def select_batch(db: Database, run_id: str, iteration: int, policy_version: int, max_staleness: int) -> BatchRow:
    """Freeze what iteration `iteration` trains on, or return what is frozen already.

    Candidates are the fully scored groups of this and earlier iterations that are neither consumed nor dropped. A group
    is dropped, with the reason in the prompt ledger, when its oldest token is more than `max_staleness` versions behind
    `policy_version` or comes from a later policy, when fewer than two of its rewards are ok, or when a newer group of
    the same prompt is selected. All others are consumed. Groups of earlier iterations that aren't fully scored stay as
    they are.

    Raises:
        DataError: the iteration isn't planned or has units that aren't done, or no group is left to train on; then
            nothing is written.
    """
    with db.transaction() as connection:
        lock_run(connection, run_id)
        frozen = _find_batch(connection, run_id, iteration)
        if frozen is not None:
            return frozen
        require_iteration(connection, run_id, iteration)
        require_all_done(connection, run_id, iteration)
        groups = scored_groups(connection, run_id, iteration)
        reasons = drop_reasons(groups, policy_version, max_staleness)
        chosen = [group for group in groups if group not in reasons]
        if not chosen:
            raise nothing_to_train(run_id, iteration, list(reasons.values()))
        _insert_batch(connection, run_id, iteration, policy_version, chosen, len(reasons))
        _consume(connection, run_id, iteration, chosen)
        for group, reason in reasons.items():
            drop_open_prompts(connection, run_id, group.iteration, {group.prompt_uid: reason})
        return _require_batch(connection, run_id, iteration)


@retried
def get_batch(db: Database, run_id: str, iteration: int) -> BatchRow:
    """Raises DataError when nothing is selected for that iteration yet."""
    with db.read() as connection:
        return _require_batch(connection, run_id, iteration)


@retried
def batch_samples(db: Database, run_id: str, iteration: int) -> list[ScoredSample]:
    """The samples of the iteration's batch, whole groups, ordered by (prompt_uid, sample_index).

    Rewards that are not ok are included: their groups have at least two that are.

    Raises:
        DataError: nothing is selected for that iteration yet.
    """
    statement = (
        select(*SAMPLE_COLUMNS, *REWARD_COLUMNS)
        .select_from(prompt_draws.join(samples, SAME_GROUP).join(rewards, SAME_SAMPLE))
        .where(prompt_draws.c.run_id == run_id, prompt_draws.c.consumed_by == iteration)
    )
    with db.read() as connection:
        _require_batch(connection, run_id, iteration)
        rows = connection.execute(statement).all()
    return [decode_scored_sample(row) for row in sorted(rows, key=sample_key)]


@retried
def finish_batch(db: Database, run_id: str, iteration: int, uri: str, manifest_sha256: str) -> BatchRow:
    """Record where the batch's files are; doing it again changes nothing.

    Raises:
        DataError: nothing is selected for that iteration yet, or other files are recorded.
    """
    statement = (
        update(batches)
        .where(batches.c.run_id == run_id, batches.c.iteration == iteration, batches.c.uri.is_(None))
        .values(uri=uri, manifest_sha256=manifest_sha256)
    )
    with db.transaction() as connection:
        connection.execute(statement)
        batch = _require_batch(connection, run_id, iteration)
    if (batch.uri, batch.manifest_sha256) != (uri, manifest_sha256):
        raise DataError(
            f"run {run_id}, iteration {iteration}: its batch is already recorded as {batch.uri} "
            f"({str(batch.manifest_sha256)[:12]}), not {uri} ({manifest_sha256[:12]}); a batch never changes"
        )
    return batch


def _insert_groups(connection: Connection, lease: Lease, new_samples: Sequence[Sample]) -> None:
    connection.execute(samples.insert(), [sample_values(lease, sample) for sample in new_samples])
    statement = (
        update(prompt_draws)
        .where(
            prompt_draws.c.run_id == lease.unit.run_id,
            prompt_draws.c.iteration == lease.unit.iteration,
            prompt_draws.c.prompt_uid == bindparam("uid"),
        )
        .values(prompt_ids=bindparam("ids"), lease_token=lease.token)
    )
    prompt_ids = {sample.prompt_uid: sample.prompt_ids for sample in new_samples}
    connection.execute(statement, [{"uid": uid, "ids": pack_int32(ids)} for uid, ids in prompt_ids.items()])


def _num_tokens(some_samples: Sequence[Sample]) -> int:
    return sum(len(sample.response_ids_T) for sample in some_samples)


def _insert_batch(
    connection: Connection,
    run_id: str,
    iteration: int,
    policy_version: int,
    chosen: Sequence[ScoredGroup],
    dropped: int,
) -> None:
    connection.execute(
        batches.insert().values(
            run_id=run_id,
            iteration=iteration,
            policy_version=policy_version,
            num_groups=len(chosen),
            num_samples=sum(group.num_samples for group in chosen),
            num_tokens=sum(group.num_tokens for group in chosen),
            num_dropped=dropped,
            created_at=database_clock(),
        )
    )


def _consume(connection: Connection, run_id: str, iteration: int, chosen: Iterable[ScoredGroup]) -> None:
    statement = (
        update(prompt_draws)
        .where(
            prompt_draws.c.run_id == run_id,
            prompt_draws.c.iteration == bindparam("group_iteration"),
            prompt_draws.c.prompt_uid == bindparam("uid"),
        )
        .values(status="consumed", consumed_by=iteration)
    )
    connection.execute(statement, [{"group_iteration": group.iteration, "uid": group.prompt_uid} for group in chosen])


def _find_batch(connection: Connection, run_id: str, iteration: int) -> BatchRow | None:
    statement = select(batches).where(batches.c.run_id == run_id, batches.c.iteration == iteration)
    row = connection.execute(statement).mappings().one_or_none()
    return None if row is None else BatchRow(**row)


def _require_batch(connection: Connection, run_id: str, iteration: int) -> BatchRow:
    batch = _find_batch(connection, run_id, iteration)
    if batch is None:
        raise DataError(
            f"run {run_id}, iteration {iteration}: no batch is selected yet; run python -m steps.flush first"
        )
    return batch


def _check_all_scored(connection: Connection, lease: Lease, scores: Sequence[Reward]) -> None:
    unit = lease.unit
    statement = select(samples.c.prompt_uid, samples.c.sample_index).where(
        samples.c.run_id == unit.run_id,
        samples.c.iteration == unit.iteration,
        samples.c.prompt_uid.in_(unit.prompt_uids),
    )
    expected = sorted((row[0], row[1]) for row in connection.execute(statement))
    if expected != sorted((score.prompt_uid, score.sample_index) for score in scores):
        raise ValueError(
            f"unit {unit.unit}: needs one score for each of its {len(expected)} samples, got {len(scores)}"
        )
