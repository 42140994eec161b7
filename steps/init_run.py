"""Make a run: check the configuration, freeze it and the data set, produce and publish policy version 0.

Version 0 is a random model, a Hugging Face checkpoint, or either of them after a supervised warm-up on the task's
answers. A checkpoint without a warm-up is streamed, and scored by the first evaluate step; so is any version 0 where
pods of their own keep the run's rollout engines. Running it again for the same run changes nothing; with another
configuration it is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args, get_type_hints

from moe.config import MoeConfig
from steps import paths
from steps.adapters import ledger
from steps.adapters.database import migrate
from steps.adapters.spool import RunStatus
from steps.adapters.store import AlreadyExists, read_uri
from steps.arguments import natural_int, step_parser
from steps.config import RolloutConfig, RunConfig
from steps.config_loader import config_hash, config_json, load_config
from steps.engine_fleet import check_server_package
from steps.entrypoint import StepContext, execute
from steps.errors import ConfigError, DataError
from steps.initial_policy import build_initial_policy, is_streamed, warm_up
from steps.policies import evaluate_policy, point_to, publish_folder
from steps.records import Publication
from steps.scorers import open_scorer
from steps.tasks.catalog import build_dataset
from steps.tasks.dataset import Dataset
from steps.tasks.frozen import dataset_to_jsonl
from steps.tasks.sandbox import Scorer
from steps.tracking_events import open_tracker
from steps.trainers import is_stored, new_trainer, restore_trainer, store_initial, store_trainer

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
    engine_pods: int | None
    """Hosts of rollout engines that are started once the run is there; None: what the configuration says."""


def init_run(context: StepContext, config_source: str, overrides: Mapping[str, str], counts: Counts) -> None:
    """`overrides`: what was chosen on submit in place of the configuration's, by the field's path."""
    config = _read_config(config_source, overrides)
    engine_pods = engines_of(config, counts)
    if engine_pods == 0:
        check_server_package(config.rollout)
    nodes, ranks_per_node = training_layout(config.train.ranks, counts.training_nodes, counts.most_ranks_per_node)
    with open_scorer(context, config) as scorer:
        publication = ledger.find_publication(context.database, context.run_id, 0)
        if publication is None:
            publication = _make_run(context, config, scorer)
        else:
            _record_run(context, config)
            point_to(context, paths.latest_key(context.run_id), publication)
        if engine_pods == 0 and not is_streamed(config):
            evaluation = evaluate_policy(context, publication, scorer)
            told = f"held-out reward {evaluation.reward_eval:.3f} on {evaluation.num_prompts} prompts"
            context.say(f"policy version 0: {told}")
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
    context.output("engine-pods", engine_pods)


def engines_of(config: RunConfig, counts: Counts) -> int:
    """Hosts of rollout engines that the run gets. ConfigError when some are asked for that nothing would use."""
    rollout, asked = config.rollout, counts.engine_pods
    reason = ""
    if rollout.engine == "torch":
        reason = "rollout.engine = torch has no server"
    elif rollout.server.url:
        reason = f"rollout.server.url = {rollout.server.url!r} names others"
    if reason and asked:
        raise ConfigError(f"engine-pods = {asked}: {reason}; use 0 or {FROM_CONFIG}")
    if reason:
        return 0
    return (counts.rollout_workers or rollout.workers) if asked is None else asked


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


def _read_config(source: str, overrides: Mapping[str, str]) -> RunConfig:
    """CONFIG is TOML text, a path, or the s3:// URI of a TOML file."""
    if source.startswith("s3://"):
        try:
            source = read_uri(source).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"--config {source}: not a TOML file in UTF-8 ({error})") from None
    return load_config(source, [f"{field}={value}" for field, value in overrides.items() if value != FROM_CONFIG])


def _make_run(context: StepContext, config: RunConfig, scorer: Scorer) -> Publication:
    """Everything that a user can have wrong is found out before anything is written."""
    dataset = _build_dataset(config)
    policy = build_initial_policy(context, config, dataset)
    scorer.load()
    _record_run(context, config)
    _freeze(context, paths.config_key(context.run_id), config_json(config).encode())
    for split, part in (("train", replace(dataset, heldout=[])), ("heldout", replace(dataset, train=[]))):
        _freeze(context, paths.dataset_key(context.run_id, split), dataset_to_jsonl(part))
    trainer, prefix = new_trainer(config, policy.model), paths.checkpoint_prefix(context.run_id, 0)
    if policy.weights is not None:
        if not is_stored(context, prefix):
            store_initial(context, trainer, policy.weights.read, prefix)
    elif is_stored(context, prefix):
        restore_trainer(context, trainer, prefix)
    else:
        if config.warmup.max_steps:
            warm_up(context, config, dataset, policy, scorer)
        if not store_trainer(context, trainer, prefix):
            restore_trainer(context, trainer, prefix)  # what is published must be what the run trains from
    with TemporaryDirectory() as temporary:
        policy.publish(Path(temporary))
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


def _count_or_config(text: str) -> int | None:
    return None if text == FROM_CONFIG else natural_int(text)


def main() -> None:
    parser = step_parser("init_run", __doc__, iteration=False)
    parser.add_argument("--config", required=True, help="TOML text, or the path or s3:// URI of a TOML file")
    for name in ("iterations", "rollout-workers", "reward-workers", "training-nodes"):
        parser.add_argument(f"--{name}", type=natural_int, default=0, help="0: what the configuration says")
    parser.add_argument("--most-ranks-per-node", type=natural_int, default=0, help="GPUs of a node; 0: no limit")
    dispatchers = (FROM_CONFIG, *get_args(get_type_hints(MoeConfig)["dispatcher"]))
    parser.add_argument("--dispatcher", choices=dispatchers, default=FROM_CONFIG, help="in place of moe.dispatcher")
    engines = (FROM_CONFIG, *get_args(get_type_hints(RolloutConfig)["engine"]))
    parser.add_argument("--rollout-engine", choices=engines, default=FROM_CONFIG, help="in place of rollout.engine")
    parser.add_argument(
        "--engine-pods",
        type=_count_or_config,
        default=0,
        help=f"pods that keep a server for the rollouts; {FROM_CONFIG}: one for each rollout worker, none for torch",
    )
    arguments = parser.parse_args()
    counts = Counts(
        iterations=arguments.iterations,
        rollout_workers=arguments.rollout_workers,
        reward_workers=arguments.reward_workers,
        training_nodes=arguments.training_nodes,
        most_ranks_per_node=arguments.most_ranks_per_node,
        engine_pods=arguments.engine_pods,
    )
    overrides = {"moe.dispatcher": arguments.dispatcher, "rollout.engine": arguments.rollout_engine}
    execute(
        "init_run",
        lambda context: init_run(context, arguments.config, overrides, counts),
        run_id=arguments.run,
        prepare=lambda environment: migrate(environment.database_url),
    )


if __name__ == "__main__":
    main()
