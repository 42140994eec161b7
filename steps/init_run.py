"""Make a run: check the configuration, freeze it and the data set, produce and publish policy version 0.

Version 0 is a random model, a Hugging Face checkpoint, or either of them after a supervised warm-up on the task's
answers. Running it again for the same run changes nothing; with another configuration it is refused.
"""

import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from moe.model import attach_dispatcher, build_model, load_model
from moe.tokenizer import build_char_tokenizer, encode_prompt, load_tokenizer
from moe.warmup import WarmupProgress, run_warmup
from steps import paths
from steps.adapters import ledger
from steps.adapters.database import migrate
from steps.adapters.engines.torch_engine import TorchEngine
from steps.adapters.publications import read_pointer
from steps.adapters.store import AlreadyExists, open_store
from steps.arguments import natural_int, step_parser
from steps.config import RunConfig
from steps.config_loader import config_hash, config_json, load_config
from steps.entrypoint import StepContext, execute
from steps.errors import ConfigError, DataError
from steps.policies import evaluate_policy, held_out_prompts, publish_policy, score_held_out
from steps.records import Publication
from steps.seeds import derive_seed
from steps.tasks.catalog import Dataset, build_dataset, load_verifier
from steps.tasks.jsonl import dataset_to_jsonl
from steps.trainers import new_trainer, store_trainer


def init_run(context: StepContext, config_source: str, iterations: int) -> None:
    config = _read_config(context, config_source)
    ledger.create_run(context.database, context.run_id, config_json(config), config_hash(config))
    load_verifier(config.task)
    publication = ledger.find_publication(context.database, context.run_id, 0)
    if publication is None:
        _freeze(context, paths.config_key(context.run_id), config_json(config).encode())
        publication = _make_initial_policy(context, config, _freeze_dataset(context, config))
    evaluation = evaluate_policy(context, publication)
    context.say(f"policy version 0: held-out reward {evaluation.reward_eval:.3f} on {evaluation.num_prompts} prompts")
    latest = read_pointer(context.store, paths.latest_key(context.run_id))
    version = 0 if latest is None else int(latest["policy_version"])
    context.output("policy-version", version)
    context.output("first-iteration", version + 1)
    context.output("iterations", iterations or config.iterations)


def _read_config(context: StepContext, source: str) -> RunConfig:
    """CONFIG is TOML text, a path, or the s3:// URI of a TOML file."""
    if source.startswith("s3://"):
        prefix, _, name = source.rpartition("/")
        source = open_store(prefix).get_bytes(name).decode()
    config = load_config(source)
    if config.evaluate.max_prompts > config.task.heldout_size and not config.task.heldout_path:
        context.say(f"evaluation uses all {config.task.heldout_size} held-out prompts")
    return config


def _freeze(context: StepContext, key: str, data: bytes) -> None:
    """Store an immutable object; the same bytes again are fine, others mean that somebody else owns the run."""
    try:
        context.store.put_bytes(key, data, if_none_match=True)
    except AlreadyExists:
        if context.store.get_bytes(key) != data:
            raise DataError(f"{context.store.uri_of(key)} exists with other content; use another run id") from None


def _freeze_dataset(context: StepContext, config: RunConfig) -> Dataset:
    dataset = build_dataset(config.task, config.seed)
    wanted = config.rollout.prompts_per_iteration
    if len(dataset.train) < wanted:
        raise ConfigError(
            f"rollout.prompts_per_iteration = {wanted}, but the task has only {len(dataset.train)} training prompts; "
            "lower it or give more prompts"
        )
    for split, part in (("train", replace(dataset, heldout=[])), ("heldout", replace(dataset, train=[]))):
        _freeze(context, paths.dataset_key(context.run_id, split), dataset_to_jsonl(part))
    return dataset


def _make_initial_policy(context: StepContext, config: RunConfig, dataset: Dataset) -> Publication:
    torch.set_num_threads(config.train.update.threads)
    model, tokenizer = _starting_model(config, dataset)
    _check_prompt_lengths(config, dataset, tokenizer)
    attach_dispatcher(model, config.moe)
    if config.warmup.max_steps:
        _warm_up(context, config, dataset, model, tokenizer)
    store_trainer(context, new_trainer(config, model), paths.checkpoint_prefix(context.run_id, 0))
    return publish_policy(context, model, tokenizer, version=0, parent=None, batch_sha256=None)


def _starting_model(config: RunConfig, dataset: Dataset) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    start = config.warmup.start
    if start == "random":
        tokenizer = build_char_tokenizer(dataset.alphabet)
        seed = derive_seed("model", config.seed)
        return build_model(config.model, vocab_size=len(tokenizer), seed=seed), tokenizer
    folder = Path(start)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"warmup.start = {start!r}: no config.json there; give `random` or a Hugging Face folder")
    try:
        return load_model(folder), load_tokenizer(folder)
    except ValueError as error:
        raise DataError(f"warmup.start = {start!r}: {error}") from None


def _check_prompt_lengths(config: RunConfig, dataset: Dataset, tokenizer: PreTrainedTokenizerFast) -> None:
    """Refuse a prompt that no worker could sample from. A prompt has at most one token a character, and one more."""
    limit = config.rollout.sampling.max_prompt_tokens
    for prompt in (*dataset.train, *dataset.heldout):
        if len(prompt.text) >= limit and len(encode_prompt(tokenizer, prompt.text)) > limit:
            raise DataError(
                f"prompt {prompt.text[:40]!r}... has {len(encode_prompt(tokenizer, prompt.text))} tokens, more than "
                f"rollout.sampling.max_prompt_tokens = {limit}; raise the limit or shorten the prompt"
            )


def _warm_up(
    context: StepContext,
    config: RunConfig,
    dataset: Dataset,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    started_s = time.perf_counter()
    prompts = held_out_prompts(context)
    demonstrations = [(prompt.text, prompt.answer) for prompt in dataset.train if prompt.answer]
    if not demonstrations:
        raise ConfigError("warmup.max_steps: the task's prompts have no answers to learn from; set it to 0")

    def held_out_reward() -> float:
        context.interruption.check()
        engine = TorchEngine(model, tokenizer, policy_version=0)
        return score_held_out(engine, prompts, config).reward_mean

    def report(check: WarmupProgress) -> None:
        context.progress(check.step, config.warmup.max_steps)
        context.say(f"warm-up step {check.step}: loss {check.loss:.3f}, held-out reward {check.reward:.3f}")

    result = run_warmup(
        model,
        tokenizer,
        demonstrations,
        optimizer=config.warmup.optimizer,
        max_steps=config.warmup.max_steps,
        stop_reward=config.warmup.stop_reward,
        check_every=config.warmup.check_every,
        batch_size=config.warmup.batch_size,
        evaluate=held_out_reward,
        seed=derive_seed("warmup", config.seed),
        on_progress=report,
    )
    context.metrics.update(warmup_steps=result.steps, warmup_seconds=time.perf_counter() - started_s)


def main() -> None:
    parser = step_parser("init_run", __doc__, iteration=False)
    parser.add_argument("--config", required=True, help="TOML text, or the path or s3:// URI of a TOML file")
    parser.add_argument("--iterations", type=natural_int, default=0, help="iterations to run; 0: what the config says")
    arguments = parser.parse_args()
    execute(
        "init_run",
        lambda context: init_run(context, arguments.config, arguments.iterations),
        run_id=arguments.run,
        prepare=lambda environment: migrate(environment.database_url),
    )


if __name__ == "__main__":
    main()
