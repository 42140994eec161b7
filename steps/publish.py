"""Publish the trained policy: Hugging Face layout, verified, manifest last, then the `latest` pointer moves forward.

Trainer states that no later iteration needs are deleted afterwards (`train.keep_checkpoints`).
"""

from moe.model import stored_dtype
from moe.tokenizer import load_tokenizer
from steps import paths
from steps.adapters import buffer, ledger
from steps.arguments import step_parser
from steps.entrypoint import StepContext, execute
from steps.policies import fetch_publication, point_to, publish_policy
from steps.trainers import build_trainer, delete_folder, restore_trainer


def publish(context: StepContext, iteration: int) -> None:
    publication = ledger.find_publication(context.database, context.run_id, iteration)
    if publication is None:
        plan = ledger.get_iteration(context.database, context.run_id, iteration)
        trainer = build_trainer(context, plan.policy_version)
        restore_trainer(context, trainer, paths.checkpoint_prefix(context.run_id, iteration))
        parent = fetch_publication(context, plan.policy_version)
        publication = publish_policy(
            context,
            trainer.model,
            load_tokenizer(parent),
            version=iteration,
            parent=plan.policy_version,
            batch_sha256=buffer.get_batch(context.database, context.run_id, iteration).manifest_sha256,
            dtype=stored_dtype(parent),
        )
    else:
        point_to(context, paths.latest_key(context.run_id), publication)
    _delete_old_checkpoints(context, iteration)
    context.say(f"policy version {iteration} is at {publication.uri}")
    context.output("publication-uri", publication.uri)
    context.output("policy-version", publication.policy_version)


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
