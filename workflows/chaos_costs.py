"""What each fault of a run cost: seconds until it was seen and made good, samples and tokens that were made again.

Times come from the executor's log and from the ledger, whose clocks are one machine's here. Leases tell the samples. A
killed worker leaves no count of what it had sampled; then the tokens are bounded from above by those that its unit
lacked at that moment: the replacement samples the same ones again.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steps.adapters.attempts import AttemptRow
from steps.adapters.lease_history import UnitLeaseRow
from steps.errors import Interrupted
from workflows.chaos_log import FaultRecord

_LEDGER_STEPS = {"init": "init_run", "summary": "report"}
_SAMPLING = ("rollout", "reward")


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultCost:
    """One fault's consequences; None where there is nothing to tell, as of a pod that ended well all the same."""

    record: FaultRecord
    detected_s: float | None
    """From the fault until the executor saw the pod's end; of a frozen worker, until another one took its unit."""
    restarted_s: float | None
    """Until the next attempt of the step was in the ledger."""
    recovered_s: float | None
    """Until a replacement committed: the first new sample or score, or the end of a step that commits once."""
    samples_completed: int
    """Committed by this attempt."""
    samples_returned: int
    """Of units that it gave back."""
    samples_lost: int
    """Of units that it held when it was lost: made again by another worker."""
    samples_duplicated: int
    units_wasted: int
    wasted_tokens: int
    tokens_are_bound: bool
    """Whether `wasted_tokens` is an upper bound."""
    wasted_s: float
    """Seconds of work that was done again; an upper bound for a trainer that saved its state on the way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What the ledger knows of a run."""

    attempts: Sequence[AttemptRow]
    leases: Sequence[UnitLeaseRow]


def cost_of(record: FaultRecord, history: History) -> FaultCost:
    held = _held(record, history.leases)
    unfinished = [lease for lease in held if lease.outcome not in ("done", None)]
    returned = [lease for lease in unfinished if lease.outcome == "returned"]
    lost = [lease for lease in unfinished if lease.outcome != "returned"]
    wasted = [lease for lease in unfinished if _is_waste(lease)]
    own = [lease for lease in history.leases if _is_of(lease, record)]
    missing = {lease.token: _missing(lease, history.leases) for lease in unfinished}
    uncounted = [lease for lease in lost if not lease.abandoned_tokens and not lease.duplicate_tokens]
    later = _later_attempts(record, history.attempts)
    return FaultCost(
        record=record,
        detected_s=_after(record, _detected_at(record, held, history.leases)),
        restarted_s=_after(record, min((attempt.started_at for attempt in later), default=None)),
        recovered_s=_after(record, _recovered_at(record, held, later, history.leases)),
        samples_completed=sum(lease.samples for lease in own),
        samples_returned=sum(missing[lease.token][0] for lease in returned),
        samples_lost=sum(missing[lease.token][0] for lease in lost),
        samples_duplicated=sum(lease.duplicate_samples for lease in own),
        units_wasted=sum(1 for lease in wasted if missing[lease.token][0]),
        wasted_tokens=sum(lease.abandoned_tokens + lease.duplicate_tokens for lease in own)
        + sum(missing[lease.token][1] for lease in uncounted),
        tokens_are_bound=any(missing[lease.token][1] for lease in uncounted),
        wasted_s=_wasted_s(record, wasted),
    )


def _is_waste(lease: UnitLeaseRow) -> bool:
    """Whether work was thrown away: a sampler that is asked to stop gives back only what it hasn't begun."""
    return lease.outcome != "returned" or lease.abandoned_tokens > 0 or lease.kind == "reward"


def _is_of(lease: UnitLeaseRow, record: FaultRecord) -> bool:
    return lease.kind == record.step and lease.iteration == record.iteration and lease.pod == record.pod


def _end_s(record: FaultRecord) -> float:
    """The last moment at which the pod may have worked."""
    return max(record.struck_at_s, record.ended_at_s or record.killed_at_s or record.struck_at_s)


