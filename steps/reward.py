"""Score responses: lease a unit's samples, verify each in a process with limits, commit the rewards in one transaction.

A reward has a value and a status (ok, timeout, error): a failure is never a 0.0.
"""

import random
import threading
import time
from dataclasses import replace

from steps import paths
from steps.adapters import buffer
from steps.arguments import step_parser
from steps.config import RunConfig
from steps.entrypoint import StepContext, execute
from steps.leasing import work_through_units
from steps.records import Lease, Prompt, Reward
from steps.scorers import open_scorer
from steps.seeds import derive_seed
from steps.tasks.frozen import dataset_from_jsonl
from steps.tasks.sandbox import Scorer


class RewardWorker:
    """One worker of one iteration: its scorer, its prompts, its counts."""

    def __init__(self, context: StepContext, iteration: int, scorer: Scorer) -> None:
        self.context = context
        self.config = context.config
        self.scorer = scorer
        data = context.store.get_bytes(paths.iteration_prompts_key(context.run_id, iteration))
        self.prompts: dict[str, Prompt] = {prompt.uid: prompt for prompt in dataset_from_jsonl(data).train}
        self.values: list[float] = []
        self.failures = 0
        self.seconds = 0.0

    def work(self, lease: Lease, lost: threading.Event) -> bool:
        started_s = time.perf_counter()
        unit = lease.unit
        samples = buffer.unit_samples(self.context.database, unit.run_id, unit.iteration, unit.prompt_uids)
        outcomes = self.scorer.score([(self.prompts[sample.prompt_uid], sample.response_text) for sample in samples])
        rewards = [
            Reward(
                prompt_uid=sample.prompt_uid,
                sample_index=sample.sample_index,
                status=status,
                value=value,
                detail=detail,
            )
            for sample, (status, value, detail) in zip(samples, outcomes, strict=True)
        ]
        if self.config.reward.shuffle:
            rewards = shuffle_rewards(rewards, self.config, unit.iteration, unit.unit)
        committed = buffer.complete_reward(self.context.database, lease, rewards)
        self.seconds += time.perf_counter() - started_s
        if committed:
            self.values += [reward.value for reward in rewards if reward.value is not None]
            self.failures += sum(reward.status != "ok" for reward in rewards)
        return committed


def shuffle_rewards(rewards: list[Reward], config: RunConfig, iteration: int, unit: int) -> list[Reward]:
    """Deal the unit's rewards out to its samples at random: a control that must not learn."""
    dealt = rewards.copy()
    random.Random(derive_seed("shuffle", config.seed, iteration, unit)).shuffle(dealt)
    return [
        replace(reward, prompt_uid=place.prompt_uid, sample_index=place.sample_index)
        for place, reward in zip(rewards, dealt, strict=True)
    ]


def reward(context: StepContext, iteration: int, worker: int) -> None:
    with open_scorer(context, context.config) as scorer:
        state = RewardWorker(context, iteration, scorer)
        lease_s = state.config.reward.lease_s
        try:
            work_through_units(context, "reward", iteration=iteration, worker=worker, lease_s=lease_s, work=state.work)
        finally:
            context.metrics.update(samples=len(state.values), failures=state.failures, seconds=state.seconds)
    mean = f"{sum(state.values) / len(state.values):.4f}" if state.values else "none"
    context.say(f"{len(state.values)} samples scored, mean reward {mean}, {state.failures} without a reward")
    context.output("reward-mean", mean)


def main() -> None:
    arguments = step_parser("reward", __doc__, worker=True).parse_args()
    execute(
        "reward",
        lambda context: reward(context, arguments.iteration, arguments.worker),
        run_id=arguments.run,
        iteration=arguments.iteration,
        worker=arguments.worker,
    )


if __name__ == "__main__":
    main()
