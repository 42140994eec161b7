"""One policy update: read the batch, compute advantages and the loss, step the optimizer, save the trainer's state.

With `train.ranks` above 1, that many processes do it together: torchrun's when it started this one, otherwise forks of
this one. Every `train.checkpoint_every` optimizer steps, and on the notice of an end that is still ahead, the state is
saved while training goes on. On SIGTERM it is saved after the running optimizer step and the exit code is 75. However
an attempt ended, the next one continues from the newest state and ends with the same weights and metrics, bit for bit.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from moe.batch import TrainingBatch
from moe.parallel import ParallelLayout
from moe.update import PolicyTrainer, UpdateStopped
from moe.update_metrics import BatchMetrics, StepMetrics
from steps import gang, paths
from steps.adapters import ledger
from steps.adapters.publications_cache import fetch_folder
from steps.arguments import step_parser
from steps.batches import load_batch
from steps.entrypoint import RankContext, StepContext
from steps.errors import DataError, Interrupted
from steps.gang import Member
from steps.gang_step import execute_in_ranks, fail_together
from steps.seeds import derive_seed
from steps.train_checkpoints import UpdateCheckpoints
from steps.train_restore import Restoration, UpdateFinished, newest_state
from steps.trainers import build_layout, build_trainer, delete_folder, is_stored, store_trainer
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
        if plan is not None:
            _update(context, layout, plan, iteration)
    if isinstance(context, StepContext):
        delete_folder(context.store, paths.partial_checkpoints_prefix(context.run_id, iteration))
        context.output("checkpoint-uri", context.store.uri_of(prefix))


def _plan(context: StepContext, iteration: int, prefix: str) -> UpdatePlan | None:
    """None when there is nothing to do. It continues from the newest state inside this update, if there is one."""
    if is_stored(context, prefix):
        context.say("the checkpoint of this update exists already")
        return None
    version = ledger.get_iteration(context.database, context.run_id, iteration).policy_version
    return UpdatePlan(policy_version=version, state_prefix=newest_state(context, iteration, version))


def _update(context: RankContext, layout: ParallelLayout, plan: UpdatePlan, iteration: int) -> None:
    prefix = paths.checkpoint_prefix(context.run_id, iteration)
    trainer = build_trainer(context, layout, plan.policy_version)
    states = Restoration(
        context=context, trainer=trainer, layout=layout, iteration=iteration, version=plan.policy_version
    )
    try:
        states.restore(plan.state_prefix)
    except UpdateFinished:
        trainer.close()
        return
    if trainer.batch_step and isinstance(context, StepContext):
        context.say(f"continuing after optimizer step {trainer.batch_step} of this batch")
    folder = fetch_folder(context.store, paths.batch_prefix(context.run_id, iteration), context.environment.cache_dir)
    batch = load_batch(folder)
    evidence = TransportEvidence(context, trainer, layout)
    started_s = time.perf_counter()
    with UpdateCheckpoints(context, trainer, layout, iteration) as checkpoints:
        metrics = _run_batch(context, trainer, batch, checkpoints, evidence, iteration)
    _refuse_mismatch(context, metrics)
    record = train_record(metrics, len(batch), time.perf_counter() - started_s) | {"transport": evidence.collect()}
    if isinstance(context, StepContext):
        context.metrics.update(states_saved=checkpoints.count, saving_blocked_s=checkpoints.blocked_s)
        if not is_stored(context, prefix):  # otherwise another attempt's numbers count, which it has recorded
            _record(context, iteration, record)
    store_trainer(context, trainer, prefix, layout)
    trainer.close()


def _run_batch(
    context: RankContext,
    trainer: PolicyTrainer,
    batch: TrainingBatch,
    checkpoints: UpdateCheckpoints,
    evidence: TransportEvidence,
    iteration: int,
) -> BatchMetrics:
    """From where the trainer is in the batch to its end; on a request to stop the state is saved and the step fails."""

    def on_step(step: StepMetrics) -> None:
        if isinstance(context, StepContext):
            context.progress(step.step, step.num_steps)
        if evidence.report is None and step.values.get("moe/sent_bytes", 0.0) > 0:
            evidence.collect()  # a wrong transport is found out now, not after hours

    try:
        return trainer.run_batch(
            batch,
            seed=derive_seed("update", context.config.seed, iteration),
            start_step=trainer.batch_step,
            on_step=on_step,
            should_stop=checkpoints.between_steps,
        )
    except UpdateStopped:
        done = checkpoints.save_now()
        message = f"state saved after optimizer step {done} of the batch; run again to continue"
        fail_together(context, Interrupted(message))


def _refuse_mismatch(context: RankContext, metrics: BatchMetrics) -> None:
    """DataError, on every rank alike, when the sampler was too far from the trainer; the update is not kept."""
    bound, found = context.config.train.max_rollout_kl, metrics.values.get("rollout_corr/k3_kl", 0.0)
    if bound and found > bound:
        error = DataError(
            f"rollout_corr/k3_kl = {found:.3g} is above train.max_rollout_kl = {bound:g}: the samples are not of the "
            "policy that is trained; look at the engine's probe, its dtype and buffer.max_staleness, or raise the bound"
        )
        fail_together(context, error)


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
