"""Publish the trained policy: Hugging Face layout, verified, manifest last, then the `latest` pointer moves forward.

The trainer's state is consolidated layer by layer, whatever ranks wrote it: memory holds one layer, never the model.
Trainer states that no later iteration needs are deleted afterwards (`train.keep_checkpoints`).
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from moe.consolidate import consolidate
from moe.model import stored_dtype
from steps import paths
from steps.adapters import buffer, ledger
from steps.arguments import step_parser
from steps.entrypoint import StepContext, execute
from steps.errors import DataError
from steps.policies import fetch_publication_settings, point_to, publish_folder
from steps.records import Publication
from steps.trainers import delete_folder, fetch_model_files


def publish(context: StepContext, iteration: int) -> None:
    publication = ledger.find_publication(context.database, context.run_id, iteration)
    if publication is None:
        publication = _publish(context, iteration)
    else:
        point_to(context, paths.latest_key(context.run_id), publication)
    _delete_old_checkpoints(context, iteration)
    context.say(f"policy version {iteration} is at {publication.uri}")
    context.output("publication-uri", publication.uri)
    context.output("policy-version", publication.policy_version)


def _publish(context: StepContext, iteration: int) -> Publication:
    version = ledger.get_iteration(context.database, context.run_id, iteration).policy_version
    prefix = paths.checkpoint_prefix(context.run_id, iteration)
    parent = fetch_publication_settings(context, version)
    with TemporaryDirectory() as temporary:
        try:
            consolidate(fetch_model_files(context, prefix), parent, Path(temporary), stored_dtype(parent))
        except ValueError as error:
            raise DataError(f"{context.store.uri_of(prefix)}: {error}") from None
        batch = buffer.get_batch(context.database, context.run_id, iteration)
        return publish_folder(
            context, Path(temporary), version=iteration, parent=version, batch_sha256=batch.manifest_sha256
        )


def _delete_old_checkpoints(context: StepContext, iteration: int) -> None:
    """Keep the newest states, version 0, and the last validated one (a roll-back trains from it)."""
    validated = ledger.last_validated(context.database, context.run_id)
    keep = {0, -1 if validated is None else validated.policy_version}
    oldest_kept = iteration - context.config.train.keep_checkpoints + 1
    for version in range(oldest_kept - 1, 0, -1):
        prefix = paths.checkpoint_prefix(context.run_id, version)
        if version not in keep and not delete_folder(context.store, prefix):
            return


def main() -> None:
    arguments = step_parser("publish", __doc__).parse_args()
    execute(
        "publish",
        lambda context: publish(context, arguments.iteration),
        run_id=arguments.run,
        iteration=arguments.iteration,
    )


if __name__ == "__main__":
    main()
