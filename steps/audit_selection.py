"""Audit of what was selected for training: replays every batch's selection from the rows of samples and rewards."""

from collections.abc import Sequence
from dataclasses import dataclass

from steps.adapters.buffer import BatchRow
from steps.adapters.runs import PromptDraw
from steps.adapters.stragglers import DROP_REASON
from steps.audit_findings import Findings
from steps.audit_samples import Groups

MIN_USABLE_REWARDS = 2
"""A group-relative advantage needs at least two scores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A fully scored group, and what the ledger says came of it."""

    iteration: int
    draw: PromptDraw
    min_version: int
    num_ok: int
    num_samples: int
    num_tokens: int

    @property
    def where(self) -> str:
        return f"iteration {self.iteration}, prompt {self.draw.prompt_uid}"


def candidates_of(found: Findings, iteration: int, draws: Sequence[PromptDraw], groups: Groups) -> list[Candidate]:
    """The groups of an iteration that a batch may select, by prompt uid; those never sampled must have no sample."""
    candidates = []
    for draw in sorted(draws, key=lambda draw: draw.prompt_uid):
        samples = groups.get(draw.prompt_uid, ())
        if draw.status == "dropped" and draw.drop_reason == DROP_REASON:
            where = f"iteration {iteration}, prompt {draw.prompt_uid}"
            found.require(
                not samples, "selection", where, f"is dropped as never sampled, and has {len(samples)} samples"
            )
        elif samples and all(sample.status is not None for sample in samples):
            candidate = Candidate(
                iteration=iteration,
                draw=draw,
                min_version=min(sample.min_version for sample in samples),
                num_ok=sum(sample.status == "ok" for sample in samples),
                num_samples=len(samples),
                num_tokens=sum(sample.num_tokens for sample in samples),
            )
            candidates.append(candidate)
    return candidates


def kind_of(reason: str | None) -> str:
    """A reason without its particulars."""
    return (reason or "").split(":")[0]


def check_selection(
    found: Findings, batch: BatchRow, candidates: Sequence[Candidate], max_staleness: int
) -> list[Candidate]:
    """The batch consumed what it had to and dropped the rest; returns what it should have consumed.

    `candidates`: all that no earlier batch has taken or dropped, by (iteration, prompt uid).
    """
    expected = {id(candidate): _unfit(candidate, batch.policy_version, max_staleness) for candidate in candidates}
    newest: dict[str, Candidate] = {}
    for candidate in candidates:
        if expected[id(candidate)] is None:
            older = newest.get(candidate.draw.prompt_uid)
            if older is not None:
                expected[id(older)] = "superseded"
            newest[candidate.draw.prompt_uid] = candidate
    for candidate in candidates:
        reason = expected[id(candidate)]
        draw = candidate.draw
        if reason is None:
            found.equal("selection", candidate.where, "consumed_by", draw.consumed_by, batch.iteration)
        else:
            found.equal("selection", candidate.where, "its reason to be dropped", kind_of(draw.drop_reason), reason)
    chosen = [candidate for candidate in candidates if expected[id(candidate)] is None]
    where = f"batch {batch.iteration}"
    found.equal("batch", where, "num_groups", batch.num_groups, len(chosen))
    found.equal("batch", where, "num_samples", batch.num_samples, sum(one.num_samples for one in chosen))
    found.equal("batch", where, "num_tokens", batch.num_tokens, sum(one.num_tokens for one in chosen))
    found.equal("batch", where, "num_dropped", batch.num_dropped, len(candidates) - len(chosen))
    return chosen


def _unfit(candidate: Candidate, policy_version: int, max_staleness: int) -> str | None:
    if not 0 <= policy_version - candidate.min_version <= max_staleness:
        return "stale"
    return "no usable reward" if candidate.num_ok < MIN_USABLE_REWARDS else None
