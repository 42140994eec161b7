"""Make a run: check the configuration, freeze it and the data set, produce and publish policy version 0.

Version 0 is a random model, a Hugging Face checkpoint, or either of them after a supervised warm-up on the task's
answers. Running it again for the same run changes nothing; with another configuration it is refused.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args, get_type_hints

from moe.config import MoeConfig
from moe.publication import save_publication
from steps import paths
from steps.adapters import ledger
from steps.adapters.database import migrate
from steps.adapters.spool import RunStatus
from steps.adapters.store import AlreadyExists, read_uri
from steps.arguments import natural_int, step_parser
from steps.config import RunConfig
from steps.config_loader import config_hash, config_json, load_config
from steps.entrypoint import StepContext, execute
from steps.errors import ConfigError, DataError
from steps.initial_policy import build_initial_policy, warm_up
from steps.policies import evaluate_policy, point_to, publish_folder
from steps.records import Publication
from steps.tasks.catalog import build_dataset, load_verifier
from steps.tasks.dataset import Dataset
from steps.tasks.frozen import dataset_to_jsonl
from steps.tracking_events import open_tracker
from steps.trainers import is_stored, new_trainer, restore_trainer, store_trainer

FROM_CONFIG = "from-config"


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What whoever submits may set without a new configuration; 0: what the configuration says."""

    iterations: int
    rollout_workers: int
    reward_workers: int
    training_nodes: int
    most_ranks_per_node: int
    """Of the nodes there are; 0: no limit, one node holds all ranks."""


def init_run(context: StepContext, config_source: str, dispatcher: str, counts: Counts) -> None:
    config = _read_config(context, config_source, dispatcher)
    nodes, ranks_per_node = training_layout(config.train.ranks, counts.training_nodes, counts.most_ranks_per_node)
    load_verifier(config.task)
    publication = ledger.find_publication(context.database, context.run_id, 0)
    if publication is None:
        publication = _make_run(context, config)
    else:
        _record_run(context, config)
        point_to(context, paths.latest_key(context.run_id), publication)
    evaluation = evaluate_policy(context, publication)
    context.say(f"policy version 0: held-out reward {evaluation.reward_eval:.3f} on {evaluation.num_prompts} prompts")
    finished = _last_finished_iteration(context)
    now_ms = int(context.database.now() * 1000)
    open_tracker(context).record(f"{finished:05d}-start", [RunStatus(state="RUNNING", timestamp_ms=now_ms)])
    context.output("policy-version", finished)
    context.output("first-iteration", finished + 1)
    context.output("iterations", counts.iterations or config.iterations)
    context.output("rollout-workers", counts.rollout_workers or config.rollout.workers)
    context.output("reward-workers", counts.reward_workers or config.reward.workers)
    context.output("training-nodes", nodes)
    context.output("ranks-per-node", ranks_per_node)


def training_layout(ranks: int, nodes: int, most_ranks_per_node: int) -> tuple[int, int]:
    """Nodes that train together, and the ranks of each.

    `nodes` 0: as few as hold the ranks. Raises ConfigError when the ranks can't be spread evenly, or don't fit.
    """
    if nodes == 0:
        nodes = -(-ranks // most_ranks_per_node) if most_ranks_per_node else 1
    if ranks % nodes:
        raise ConfigError(f"train.ranks = {ranks}: must be a multiple of training-nodes = {nodes}; change one of them")
    if most_ranks_per_node and ranks // nodes > most_ranks_per_node:
        raise ConfigError(
            f"training-nodes = {nodes}: {ranks // nodes} of train.ranks = {ranks} on each node, which has "
            f"{most_ranks_per_node} GPUs; use {-(-ranks // most_ranks_per_node)} nodes or fewer ranks"
        )
    return nodes, ranks // nodes


def _last_finished_iteration(context: StepContext) -> int:
    """The newest iteration whose report is written, 0 when none is: a campaign goes on with what one left half-done."""
    for row in reversed(ledger.list_iterations(context.database, context.run_id)):
        if "report" in ledger.get_iteration_metrics(context.database, context.run_id, row.iteration):
            return row.iteration
    return 0


def _read_config(context: StepContext, source: str, dispatcher: str) -> RunConfig:
    """CONFIG is TOML text, a path, or the s3:// URI of a TOML file; `dispatcher` takes the place of its own."""
    if source.startswith("s3://"):
        try:
            source = read_uri(source).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"--config {source}: not a TOML file in UTF-8 ({error})") from None
    return load_config(source, [] if dispatcher == FROM_CONFIG else [f"moe.dispatcher={dispatcher}"])


