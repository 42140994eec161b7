"""Which groups an iteration trains on, and why the others are dropped."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, and_, case, func, select

from steps.adapters.tables import prompt_draws, rewards, samples
from steps.errors import DataError

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


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A fully scored group that is neither consumed nor dropped."""

    iteration: int
    prompt_uid: str
    num_samples: int
    num_ok: int
    num_timeouts: int
    min_version: int
    num_tokens: int


def scored_groups(connection: Connection, run_id: str, iteration: int) -> list[ScoredGroup]:
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
        (ScoredGroup(*row) for row in connection.execute(statement)),
        key=lambda group: (group.iteration, group.prompt_uid),
    )


def drop_reasons(groups: Sequence[ScoredGroup], policy_version: int, max_staleness: int) -> dict[ScoredGroup, str]:
    """Why groups (ordered by iteration) must not be trained on; those that may be are not in the result."""
    reasons: dict[ScoredGroup, str] = {}
    newest: dict[str, ScoredGroup] = {}
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


def _unfit(group: ScoredGroup, policy_version: int, max_staleness: int) -> str | None:
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


def nothing_to_train(run_id: str, iteration: int, reasons: Sequence[str]) -> DataError:
    kinds = Counter(reason.split(":")[0] for reason in reasons)
    found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none is fully scored"
    return DataError(
        f"run {run_id}, iteration {iteration}: no group to train on ({found}); "
        "look at the reward step's errors and at buffer.max_staleness"
    )
