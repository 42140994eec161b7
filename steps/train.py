"""One policy update: read the batch, compute advantages and the loss, step the optimizer, save the trainer's state.

On SIGTERM the state is saved after the running optimizer step and the exit code is 75; the next attempt continues there
and ends with the same weights, bit for bit.
"""

import time
from typing import Any

from moe.model import transport_report
from moe.update import PolicyTrainer, UpdateStopped
from moe.update_metrics import BatchMetrics, StepMetrics
from steps import paths
from steps.adapters import ledger
from steps.adapters.publications import fetch_folder
from steps.adapters.store import NotFound
from steps.arguments import step_parser
from steps.batches import load_batch
from steps.entrypoint import StepContext, execute
from steps.errors import Interrupted
from steps.seeds import derive_seed
from steps.trainers import build_trainer, complete_folders, delete_folder, is_stored, restore_trainer, store_trainer


def train(context: StepContext, iteration: int) -> None:
    prefix = paths.checkpoint_prefix(context.run_id, iteration)
    try:
        if is_stored(context, prefix):
            context.say("the checkpoint of this update exists already")
        else:
            _update(context, iteration, prefix)
    except NotFound:
        # Another attempt may have finished meanwhile and deleted the state that this one was to continue from.
        if not is_stored(context, prefix):
            raise
    for partial in complete_folders(context.store, paths.partial_checkpoints_prefix(context.run_id, iteration)):
        delete_folder(context.store, partial)
    context.output("checkpoint-uri", context.store.uri_of(prefix))


def _update(context: StepContext, iteration: int, prefix: str) -> None:
    plan = ledger.get_iteration(context.database, context.run_id, iteration)
    trainer = build_trainer(context, plan.policy_version)
    _restore(context, trainer, iteration, plan.policy_version)
    folder = fetch_folder(context.store, paths.batch_prefix(context.run_id, iteration), context.environment.cache_dir)
    batch = load_batch(folder)

    def on_step(step: StepMetrics) -> None:
        context.progress(step.step, step.num_steps)

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
        done = stopped.steps_done
        store_trainer(context, trainer, paths.partial_checkpoint_prefix(context.run_id, iteration, done))
        raise Interrupted(f"state saved after optimizer step {done} of the batch; run again to continue") from None
    record = train_record(metrics, len(batch), time.perf_counter() - started_s)
    record["transport"] = transport_report(trainer.model)
    # Before the checkpoint: once that exists, nobody computes the metrics again.
    ledger.set_iteration_metrics(context.database, context.run_id, iteration, "train", record)
    store_trainer(context, trainer, prefix)
    context.metrics.update(seconds=record["seconds"], samples=len(batch))
    context.say(f"reward {metrics.values['critic/rewards/mean']:.3f}, {record['samples_per_s']:.0f} samples/s")


def _restore(context: StepContext, trainer: PolicyTrainer, iteration: int, version: int) -> None:
    """Load the newest state inside this update, or else the state that it starts from."""
    partials = complete_folders(context.store, paths.partial_checkpoints_prefix(context.run_id, iteration))
    restore_trainer(context, trainer, max(partials, default=paths.checkpoint_prefix(context.run_id, version)))
    if trainer.batch_step:
        context.say(f"continuing after optimizer step {trainer.batch_step} of this batch")


def train_record(metrics: BatchMetrics, samples: int, seconds: float) -> dict[str, Any]:
    """What the ledger keeps of an update."""
    return {
        "seconds": seconds,
        "samples": samples,
        "samples_per_s": metrics.values["perf/train_samples_per_s"],
        "expert_max_violation": metrics.values.get("rollout/moe/max_vio"),
        "expert_load": metrics.expert_load_LE,
        "metrics": metrics.values,
    }


def main() -> None:
    arguments = step_parser("train", __doc__).parse_args()
    execute(
        "train",
        lambda context: train(context, arguments.iteration),
        run_id=arguments.run,
        iteration=arguments.iteration,
    )


if __name__ == "__main__":
    main()
