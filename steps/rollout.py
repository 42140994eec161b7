"""Sample responses: lease work units, decode each as one batch of whole groups, commit each in one transaction.

On SIGTERM no new unit is leased; the running one is finished if it ends within `rollout.drain_budget_s`, otherwise its
lease is returned. Exit 75 then; 0 when nothing is left to lease and nothing is outstanding.
"""

import threading
import time

from moe.sampler import SamplingStopped
from steps import paths, sample_routing
from steps.adapters import buffer, ledger
from steps.adapters.engines.base import Engine
from steps.adapters.stragglers import drop_late_units
from steps.arguments import natural_int, step_parser
from steps.entrypoint import StepContext, execute
from steps.errors import DataError, Interrupted
from steps.leasing import work_through_units
from steps.policies import load_engine
from steps.records import Lease, Prompt, Sample
from steps.seeds import sample_seed
from steps.tasks.frozen import dataset_from_jsonl


class RolloutWorker:
    """One worker of one iteration: its engine, its prompts, its counts."""

    def __init__(self, context: StepContext, iteration: int) -> None:
        self.context = context
        self.config = context.config
        self.iteration = iteration
        row = ledger.get_iteration(context.database, context.run_id, iteration)
        self.total_units = row.num_units
        record_routing = self.config.moe.routing_replay == "sampler"
        self.engine: Engine = load_engine(context, row.policy_version, record_routing=record_routing)
        data = context.store.get_bytes(paths.iteration_prompts_key(context.run_id, iteration))
        self.prompts = {prompt.uid: prompt for prompt in dataset_from_jsonl(data).train}
        self.samples = self.tokens = 0
        self.seconds = 0.0

    def work(self, lease: Lease, lost: threading.Event) -> bool:
        started_s = time.perf_counter()
        sampled = self._sample_unit(lease, lost)
        if lost.is_set():
            self.context.say(f"unit {lease.unit.unit}: left, another worker has it or nobody waits for it")
            return False
        samples = [sample_routing.spill(self.context.store, self.context.run_id, sample) for sample in sampled]
        committed = buffer.complete_rollout(self.context.database, lease, samples)
        self.seconds += time.perf_counter() - started_s
        if committed:
            self.samples += len(samples)
            self.tokens += sum(len(sample.response_ids_T) for sample in samples)
        self.context.progress(lease.unit.unit + 1, self.total_units)
        return committed

    def _sample_unit(self, lease: Lease, lost: threading.Event) -> list[Sample]:
        """Nothing when the lease was lost meanwhile."""
        rollout = self.config.rollout
        group = range(rollout.group_size)
        rows = [(self.prompts[uid], index) for uid in lease.unit.prompt_uids for index in group]
        encoded = {uid: self._encode(self.prompts[uid]) for uid in lease.unit.prompt_uids}
        seeds = [sample_seed(self.config.seed, self.iteration, prompt.uid, index) for prompt, index in rows]
        interruption = self.context.interruption
        try:
            responses = self.engine.sample(
                [encoded[prompt.uid] for prompt, _ in rows],
                seeds,
                rollout.sampling,
                stop=lambda: interruption.budget_spent(rollout.drain_budget_s) or lost.is_set(),
            )
        except SamplingStopped:
            if lost.is_set():
                return []
            raise Interrupted(f"unit {lease.unit.unit} abandoned after the drain budget, its lease returned") from None
        return [
            Sample(
                prompt_uid=prompt.uid,
                sample_index=index,
                seed=seed,
                prompt_ids=tuple(encoded[prompt.uid]),
                response_ids_T=tuple(response.response_ids),
                response_text=self.engine.decode(response.response_ids),
                logprobs_T=tuple(response.logprobs),
                versions_T=(self.engine.policy_version,) * len(response.response_ids),
                finish_reason=response.finish_reason,
                temperature=rollout.sampling.temperature,
                top_p=rollout.sampling.top_p,
                routing=None if response.expert_ids is None else sample_routing.from_expert_ids(response.expert_ids),
            )
            for (prompt, index), seed, response in zip(rows, seeds, responses, strict=True)
        ]

    def _encode(self, prompt: Prompt) -> list[int]:
        ids = self.engine.encode(prompt.text)
        limit = self.config.rollout.sampling.max_prompt_tokens
        if len(ids) > limit:
            raise DataError(
                f"prompt {prompt.uid} has {len(ids)} tokens, more than rollout.sampling.max_prompt_tokens = {limit}; "
                "raise the limit or shorten the prompt"
            )
        return ids


def rollout(context: StepContext, iteration: int, worker: int, straggler_deadline_s: int = 0) -> None:
    def close() -> None:
        dropped = drop_late_units(context.database, context.run_id, iteration, straggler_deadline_s)
        if dropped:
            context.say(f"{dropped} units dropped: not sampled {straggler_deadline_s} s after the first was begun")

    started_s = time.perf_counter()
    state = RolloutWorker(context, iteration)
    load_s = time.perf_counter() - started_s
    try:
        work_through_units(
            context,
            "rollout",
            iteration=iteration,
            worker=worker,
            lease_s=state.config.rollout.lease_s,
            work=state.work,
            close=close if straggler_deadline_s else None,
        )
    finally:
        context.metrics.update(samples=state.samples, tokens=state.tokens, seconds=state.seconds, load_seconds=load_s)
    rate = state.tokens / state.seconds if state.seconds else 0.0
    context.say(f"{state.samples} samples, {state.tokens} tokens, {rate:.0f} tokens/s")
    context.output("samples", state.samples)
    context.output("tokens-per-s", round(rate))


def main() -> None:
    parser = step_parser("rollout", __doc__, worker=True)
    parser.add_argument(
        "--straggler-deadline",
        type=natural_int,
        default=0,
        help="seconds after the first unit was begun; then units that aren't sampled are dropped (0: wait for all)",
    )
    arguments = parser.parse_args()
    execute(
        "rollout",
        lambda context: rollout(context, arguments.iteration, arguments.worker, arguments.straggler_deadline),
        run_id=arguments.run,
        iteration=arguments.iteration,
        worker=arguments.worker,
    )


if __name__ == "__main__":
    main()
