"""Turn experience into an immutable batch: freeze the selection, write the files, the manifest last.

Whole groups within the staleness bound are selected in one transaction and marked consumed by this batch; what is left
out is recorded with the reason. Running it again writes the same batch.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from steps import paths, sample_routing
from steps.adapters import buffer, ledger
from steps.adapters.publications import upload_folder
from steps.arguments import step_parser
from steps.batches import BATCH_FILE, training_batch
from steps.entrypoint import StepContext, execute
from steps.errors import DataError
from steps.records import ScoredSample


def flush(context: StepContext, iteration: int) -> None:
    plan = ledger.get_iteration(context.database, context.run_id, iteration)
    selected = buffer.select_batch(
        context.database, context.run_id, iteration, plan.policy_version, context.config.buffer.max_staleness
    )
    scored = buffer.batch_samples(context.database, context.run_id, iteration)
    if not scored:
        raise DataError(
            f"iteration {iteration}: no group can be trained on ({selected.num_dropped} dropped); "
            "look at the reward step's log for verifier failures"
        )
    scored = [sample_routing.fetch(context.store, context.run_id, item) for item in scored]
    with TemporaryDirectory() as folder:
        (Path(folder) / BATCH_FILE).write_bytes(training_batch(scored).to_bytes())
        manifest = upload_folder(
            context.store,
            Path(folder),
            paths.batch_prefix(context.run_id, iteration),
            {"run": context.run_id, "iteration": iteration, "policy_version": plan.policy_version},
        )
    uri = context.store.uri_of(paths.batch_prefix(context.run_id, iteration))
    buffer.finish_batch(context.database, context.run_id, iteration, uri, manifest.sha256)
    ledger.set_iteration_metrics(context.database, context.run_id, iteration, "flush", batch_metrics(scored))
    context.say(f"{len(scored)} samples in the batch, {selected.num_dropped} prompts dropped")
    context.output("batch-uri", uri)
    context.output("samples", len(scored))


def batch_metrics(scored: list[ScoredSample]) -> dict[str, float]:
    """Counts and the mean reward of what will be trained on; a sample without a reward counts in no mean."""
    values = [item.reward.value for item in scored if item.reward.value is not None]
    return {
        "samples": len(scored),
        "tokens": sum(len(item.sample.response_ids_T) for item in scored),
        "rewards_ok": len(values),
        "reward_mean": sum(values) / len(values),
    }


def main() -> None:
    arguments = step_parser("flush", __doc__).parse_args()
    execute(
        "flush",
        lambda context: flush(context, arguments.iteration),
        run_id=arguments.run,
        iteration=arguments.iteration,
    )


if __name__ == "__main__":
    main()
