"""One policy update: read the batch, compute advantages and the loss, step the optimizer, save the trainer's state.

With `train.ranks` above 1, that many processes do it together: torchrun's when it started this one, otherwise forks of
this one. On SIGTERM the state is saved after the running optimizer step and the exit code is 75; the next attempt
continues there and ends with the same weights, bit for bit.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from moe.parallel import ParallelLayout
from moe.update import PolicyTrainer, UpdateStopped
from moe.update_metrics import BatchMetrics, StepMetrics
from steps import gang, paths
from steps.adapters import ledger
from steps.adapters.publications import fetch_folder
from steps.adapters.store import NotFound
from steps.arguments import step_parser
from steps.batches import load_batch
from steps.entrypoint import RankContext, StepContext
from steps.errors import Interrupted
from steps.gang import Member
from steps.gang_step import execute_in_ranks, fail_together
from steps.seeds import derive_seed
from steps.trainers import (
    build_layout,
    build_trainer,
    complete_folders,
    delete_folder,
    is_stored,
    restore_trainer,
    store_trainer,
)
from steps.transport_evidence import TransportEvidence


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePlan:
    """What the first rank tells the others before they begin."""

    policy_version: int
    """Whose model is trained."""
    state_prefix: str
    """Where the trainer's state lies that this attempt continues from."""


def train(context: RankContext, member: Member, iteration: int) -> None:
    prefix = paths.checkpoint_prefix(context.run_id, iteration)
    # What only the ledger knows is found out, or found missing, before the ranks meet.
    plan = _plan(context, iteration, prefix) if isinstance(context, StepContext) else None
    gathering = gang.joined(member, context.config.moe.exchange_timeout_s) if member.size > 1 else nullcontext()
    with gathering as world:
        layout = build_layout(context.config, member, world)
        with layout.collective("sharing the plan"):
            plan = gang.broadcast(plan)
        try:
            if plan is not None:
                _update(context, layout, plan, iteration)
        except NotFound:
            # Another attempt may have finished meanwhile and deleted the state that this one was to continue from.
            if not is_stored(context, prefix):
                raise
            if member.size > 1:
                raise Interrupted("another attempt has finished this update; run again to go on") from None
    if isinstance(context, StepContext):
        for partial in complete_folders(context.store, paths.partial_checkpoints_prefix(context.run_id, iteration)):
            delete_folder(context.store, partial)
        context.output("checkpoint-uri", context.store.uri_of(prefix))


def _plan(context: StepContext, iteration: int, prefix: str) -> UpdatePlan | None:
    """None when there is nothing to do. It continues from the newest state inside this update, if there is one."""
    if is_stored(context, prefix):
        context.say("the checkpoint of this update exists already")
        return None
    version = ledger.get_iteration(context.database, context.run_id, iteration).policy_version
    partials = complete_folders(context.store, paths.partial_checkpoints_prefix(context.run_id, iteration))
    start = max(partials, default=paths.checkpoint_prefix(context.run_id, version))
    return UpdatePlan(policy_version=version, state_prefix=start)


def _update(context: RankContext, layout: ParallelLayout, plan: UpdatePlan, iteration: int) -> None:
    trainer = build_trainer(context, layout, plan.policy_version)
    restore_trainer(context, trainer, plan.state_prefix)
    if trainer.batch_step and isinstance(context, StepContext):
        context.say(f"continuing after optimizer step {trainer.batch_step} of this batch")
    folder = fetch_folder(context.store, paths.batch_prefix(context.run_id, iteration), context.environment.cache_dir)
    batch = load_batch(folder)
    evidence = TransportEvidence(context, trainer, layout)

    def on_step(step: StepMetrics) -> None:
        if isinstance(context, StepContext):
            context.progress(step.step, step.num_steps)
        if evidence.report is None and step.values.get("moe/sent_bytes", 0.0) > 0:
            evidence.collect()  # a wrong transport is found out now, not after hours

    started_s = time.perf_counter()
    try:
        metrics = trainer.run_batch(
            batch,
            seed=derive_seed("update", context.config.seed, iteration),
            start_step=trainer.batch_step,
            on_step=on_step,
            should_stop=lambda: context.interruption.requested,
        )
    except UpdateStopped as stopped:
        _stop(context, trainer, layout, iteration, stopped.steps_done)
    record = train_record(metrics, len(batch), time.perf_counter() - started_s) | {"transport": evidence.collect()}
    if isinstance(context, StepContext):
        _record(context, iteration, record)
    store_trainer(context, trainer, paths.checkpoint_prefix(context.run_id, iteration), layout)
    trainer.close()


def _stop(context: RankContext, trainer: PolicyTrainer, layout: ParallelLayout, iteration: int, done: int) -> None:
    store_trainer(context, trainer, paths.partial_checkpoint_prefix(context.run_id, iteration, done), layout)
    message = f"state saved after optimizer step {done} of the batch; run again to continue"
    fail_together(context, Interrupted(message))


def _record(context: StepContext, iteration: int, record: dict[str, Any]) -> None:
    """Before the checkpoint is stored: once that exists, nobody computes the metrics again."""
    ledger.set_iteration_metrics(context.database, context.run_id, iteration, "train", record)
    context.metrics.update(seconds=record["seconds"], samples=record["samples"])
    reward = record["metrics"]["critic/rewards/mean"]
    context.say(f"reward {reward:.3f}, {record['samples_per_s']:.0f} samples/s")
    if record["transport"]["status"] != "ok":
        context.say(f"transport {record['transport']['status']}: {record['transport']['reason']}")


def train_record(metrics: BatchMetrics, samples: int, seconds: float) -> dict[str, Any]:
    """What the ledger keeps of an update."""
    return {
        "seconds": seconds,
        "samples": samples,
        "samples_per_s": metrics.values["perf/train_samples_per_s"],
        "expert_max_violation": metrics.values.get("rollout/moe/max_vio"),
        "expert_load": metrics.expert_load_LE,
        "router_steps": metrics.router_steps,
        "metrics": metrics.values,
    }


def main() -> None:
    arguments = step_parser("train", __doc__).parse_args()
    execute_in_ranks(
        "train",
        lambda context, member: train(context, member, arguments.iteration),
        run_id=arguments.run,
        iteration=arguments.iteration,
    )


if __name__ == "__main__":
    main()
