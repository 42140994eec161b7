"""Policy version 0: a model from scratch or from a checkpoint, and its supervised warm-up.

A checkpoint that is published as it is, without a warm-up, is never in memory as a whole.
"""

import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from moe.config import layout_problems
from moe.experts import expert_modules
from moe.model import attach_dispatcher, build_model, default_device, empty_model, load_model, stored_dtype
from moe.pretrained_weights import PretrainedWeights
from moe.publication import save_publication, write_publication
from moe.publication_weights import MAX_SHARD_BYTES
from moe.router_load import router_modules
from moe.routing import balance_biases
from moe.routing_rules import weights_rule
from moe.tokenizer import build_char_tokenizer, encode_prompt, load_tokenizer
from moe.warmup import WarmupProgress, run_warmup
from steps.adapters.engines.torch_engine import TorchEngine
from steps.adapters.store import open_store
from steps.config import RunConfig
from steps.entrypoint import StepContext
from steps.errors import ConfigError, DataError
from steps.policies import score_held_out
from steps.seeds import derive_seed
from steps.tasks.catalog import demonstrations
from steps.tasks.dataset import Dataset, prompt_content
from steps.tasks.sandbox import Scorer

LIBRARIES = {"deepep": ("deep_ep", "deepep"), "uccl_ep": ("uccl", "uccl"), "nccl_ep": ("nccl", "nccl-ep")}
"""Dispatcher -> the package that it imports, and our extra that installs it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialPolicy:
    """A model and the tokenizer that goes with it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    dtype: str
    """Of its publications; the model itself is float32, as training needs it."""
    folder: Path | None = None
    """The checkpoint that it came from."""
    weights: PretrainedWeights | None = None
    """Where the weights come from when the model, on the meta device, has none."""

    def publish(self, folder: Path) -> None:
        """Write the publication of the policy to `folder`."""
        source = self.tokenizer if self.folder is None else self.folder
        if self.weights is None:
            save_publication(self.model, source, folder, self.dtype)
        else:
            write_publication(self.model, source, folder, self.dtype, self.weights.read, MAX_SHARD_BYTES)


def is_streamed(config: RunConfig) -> bool:
    """Whether version 0 is published without being in memory as a whole."""
    return config.warmup.start != "random" and config.warmup.max_steps == 0


def build_initial_policy(context: StepContext, config: RunConfig, dataset: Dataset) -> InitialPolicy:
    """The model that `warmup.start` names, not trained yet.

    Raises ConfigError when there is no such checkpoint and DataError when it, or a prompt, can't be used.
    """
    _check_library(config.moe.dispatcher)
    torch.set_num_threads(config.train.update.threads)
    policy = _random_policy(config, dataset) if config.warmup.start == "random" else _loaded_policy(context, config)
    if policy.weights is None:
        policy.model.to(default_device())
    attach_dispatcher(policy.model, config.moe)
    _check_experts(config, policy.model)
    _check_prompts(config, dataset, policy)
    return policy


def _random_policy(config: RunConfig, dataset: Dataset) -> InitialPolicy:
    tokenizer = build_char_tokenizer(dataset.alphabet)
    model = build_model(config.model, vocab_size=len(tokenizer), seed=derive_seed("model", config.seed))
    return InitialPolicy(model=model, tokenizer=tokenizer, dtype=config.model.dtype)


def _loaded_policy(context: StepContext, config: RunConfig) -> InitialPolicy:
    start = config.warmup.start
    folder = _download(context, start) if start.startswith("s3://") else Path(start)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"warmup.start = {start!r}: no config.json there; give `random` or a Hugging Face folder")
    try:
        streamed = is_streamed(config)
        return InitialPolicy(
            model=empty_model(folder) if streamed else load_model(folder, dtype="float32"),
            tokenizer=load_tokenizer(folder),
            dtype=stored_dtype(folder),
            folder=folder,
            weights=PretrainedWeights(folder) if streamed else None,
        )
    except ValueError as error:
        raise DataError(f"warmup.start = {start!r}: {error}") from None


