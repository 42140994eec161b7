"""The experience buffer: samples and rewards go in by leases, batches of whole groups come out.

Every function is one transaction, so that a process killed at any line leaves all of it or nothing, and each may be
called again by anyone. Samples are written once and never changed; a group (the samples of one prompt in one iteration)
is consumed or dropped as a whole, in the prompt ledger.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, and_, bindparam, case, func, select, update

from steps.adapters.database import Database, database_clock
from steps.adapters.leases import mark_done, require_all_done
from steps.adapters.runs import add_unit, drop_open_prompts, lock_run, require_iteration
from steps.adapters.sample_rows import (
    REWARD_COLUMNS,
    SAMPLE_COLUMNS,
    check_samples,
    check_scores,
    decode_sample,
    decode_scored_sample,
    pack_int32,
    sample_key,
    sample_values,
)
from steps.adapters.tables import batches, prompt_draws, rewards, samples
from steps.errors import DataError
from steps.records import Lease, Reward, Sample, ScoredSample

MIN_USABLE_REWARDS = 2
"""A group-relative advantage needs at least two scores."""

SAME_SAMPLE = and_(
    rewards.c.run_id == samples.c.run_id,
    rewards.c.iteration == samples.c.iteration,
    rewards.c.prompt_uid == samples.c.prompt_uid,
    rewards.c.sample_index == samples.c.sample_index,
)
SAME_GROUP = and_(
    samples.c.run_id == prompt_draws.c.run_id,
    samples.c.iteration == prompt_draws.c.iteration,
    samples.c.prompt_uid == prompt_draws.c.prompt_uid,
)


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


@dataclass(frozen=True, slots=True)
class _Group:
    """A fully scored group that is neither consumed nor dropped."""

    iteration: int
    prompt_uid: str
    num_samples: int
    num_ok: int
    num_timeouts: int
    min_version: int
    num_tokens: int


def complete_rollout(db: Database, lease: Lease, new_samples: Sequence[Sample]) -> bool:
    """Store a rollout unit's samples, mark the unit done and create the reward unit of the same number.

    A prompt of the unit without a sample is recorded as dropped. False, and nothing is stored, when the lease was lost
    or the unit is done already.

    Raises:
        ValueError: not a rollout lease, a sample of another unit, or a sample whose lengths don't match.
    """
    check_samples(lease, new_samples)
    unit = lease.unit
    prompt_ids = {uid: pack_int32(ids) for uid, ids in {s.prompt_uid: s.prompt_ids for s in new_samples}.items()}
    rows = [sample_values(lease, sample) for sample in new_samples]
    with db.transaction() as connection:
        worker = mark_done(connection, lease)
        if worker is None:
            return False
        if rows:
            connection.execute(samples.insert().values(worker=worker), rows)
            _store_prompt_ids(connection, lease, prompt_ids)
        missing = [uid for uid in unit.prompt_uids if uid not in prompt_ids]
        drop_open_prompts(
            connection, unit.run_id, unit.iteration, {uid: "no sample: the rollout gave none" for uid in missing}
        )
        scorable = [uid for uid in unit.prompt_uids if uid in prompt_ids]
        if scorable:
            add_unit(connection, unit.run_id, unit.iteration, "reward", unit.unit, scorable)
    return True


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


def complete_reward(db: Database, lease: Lease, scores: Sequence[Reward]) -> bool:
    """Store a reward unit's scores, one for each sample, and mark the unit done.

    False, and nothing is stored, when the lease was lost or the unit is done already.

    Raises:
        ValueError: not a reward lease, a score too many or missing, or a value that doesn't fit the status.
    """
    check_scores(lease, scores)
    unit = lease.unit
    key = {"run_id": unit.run_id, "iteration": unit.iteration}
    with db.transaction() as connection:
        worker = mark_done(connection, lease)
        if worker is None:
            return False
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
                    "worker": worker,
                }
                for score in scores
            ],
        )
    return True


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
        groups = _scored_groups(connection, run_id, iteration)
        reasons = _drop_reasons(groups, policy_version, max_staleness)
        chosen = [group for group in groups if group not in reasons]
        if not chosen:
            raise _nothing_to_train(run_id, iteration, list(reasons.values()))
        _insert_batch(connection, run_id, iteration, policy_version, chosen, len(reasons))
        _consume(connection, run_id, iteration, chosen)
        for group, reason in reasons.items():
            drop_open_prompts(connection, run_id, group.iteration, {group.prompt_uid: reason})
        return _require_batch(connection, run_id, iteration)


def get_batch(db: Database, run_id: str, iteration: int) -> BatchRow:
    """Raises DataError when nothing is selected for that iteration yet."""
    with db.read() as connection:
        return _require_batch(connection, run_id, iteration)


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


def _store_prompt_ids(connection: Connection, lease: Lease, prompt_ids: Mapping[str, bytes]) -> None:
    statement = (
        update(prompt_draws)
        .where(
            prompt_draws.c.run_id == lease.unit.run_id,
            prompt_draws.c.iteration == lease.unit.iteration,
            prompt_draws.c.prompt_uid == bindparam("uid"),
        )
        .values(prompt_ids=bindparam("ids"))
    )
    connection.execute(statement, [{"uid": uid, "ids": ids} for uid, ids in prompt_ids.items()])


def _scored_groups(connection: Connection, run_id: str, iteration: int) -> list[_Group]:
    """Ordered by (iteration, prompt_uid)."""
    key = (samples.c.iteration, samples.c.prompt_uid)
    statement = (
        select(
            *key,
            func.count(),
            func.sum(case((rewards.c.status == "ok", 1), else_=0)),
            func.sum(case((rewards.c.status == "timeout", 1), else_=0)),
            func.min(samples.c.min_version),
            func.sum(samples.c.num_tokens),
        )
        .select_from(prompt_draws.join(samples, SAME_GROUP).outerjoin(rewards, SAME_SAMPLE))
        .where(
            prompt_draws.c.run_id == run_id,
            prompt_draws.c.iteration <= iteration,
            prompt_draws.c.status == "drawn",
        )
        .group_by(*key)
        .having(func.count() == func.count(rewards.c.status))
    )
    return sorted(
        (_Group(*row) for row in connection.execute(statement)), key=lambda group: (group.iteration, group.prompt_uid)
    )


def _drop_reasons(groups: Sequence[_Group], policy_version: int, max_staleness: int) -> dict[_Group, str]:
    """Why groups (ordered by iteration) must not be trained on; those that may be are not in the result."""
    reasons: dict[_Group, str] = {}
    newest: dict[str, _Group] = {}
    for group in groups:
        reason = _unfit(group, policy_version, max_staleness)
        if reason is not None:
            reasons[group] = reason
            continue
        older = newest.get(group.prompt_uid)
        if older is not None:
            reasons[older] = f"superseded: iteration {group.iteration} has a newer group of the prompt"
        newest[group.prompt_uid] = group
    return reasons


def _unfit(group: _Group, policy_version: int, max_staleness: int) -> str | None:
    staleness = policy_version - group.min_version
    if staleness > max_staleness:
        return f"stale: version {group.min_version} is {staleness} behind {policy_version}, at most {max_staleness}"
    if staleness < 0:
        return f"stale: version {group.min_version} is later than {policy_version}, which is trained"
    if group.num_ok < MIN_USABLE_REWARDS:
        errors = group.num_samples - group.num_ok - group.num_timeouts
        return (
            f"no usable reward: {group.num_ok} ok of {group.num_samples} "
            f"({group.num_timeouts} timeouts, {errors} errors), at least {MIN_USABLE_REWARDS} needed"
        )
    return None


def _nothing_to_train(run_id: str, iteration: int, reasons: Sequence[str]) -> DataError:
    kinds = Counter(reason.split(":")[0] for reason in reasons)
    found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none is fully scored"
    return DataError(
        f"run {run_id}, iteration {iteration}: no group to train on ({found}); "
        "look at the reward step's errors and at buffer.max_staleness"
    )


def _insert_batch(
    connection: Connection, run_id: str, iteration: int, policy_version: int, chosen: Sequence[_Group], dropped: int
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


def _consume(connection: Connection, run_id: str, iteration: int, chosen: Iterable[_Group]) -> None:
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