def _held(record: FaultRecord, leases: Iterable[UnitLeaseRow]) -> list[UnitLeaseRow]:
    """The pod's leases that were open when the fault struck, or that it took between a notice and its end."""
    return [
        lease
        for lease in leases
        if _is_of(lease, record)
        and lease.leased_at <= _end_s(record)
        and (lease.ended_at is None or lease.ended_at >= record.struck_at_s)
    ]


def _missing(lease: UnitLeaseRow, leases: Iterable[UnitLeaseRow]) -> tuple[int, int]:
    """Samples and tokens of the lease's unit that later leases committed."""
    later = [
        other
        for other in leases
        if (other.kind, other.iteration, other.unit) == (lease.kind, lease.iteration, lease.unit)
        and other.token != lease.token
        and (other.last_commit_at or 0.0) > (lease.last_commit_at or lease.leased_at)
    ]
    return sum(other.samples for other in later), sum(other.tokens for other in later)


def _later_attempts(record: FaultRecord, attempts: Iterable[AttemptRow]) -> list[AttemptRow]:
    """Attempts of the same work that began after the fault, in their order."""
    step = _LEDGER_STEPS.get(record.step, record.step)
    wanted = (step, record.iteration or None, None if record.worker < 0 else str(record.worker))
    later = (
        attempt
        for attempt in attempts
        if (attempt.step, attempt.iteration or None, attempt.worker) == wanted
        and attempt.started_at > record.struck_at_s
        and attempt.pod != record.pod
    )
    return sorted(later, key=lambda attempt: attempt.started_at)


def _detected_at(record: FaultRecord, held: Sequence[UnitLeaseRow], leases: Iterable[UnitLeaseRow]) -> float | None:
    if record.ended_the_pod:
        return record.ended_at_s
    return min((lease.leased_at for lease in _taken_over(record, held, leases)), default=None)


def _taken_over(
    record: FaultRecord, held: Sequence[UnitLeaseRow], leases: Iterable[UnitLeaseRow]
) -> list[UnitLeaseRow]:
    """Leases of others on the units that the pod held, begun after the fault, and before a frozen pod went on."""
    units = {lease.unit for lease in held}
    return [
        lease
        for lease in leases
        if (lease.kind, lease.iteration) == (record.step, record.iteration)
        and lease.unit in units
        and lease.pod != record.pod
        and record.struck_at_s < lease.leased_at <= (record.released_at_s or math.inf)
    ]


def _recovered_at(
    record: FaultRecord, held: Sequence[UnitLeaseRow], later: Sequence[AttemptRow], leases: Sequence[UnitLeaseRow]
) -> float | None:
    if record.step in _SAMPLING:
        pods = {attempt.pod for attempt in later}
        replacements = [
            *_taken_over(record, held, leases),
            *(lease for lease in leases if lease.kind == record.step and lease.pod in pods),
        ]
        commits = [lease.first_commit_at for lease in replacements if lease.first_commit_at is not None]
        commits = [time_s for time_s in commits if time_s > record.struck_at_s]
        if commits:
            return min(commits)
    done = [attempt.ended_at for attempt in later if attempt.exit_code == 0 and attempt.ended_at is not None]
    return min(done, default=None)


def _after(record: FaultRecord, time_s: float | None) -> float | None:
    return None if time_s is None else max(0.0, time_s - record.struck_at_s)


def _wasted_s(record: FaultRecord, wasted: Sequence[UnitLeaseRow]) -> float:
    if record.step in _SAMPLING:
        begun = (lease.last_commit_at or lease.leased_at for lease in wasted)
        return sum(max(0.0, _end_s(record) - begun_s) for begun_s in begun)
    saved = record.step == "train" and record.exit_code == Interrupted.exit_code
    return _end_s(record) - record.started_at_s if record.ended_the_pod and not saved else 0.0
