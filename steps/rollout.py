"""Sample responses: lease work units, decode their batches of whole groups, commit each batch in one transaction.

On a notice to stop no new unit is leased and no new batch begun; the running batch is finished if it ends within
`rollout.drain_budget_s`, otherwise the lease is returned without it. Exit 75 then; 0 when nothing is left to lease and
nothing is outstanding.
"""

import threading
import time
from dataclasses import asdict

from steps import paths
from steps.adapters import ledger
from steps.adapters.engines.base import Engine
from steps.adapters.stragglers import drop_late_units
from steps.arguments import natural_int, step_parser
from steps.entrypoint import StepContext, execute
from steps.leasing import work_through_units
from steps.policies import load_engine
from steps.records import Lease
from steps.rollout_unit import RolloutCounts, RolloutUnit
from steps.tasks.frozen import dataset_from_jsonl


class RolloutWorker:
    """One worker of one iteration: its engine, its prompts, its counts."""

    def __init__(self, context: StepContext, iteration: int, worker: int) -> None:
        self.context = context
        self.config = context.config
        row = ledger.get_iteration(context.database, context.run_id, iteration)
        self.total_units = row.num_units
        record_routing = self.config.moe.routing_replay == "sampler"
        self.engine: Engine = load_engine(context, row.policy_version, worker=worker, record_routing=record_routing)
        data = context.store.get_bytes(paths.iteration_prompts_key(context.run_id, iteration))
        self.prompts = {prompt.uid: prompt for prompt in dataset_from_jsonl(data).train}
        self.counts = RolloutCounts()

    def work(self, lease: Lease, lost: threading.Event) -> bool:
        started_s = time.perf_counter()
        unit = RolloutUnit(self.context, self.engine, self.prompts, lease, lost, self.counts)
        try:
            is_done = unit.sample()
        finally:
            self.counts.seconds += time.perf_counter() - started_s
        self.context.progress(lease.unit.unit + 1, self.total_units)
        return is_done


def rollout(context: StepContext, iteration: int, worker: int, straggler_deadline_s: int = 0) -> None:
    def close() -> None:
        dropped = drop_late_units(context.database, context.run_id, iteration, straggler_deadline_s)
        if dropped:
            context.say(f"{dropped} units dropped: not sampled {straggler_deadline_s} s after the first was begun")

    started_s = time.perf_counter()
    state = RolloutWorker(context, iteration, worker)
    load_s, counts = time.perf_counter() - started_s, state.counts
    try:
        work_through_units(
            context,
            "rollout",
            iteration=iteration,
            worker=worker,
            lease_s=state.config.rollout.lease_s,
            work=state.work,
            close=close if straggler_deadline_s else None,
            backup_after=state.config.rollout.backup_after,
        )
    finally:
        context.metrics.update(asdict(counts), load_seconds=load_s, engine=state.engine.report())
    rate = counts.tokens / counts.seconds if counts.seconds else 0.0
    context.say(f"{counts.samples} samples, {counts.tokens} tokens, {rate:.0f} tokens/s")
    context.output("samples", counts.samples)
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