def _make_run(context: StepContext, config: RunConfig) -> Publication:
    """Everything that a user can have wrong is found out before anything is written."""
    dataset = _build_dataset(config)
    policy = build_initial_policy(context, config, dataset)
    _record_run(context, config)
    _freeze(context, paths.config_key(context.run_id), config_json(config).encode())
    for split, part in (("train", replace(dataset, heldout=[])), ("heldout", replace(dataset, train=[]))):
        _freeze(context, paths.dataset_key(context.run_id, split), dataset_to_jsonl(part))
    trainer, prefix = new_trainer(config, policy.model), paths.checkpoint_prefix(context.run_id, 0)
    if is_stored(context, prefix):
        restore_trainer(context, trainer, prefix)
    else:
        if config.warmup.max_steps:
            warm_up(context, config, dataset, policy)
        store_trainer(context, trainer, prefix)
    with TemporaryDirectory() as temporary:
        save_publication(policy.model, policy.tokenizer, Path(temporary), policy.dtype)
        return publish_folder(context, Path(temporary), version=0, parent=None, batch_sha256=None)


def _record_run(context: StepContext, config: RunConfig) -> None:
    ledger.create_run(context.database, context.run_id, config_json(config), config_hash(config))


def _build_dataset(config: RunConfig) -> Dataset:
    dataset = build_dataset(config.task, config.seed)
    wanted = config.rollout.prompts_per_iteration
    if len(dataset.train) < wanted:
        raise ConfigError(
            f"rollout.prompts_per_iteration = {wanted}, but the task has only {len(dataset.train)} training prompts; "
            "lower it or give more prompts"
        )
    return dataset


def _freeze(context: StepContext, key: str, data: bytes) -> None:
    """Store an immutable object; the same bytes again are fine, others mean that somebody else owns the run."""
    try:
        context.store.put_bytes(key, data, if_none_match=True)
    except AlreadyExists:
        if context.store.get_bytes(key) != data:
            raise DataError(f"{context.store.uri_of(key)} exists with other content; use another run id") from None


def main() -> None:
    parser = step_parser("init_run", __doc__, iteration=False)
    parser.add_argument("--config", required=True, help="TOML text, or the path or s3:// URI of a TOML file")
    for name in ("iterations", "rollout-workers", "reward-workers", "training-nodes"):
        parser.add_argument(f"--{name}", type=natural_int, default=0, help="0: what the configuration says")
    parser.add_argument("--most-ranks-per-node", type=natural_int, default=0, help="GPUs of a node; 0: no limit")
    dispatchers = (FROM_CONFIG, *get_args(get_type_hints(MoeConfig)["dispatcher"]))
    parser.add_argument("--dispatcher", choices=dispatchers, default=FROM_CONFIG, help="in place of moe.dispatcher")
    arguments = parser.parse_args()
    counts = Counts(
        iterations=arguments.iterations,
        rollout_workers=arguments.rollout_workers,
        reward_workers=arguments.reward_workers,
        training_nodes=arguments.training_nodes,
        most_ranks_per_node=arguments.most_ranks_per_node,
    )
    execute(
        "init_run",
        lambda context: init_run(context, arguments.config, arguments.dispatcher, counts),
        run_id=arguments.run,
        prepare=lambda environment: migrate(environment.database_url),
    )


if __name__ == "__main__":
    main()
