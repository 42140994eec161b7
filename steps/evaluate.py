"""Score the new policy on held-out prompts and decide: validated or rejected by the configured gate.

The `validated` pointer follows the verdict. A rejected update is kept; with `gate.on_reject = "rollback"` nothing
samples from it. Version 0 is scored first when init_run did not: it was streamed from a checkpoint, or waited
for rollout engines.
"""

from steps.adapters import ledger
from steps.arguments import step_parser
from steps.entrypoint import StepContext, execute
from steps.errors import DataError
from steps.policies import evaluate_policy
from steps.scorers import open_scorer


def evaluate(context: StepContext, iteration: int) -> None:
    publication = ledger.find_publication(context.database, context.run_id, iteration)
    if publication is None:
        raise DataError(f"policy version {iteration} is not published; run publish first")
    with open_scorer(context, context.config) as scorer:
        if not ledger.list_evaluations(context.database, context.run_id):
            initial = evaluate_policy(context, ledger.get_publication(context.database, context.run_id, 0), scorer)
            context.say(f"policy version 0: {initial.reason}")
        evaluation = evaluate_policy(context, publication, scorer)
    verdict = "validated" if evaluation.validated else "rejected"
    context.say(f"policy version {iteration} {verdict}: {evaluation.reason}")
    context.output("reward-eval", f"{evaluation.reward_eval:.4f}")
    context.output("validated", str(evaluation.validated).lower())


def main() -> None:
    arguments = step_parser("evaluate", __doc__).parse_args()
    execute(
        "evaluate",
        lambda context: evaluate(context, arguments.iteration),
        run_id=arguments.run,
        iteration=arguments.iteration,
    )


if __name__ == "__main__":
    main()
