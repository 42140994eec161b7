"""Audit of who did the work: units, the history of their leases, and the attempts of the steps."""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from steps.adapters.attempts import AttemptRow
from steps.adapters.audit_queries import CommittedGroups, LeaseFacts, UnitFacts
from steps.audit_findings import Findings, IterationSums
from steps.audit_samples import Groups


def check_units_done(found: Findings, units: Sequence[UnitFacts], *, must_be: bool) -> None:
    """Nothing is left to do once a batch is selected."""
    for unit in units:
        done = unit.state == "done" or not must_be
        found.require(done, "units-done", _name(unit), f"is {unit.state}, and its iteration's batch is selected")


def check_reward_units(found: Findings, units: Sequence[UnitFacts], groups: Groups) -> None:
    """A rollout unit that is done has a reward unit of its number, with the prompts that have samples."""
    scoring = {unit.unit: unit.prompt_uids for unit in units if unit.kind == "reward"}
    for unit in units:
        if unit.kind == "rollout" and unit.state == "done":
            sampled = tuple(uid for uid in unit.prompt_uids if groups.get(uid))
            same = scoring.get(unit.unit, ()) == sampled
            found.require(same, "units", _name(unit), "its reward unit does not hold the prompts that were sampled")


def check_leases(
    found: Findings,
    units: Sequence[UnitFacts],
    leases: Sequence[LeaseFacts],
    groups: Groups,
    committed: Mapping[str, CommittedGroups],
    late_uids: Set[str],
) -> None:
    """What leases committed is what there is; each unit that is done was completed by one lease, and all have ended.

    `late_uids`: prompts dropped at the straggler deadline, which completes their units without a lease.
    """
    if not leases and committed.keys() == {""}:
        return  # sampled before leases had a history
    by_unit: dict[tuple[str, int], list[LeaseFacts]] = defaultdict(list)
    for lease in leases:
        by_unit[lease.kind, lease.unit].append(lease)
    for unit in units:
        own = by_unit.pop((unit.kind, unit.unit), [])
        numbers = sorted(lease.attempt for lease in own)
        found.equal("leases", _name(unit), "its leases", numbers, list(range(1, unit.attempts + 1)))
        stored = [sample for uid in unit.prompt_uids for sample in groups.get(uid, ())]
        if unit.kind == "reward":
            stored = [sample for sample in stored if sample.status is not None]
        found.equal("leases", _name(unit), "samples its leases committed", _total(own, "samples"), len(stored))
        if unit.state == "done":
            late = any(uid in late_uids for uid in unit.prompt_uids)
            completed = sum(lease.outcome == "done" for lease in own)
            found.equal("leases", _name(unit), "leases that completed it", completed, 0 if late else 1)
            still = sum(lease.outcome is None for lease in own)
            found.equal("leases", _name(unit), "leases that have not ended", still, 0)
    for (kind, number), own in by_unit.items():
        found.require(False, "leases", f"{kind} unit {number}", f"has {len(own)} leases, and there is no such unit")
    for lease in leases:
        if lease.kind == "rollout":
            there = committed.get(lease.token, CommittedGroups(samples=0, tokens=0))
            where = f"iteration {lease.iteration}, lease {lease.attempt} of rollout unit {lease.unit}"
            found.equal("leases", where, "samples", lease.samples, there.samples)
            found.equal("leases", where, "tokens", lease.tokens, there.tokens)


def add_leases(sums: IterationSums, leases: Sequence[LeaseFacts]) -> None:
    """What was done twice or for nothing."""
    sums.duplicate_samples = _total(leases, "duplicate_samples")
    sums.lost_leases = sum(lease.outcome in ("returned", "expired", "lost") for lease in leases)


def check_attempts(found: Findings, attempts: Sequence[AttemptRow], finished: set[int]) -> None:
    """An attempt has ended, or another of its step took its place, or its iteration is not finished.

    One outside of iterations without an end is explained while nothing began after it.
    """
    by_step: dict[tuple[int | None, str], list[AttemptRow]] = defaultdict(list)
    for attempt in attempts:
        by_step[attempt.iteration, attempt.step].append(attempt)
    for attempt in attempts:
        running = attempt is attempts[-1] if attempt.iteration is None else attempt.iteration not in finished
        place = "" if attempt.iteration is None else f"iteration {attempt.iteration}, "
        where = f"{place}{attempt.step} in pod {attempt.pod}"
        replaced = any(_replaces(other, attempt) for other in by_step[attempt.iteration, attempt.step])
        explained = attempt.ended_at is not None or running or replaced
        found.require(explained, "attempts", where, "began, never ended, and no other attempt took its place")


def _replaces(other: AttemptRow, attempt: AttemptRow) -> bool:
    """A later one of the same worker, or any that ended well after `attempt` began: nothing was left to do then."""
    is_later = other.attempt_id > attempt.attempt_id and other.worker == attempt.worker
    return is_later or (other.exit_code == 0 and (other.ended_at or 0.0) > attempt.started_at)


def _total(leases: Sequence[LeaseFacts], name: str) -> int:
    return sum(getattr(lease, name) for lease in leases)


def _name(unit: UnitFacts) -> str:
    return f"iteration {unit.iteration}, {unit.kind} unit {unit.unit}"
