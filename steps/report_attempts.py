"""Step attempts as a report reads them: numbered, with a verdict, and with the time that they cover."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from steps.adapters.ledger import AttemptRow

INTERRUPTED_CODES = {75, 137, 143}
AttemptState = Literal["ok", "running", "interrupted", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One execution of a step; `attempt` counts from 1 for its (iteration, step, worker)."""

    step: str
    iteration: int | None
    worker: str | None
    attempt: int
    start_s: float
    end_s: float | None
    exit_code: int | None
    state: AttemptState
    interrupted: bool
    is_retry: bool
    """It follows an attempt that did not succeed."""
    capacity_type: str
    node: str
    pod: str
    detail: str
    metrics: dict[str, Any]
    provenance: dict[str, Any]
    transport: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        names = ("step", "worker", "attempt", "start_s", "end_s", "exit_code", "state", "capacity_type", "node", "pod")
        sandbox = {"sandbox": self.metrics["sandbox"]} if "sandbox" in self.metrics else {}
        return {name: getattr(self, name) for name in (*names, "detail")} | sandbox


def label_attempts(rows: Sequence[AttemptRow], interrupted_ids: set[int]) -> list[Attempt]:
    """In the order of their start. An attempt without an end was killed if another one followed it."""
    ordered = sorted(rows, key=lambda row: (row.started_at, row.attempt_id))
    groups: dict[tuple[Any, ...], list[AttemptRow]] = defaultdict(list)
    for row in ordered:
        groups[row.iteration, row.step, row.worker].append(row)
    labelled = {}
    for group in groups.values():
        succeeded = True
        for number, row in enumerate(group, start=1):
            state = _state(row, superseded=number < len(group))
            interrupted = state == "interrupted" or row.attempt_id in interrupted_ids
            labelled[row.attempt_id] = _attempt(row, number, state, interrupted, is_retry=not succeeded)
            succeeded = state == "ok"
    return [labelled[row.attempt_id] for row in ordered]


def _state(row: AttemptRow, *, superseded: bool) -> AttemptState:
    if row.exit_code is None:
        return "interrupted" if superseded else "running"
    if row.exit_code == 0:
        return "ok"
    return "interrupted" if row.exit_code in INTERRUPTED_CODES else "failed"


def _attempt(row: AttemptRow, number: int, state: AttemptState, interrupted: bool, is_retry: bool) -> Attempt:
    return Attempt(
        step=row.step,
        iteration=row.iteration,
        worker=row.worker,
        attempt=number,
        start_s=row.started_at,
        end_s=row.ended_at,
        exit_code=row.exit_code,
        state=state,
        interrupted=interrupted,
        is_retry=is_retry,
        capacity_type=row.capacity_type,
        node=row.node,
        pod=row.pod,
        detail=row.detail,
        metrics=row.metrics,
        provenance=row.provenance,
        transport=row.transport,
    )


def span_seconds(attempts: Sequence[Attempt]) -> float:
    """From the first start to the last known moment."""
    if not attempts:
        return 0.0
    return max(attempt.end_s or attempt.start_s for attempt in attempts) - min(attempt.start_s for attempt in attempts)


def covered_seconds(attempts: Sequence[Attempt]) -> float:
    """Length of the union of the attempts' intervals; one without an end covers nothing."""
    total, reached = 0.0, float("-inf")
    for start_s, end_s in sorted((a.start_s, a.end_s) for a in attempts if a.end_s is not None):
        total += max(0.0, end_s - max(start_s, reached))
        reached = max(reached, end_s)
    return total
