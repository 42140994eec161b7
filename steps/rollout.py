"""Sample responses: lease work units, decode each as one batch of whole groups, commit each in one transaction.

On SIGTERM no new unit is leased; the running one is finished if it ends within `rollout.drain_budget_s`, otherwise its
lease is returned. Exit 75 then; 0 when nothing is left to lease and nothing is outstanding.
"""

import time

from moe.sampler import SamplingStopped
from steps import paths
from steps.adapters import buffer, ledger
from steps.adapters.engines.base import Engine
from steps.arguments import step_parser
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
        self.engine: Engine = load_engine(context, row.policy_version)
        data = context.store.get_bytes(paths.iteration_prompts_key(context.run_id, iteration))
        self.prompts = {prompt.uid: prompt for prompt in dataset_from_jsonl(data).train}
        self.samples = self.tokens = 0
        self.seconds = 0.0

    def work(self, lease: Lease) -> bool:
        started_s = time.perf_counter()
        samples = self._sample_unit(lease)
        committed = buffer.complete_rollout(self.context.database, lease, samples)
        self.seconds += time.perf_counter() - started_s
        if committed:
            self.samples += len(samples)
            self.tokens += sum(len(sample.response_ids_T) for sample in samples)
        self.context.progress(lease.unit.unit + 1, self.total_units)
        return committed

    def _sample_unit(self, lease: Lease) -> list[Sample]:
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
                stop=lambda: interruption.budget_spent(rollout.drain_budget_s),
            )
        except SamplingStopped:
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


def rollout(context: StepContext, iteration: int, worker: int) -> None:
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
        )
    finally:
        context.metrics.update(samples=state.samples, tokens=state.tokens, seconds=state.seconds, load_seconds=load_s)
    rate = state.tokens / state.seconds if state.seconds else 0.0
    context.say(f"{state.samples} samples, {state.tokens} tokens, {rate:.0f} tokens/s")
    context.output("samples", state.samples)
    context.output("tokens-per-s", round(rate))


def main() -> None:
    arguments = step_parser("rollout", __doc__, worker=True).parse_args()
    execute(
        "rollout",
        lambda context: rollout(context, arguments.iteration, arguments.worker),
        run_id=arguments.run,
        iteration=arguments.iteration,
        worker=arguments.worker,
    )


if __name__ == "__main__":
    main()
