"""Freeze one iteration: the policy version to sample from, the prompts, the work units.

The prompts come from a durable cursor over the data set, so that every prompt is used once per epoch. Running it again
returns the plan that was stored first.
"""

from steps import paths
from steps.adapters import ledger
from steps.adapters.publications import read_pointer
from steps.adapters.store import AlreadyExists
from steps.arguments import step_parser
from steps.config import RunConfig
from steps.entrypoint import StepContext, execute
from steps.errors import DataError
from steps.seeds import draw_prompts
from steps.tasks.frozen import FrozenDataset, dataset_to_jsonl


def plan(context: StepContext, iteration: int) -> None:
    known = {row.iteration: row for row in ledger.list_iterations(context.database, context.run_id)}
    data = FrozenDataset(context.store.get_bytes(paths.dataset_key(context.run_id, "train")))
    stored = known.get(iteration) or _plan_anew(context, data, iteration)
    _store_prompts(context, data, iteration)
    context.say(f"{stored.num_prompts} prompts for policy version {stored.policy_version} in {stored.num_units} units")
    context.output("policy-version", stored.policy_version)
    context.output("units", stored.num_units)


def _plan_anew(context: StepContext, data: FrozenDataset, iteration: int) -> ledger.IterationRow:
    config = context.config
    cursor = ledger.last_cursor(context.database, context.run_id)
    drawn = draw_prompts(data.train_uids, config.seed, cursor, config.rollout.prompts_per_iteration)
    size = config.rollout.prompts_per_unit
    return ledger.plan_iteration(
        context.database,
        context.run_id,
        iteration,
        policy_version=_base_version(context, config, iteration),
        prompts=[(uid, cursor + offset) for offset, uid in enumerate(drawn)],
        units=[drawn[start : start + size] for start in range(0, len(drawn), size)],
        cursor_start=cursor,
        cursor_end=cursor + len(drawn),
    )


def _base_version(context: StepContext, config: RunConfig, iteration: int) -> int:
    """The version to sample from and to train: the latest, or the last validated one where the gate rolls back."""
    on_reject = config.evaluate.gate.on_reject
    key = paths.validated_key(context.run_id) if on_reject == "rollback" else paths.latest_key(context.run_id)
    pointer = read_pointer(context.store, key) or read_pointer(context.store, paths.latest_key(context.run_id))
    if pointer is None:
        raise DataError(f"run {context.run_id}: no policy is published yet; run init_run first")
    version = int(pointer["policy_version"])
    if version >= iteration:
        raise DataError(f"run {context.run_id}: version {version} exists already; the next iteration is {version + 1}")
    return version


def _store_prompts(context: StepContext, data: FrozenDataset, iteration: int) -> None:
    """Write the iteration's prompts where workers read them. Killed before this, the next attempt writes the same."""
    key = paths.iteration_prompts_key(context.run_id, iteration)
    if context.store.head(key) is not None:
        return
    drawn = [draw.prompt_uid for draw in ledger.list_draws(context.database, context.run_id, iteration)]
    try:
        context.store.put_bytes(key, dataset_to_jsonl(data.select(drawn)), if_none_match=True)
    except AlreadyExists:
        context.say("another attempt stored the prompts first")


def main() -> None:
    arguments = step_parser("plan", __doc__).parse_args()
    execute(
        "plan",
        lambda context: plan(context, arguments.iteration),
        run_id=arguments.run,
        iteration=arguments.iteration,
    )


if __name__ == "__main__":
    main()
