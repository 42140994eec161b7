"""One leased rollout unit: cut into decode batches, sampled, and stored group by group."""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe.sampler import SampledResponse, SamplingStopped
from steps import sample_routing
from steps.adapters import buffer, leases
from steps.adapters.buffer import CommitOutcome
from steps.adapters.engines.base import Engine
from steps.entrypoint import StepContext
from steps.errors import DataError, Interrupted
from steps.records import Lease, Prompt, Sample
from steps.seeds import sample_seed
from steps.tasks.dataset import prompt_content

COMMIT_EVERY_S = 1.0
"""Groups that are finished one by one are stored together at most this often."""


@dataclass(slots=True)
class RolloutCounts:
    """What came of a worker's sampling."""

    samples: int = 0
    tokens: int = 0
    duplicate_samples: int = 0
    abandoned_tokens: int = 0
    seconds: float = 0.0


def cut(prompt_uids: Sequence[str], prompts_per_batch: int) -> list[tuple[str, ...]]:
    """The decode batches of a unit: always the same ones, for a response depends on its batch. 0: a single one."""
    size = prompts_per_batch or len(prompt_uids)
    return [tuple(prompt_uids[start : start + size]) for start in range(0, len(prompt_uids), size)]


class RolloutUnit:
    """Samples what is missing of one unit. A killed worker costs what its last commit didn't hold."""

    def __init__(
        self,
        context: StepContext,
        engine: Engine,
        prompts: Mapping[str, Prompt],
        lease: Lease,
        lost: threading.Event,
        counts: RolloutCounts,
    ) -> None:
        self.context = context
        self.engine = engine
        self.prompts = prompts
        self.lease = lease
        self.lost = lost
        self.counts = counts
        self.outcome: CommitOutcome | None = None

    def sample(self) -> bool:
        """True when the unit is done by this lease, False when that was lost.

        After a stop was asked for no further batch is begun. Raises Interrupted then, and when the drain budget is
        spent.
        """
        batches = cut(self.lease.unit.prompt_uids, self.context.config.rollout.prompts_per_batch)
        if self.lease.is_backup:  # from the other end: the two workers meet in the middle
            batches.reverse()
        is_resumed = self.lease.attempt > 1
        for number, batch in enumerate(batches):
            if number:
                self.context.interruption.check()
            stored = self._stored() if number or is_resumed else set()
            missing = [uid for uid in batch if uid not in stored]
            if missing:
                self._sample_batch(missing if self.engine.streams_responses else batch)
            if self.lost.is_set() or (self.outcome is not None and self.outcome.lost):
                break
        return self._is_done()

    def commit(self, samples: Sequence[Sample]) -> None:
        """Store whole groups."""
        stored = [sample_routing.spill(self.context.store, self.context.run_id, sample) for sample in samples]
        self.outcome = buffer.commit_groups(self.context.database, self.lease, stored)
        self.counts.duplicate_samples += self.outcome.duplicates
        if self.outcome.committed == len(stored):
            self.counts.samples += len(stored)
            self.counts.tokens += sum(len(sample.response_ids_T) for sample in stored)

    def _stored(self) -> set[str]:
        return buffer.stored_prompts(self.context.database, self.lease.unit)

    def _is_done(self) -> bool:
        outcome = self.outcome or buffer.commit_groups(self.context.database, self.lease, [])
        if outcome.lost:
            self.context.say(f"unit {self.lease.unit.unit}: left, another worker has it or nobody waits for it")
        return outcome.unit_done and not outcome.lost

    def _sample_batch(self, uids: Sequence[str]) -> None:
        rollout, interruption = self.context.config.rollout, self.context.interruption
        batch = DecodeBatch(self, uids)
        try:
            responses = self.engine.sample(
                [batch.encoded[uid] for uid, _ in batch.rows],
                batch.seeds,
                rollout.sampling,
                stop=lambda: interruption.budget_spent(rollout.drain_budget_s) or self.lost.is_set(),
                on_response=batch.on_response if self.engine.streams_responses else None,
            )
        except SamplingStopped as stopped:
            batch.commit()
            self._abandon(stopped.num_tokens + batch.num_waiting_tokens)
            if self.lost.is_set():
                self.outcome = None
                return
            unit = self.lease.unit.unit
            raise Interrupted(f"unit {unit} abandoned after the drain budget, its lease returned") from None
        batch.waiting.update(enumerate(responses))
        batch.commit()

    def _abandon(self, tokens: int) -> None:
        self.counts.abandoned_tokens += tokens
        leases.record_abandoned(self.context.database, self.lease, tokens)


class DecodeBatch:
    """Prompts that are sampled together, and the responses that aren't stored yet."""

    def __init__(self, unit: RolloutUnit, uids: Sequence[str]) -> None:
        config = unit.context.config
        self.unit = unit
        self.rows = [(uid, index) for uid in uids for index in range(config.rollout.group_size)]
        self.encoded = {uid: self._encode(unit.prompts[uid]) for uid in uids}
        iteration = unit.lease.unit.iteration
        self.seeds = [sample_seed(config.seed, iteration, uid, index) for uid, index in self.rows]
        self.waiting: dict[int, SampledResponse] = {}
        self._committed_uids: set[str] = set()
        self._next_commit_s = time.monotonic() + COMMIT_EVERY_S

    def on_response(self, row: int, response: SampledResponse) -> None:
        """Take a finished response; stores the groups that are whole, once a while."""
        self.waiting[row] = response
        if time.monotonic() >= self._next_commit_s:
            self.commit()
            self._next_commit_s = time.monotonic() + COMMIT_EVERY_S

    def commit(self) -> None:
        """Store the whole groups among the waiting responses."""
        group_size = self.unit.context.config.rollout.group_size
        counts = Counter(self.rows[row][0] for row in self.waiting)
        whole = {uid for uid, count in counts.items() if count == group_size} - self._committed_uids
        rows = [row for row in sorted(self.waiting) if self.rows[row][0] in whole]
        if rows:
            self.unit.commit([self._sample(row) for row in rows])
            self._committed_uids |= whole
        for row in [row for row in self.waiting if self.rows[row][0] in self._committed_uids]:
            del self.waiting[row]

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of responses whose groups aren't whole."""
        return sum(len(response.response_ids) for response in self.waiting.values())

    def _sample(self, row: int) -> Sample:
        (uid, index), response, engine = self.rows[row], self.waiting[row], self.unit.engine
        sampling = self.unit.context.config.rollout.sampling
        return Sample(
            prompt_uid=uid,
            sample_index=index,
            seed=self.seeds[row],
            prompt_ids=tuple(self.encoded[uid]),
            response_ids_T=tuple(response.response_ids),
            response_text=engine.decode(response.response_ids),
            logprobs_T=tuple(response.logprobs),
            versions_T=(engine.policy_version,) * len(response.response_ids),
            finish_reason=response.finish_reason,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            routing=None if response.expert_ids is None else sample_routing.from_expert_ids(response.expert_ids),
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        config = self.unit.context.config
        ids = self.unit.engine.encode(prompt_content(config.task, prompt))
        limit = config.rollout.sampling.max_prompt_tokens
        if len(ids) > limit:
            raise DataError(
                f"prompt {prompt.uid} has {len(ids)} tokens, more than rollout.sampling.max_prompt_tokens = {limit}; "
                "raise the limit or shorten the prompt"
            )
        return ids
