"""Score the new policy on held-out prompts and decide: validated or rejected by the configured gate.

The `validated` pointer follows the verdict. A rejected update is kept; with `gate.on_reject = "rollback"` nothing
samples from it.
"""

from steps.adapters import ledger
from steps.arguments import step_parser
from steps.entrypoint import StepContext, execute
from steps.errors import DataError
from steps.policies import evaluate_policy


def evaluate(context: StepContext, iteration: int) -> None:
    publication = ledger.find_publication(context.database, context.run_id, iteration)
    if publication is None:
        raise DataError(f"policy version {iteration} is not published; run publish first")
    evaluation = evaluate_policy(context, publication)
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