def _download(context: StepContext, uri: str) -> Path:
    """Fetch the files right below a checkpoint's URI; killed half-way, the next attempt fetches them again."""
    source = open_store(uri)
    folder = context.environment.cache_dir / f"checkpoint-{derive_seed(uri):016x}"
    folder.mkdir(parents=True, exist_ok=True)
    for info in source.list(""):
        if "/" not in info.key:
            source.download_file(info.key, folder / info.key)
    return folder


def _check_library(dispatcher: str) -> None:
    """Only looks for it, because it may not load without a GPU; all steps of a workflow run in one image."""
    if dispatcher not in LIBRARIES:
        return
    module, extra = LIBRARIES[dispatcher]
    if find_spec(module) is None:
        raise ConfigError(
            f'moe.dispatcher = "{dispatcher}": package {module} is not installed here; '
            f"pip install 'argo-moe-rl[{extra}]', or take another dispatcher"
        )


def _check_experts(config: RunConfig, model: PreTrainedModel) -> None:
    """Refuse now what the model's experts and routers would refuse when training begins."""
    moe, num_experts = config.moe, expert_modules(model)[0].num_experts
    for problem in layout_problems(config.train.ranks, moe, config.train.fsdp_size, num_experts):
        raise ConfigError(problem)
    try:
        if moe.bias_update_rate > 0:
            balance_biases(model)
        if moe.routing_replay != "none" or config.train.update.recompute == "moe":
            for router in router_modules(model):
                weights_rule(router)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_prompts(config: RunConfig, dataset: Dataset, policy: InitialPolicy) -> None:
    """Refuse a prompt that no worker could sample from, and an answer that the warm-up could not show."""
    if config.warmup.max_steps:
        demonstrations(config.task, dataset)
    limit = config.rollout.sampling.max_prompt_tokens
    for prompt in (*dataset.train, *dataset.heldout):
        try:
            length = len(encode_prompt(policy.tokenizer, prompt_content(config.task, prompt)))
            if config.warmup.max_steps:
                encode_prompt(policy.tokenizer, prompt.answer)
        except ValueError as error:
            raise DataError(str(error)) from None
        if length > limit:
            raise DataError(
                f"prompt {prompt.text[:40]!r}... has {length} tokens, more than "
                f"rollout.sampling.max_prompt_tokens = {limit}; raise the limit or shorten the prompt"
            )
    _check_positions(config, policy)


def _check_positions(config: RunConfig, policy: InitialPolicy) -> None:
    sampling = config.rollout.sampling
    needed = sampling.max_prompt_tokens + sampling.max_new_tokens
    positions = policy.model.config.max_position_embeddings
    if needed > positions:
        raise ConfigError(
            f"rollout.sampling: max_prompt_tokens + max_new_tokens = {needed}, the model has {positions} positions; "
            "lower them or take another checkpoint"
        )


def warm_up(context: StepContext, config: RunConfig, dataset: Dataset, policy: InitialPolicy, scorer: Scorer) -> None:
    """Train `policy` in place on the task's answers until the held-out reward reaches `warmup.stop_reward`."""
    started_s = time.perf_counter()
    prompts = dataset.heldout[: config.evaluate.max_prompts]

    def held_out_reward() -> float:
        context.interruption.check()
        engine = TorchEngine(policy.model, policy.tokenizer, policy_version=0)
        return score_held_out(engine, prompts, config, scorer).reward_mean

    def report(check: WarmupProgress) -> None:
        context.progress(check.step, config.warmup.max_steps)
        context.say(f"warm-up step {check.step}: loss {check.loss:.3f}, held-out reward {check.reward:.3f}")

    result = run_warmup(
        policy.model,
        policy.tokenizer,
        demonstrations(config.task, dataset),
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
