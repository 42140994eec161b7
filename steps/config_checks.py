"""Rules between settings that are each valid alone."""

import difflib
import re
from collections.abc import Iterator

from moe.config import layout_problems
from steps.config import RolloutConfig, RunConfig, ServerConfig, TaskConfig
from steps.tasks.procedural import problem_count

VERIFIERS = ("exact", "numeric", "math_verify", "regex", "per_position", "reasoning_gym")
BFLOAT16_DISPATCHERS = ("deepep", "uccl_ep", "nccl_ep")
REPLACED_BY_VLLM = ("pplx", "naive")
"""vLLM 0.32 takes these names for all2all_backend, warns, and uses allgather_reducescatter."""
_ENTRY_POINT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def cross_field_problems(cfg: RunConfig) -> list[str]:
    """One line, `dotted.path = value: what is wrong and what is allowed`, for each rule that is broken."""
    problems = [*_task_problems(cfg.task), *_verifier_problems(cfg.task), *_size_problems(cfg), *_train_problems(cfg)]
    problems += [*_exchange_problems(cfg), *_engine_problems(cfg.rollout)]
    from_scratch = cfg.warmup.start == "random"
    num_experts = cfg.model.num_experts if from_scratch else None
    problems += layout_problems(cfg.train.ranks, cfg.moe, cfg.train.fsdp_size, num_experts)
    if from_scratch:
        problems += cfg.model.problems()
        if cfg.task.prompt_format == "chat":
            problems.append(
                'task.prompt_format = "chat": the tokenizer of a model from scratch has no chat template; name a '
                "checkpoint as warmup.start"
            )
        problems += _balance_problems(cfg)
        problems += _length_problems(cfg)
    return problems


def _task_problems(task: TaskConfig) -> Iterator[str]:
    if task.kind == "jsonl" and not task.train_path:
        yield "task.train_path is missing: task.kind = jsonl reads its rows from it"
    if task.kind == "reasoning_gym" and not task.reasoning_gym_task:
        yield "task.reasoning_gym_task is missing: name a reasoning-gym task, for example spell_backward"
    if task.system_prompt and task.prompt_format == "plain":
        yield 'task.system_prompt is set, but task.prompt_format = "plain" ignores it: use "chat", or remove it'
    owners = {"train_path": "jsonl", "heldout_path": "jsonl", "reasoning_gym_task": "reasoning_gym"}
    owners["reasoning_gym_options"] = "reasoning_gym"
    for name, kind in owners.items():
        if getattr(task, name) and task.kind != kind:
            yield f"task.{name} is set, but task.kind = {task.kind} ignores it: set task.kind = {kind} or remove it"


def _verifier_problems(task: TaskConfig) -> Iterator[str]:
    if task.verifier not in VERIFIERS and not _ENTRY_POINT.fullmatch(task.verifier):
        near = difflib.get_close_matches(task.verifier, VERIFIERS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"allowed are {', '.join(VERIFIERS)} and package.module:function"
        yield f'task.verifier = "{task.verifier}": there is no such verifier; {hint}'
    if task.verifier == "reasoning_gym" and task.kind != "reasoning_gym":
        yield f"task.verifier = reasoning_gym: needs task.kind = reasoning_gym, not {task.kind}"


def _size_problems(cfg: RunConfig) -> Iterator[str]:
    task, rollout = cfg.task, cfg.rollout
    if rollout.prompts_per_unit > rollout.prompts_per_iteration:
        yield (
            f"rollout.prompts_per_unit = {rollout.prompts_per_unit}: must be at most "
            f"rollout.prompts_per_iteration = {rollout.prompts_per_iteration}"
        )
    space = problem_count(task)
    if space is not None and task.heldout_size >= space:
        yield f"task.heldout_size = {task.heldout_size}: must be below the {space} prompts that {task.kind} has"
    elif task.kind != "jsonl":
        trained = task.train_size if space is None else min(task.train_size, space - task.heldout_size)
        if trained < rollout.prompts_per_iteration:
            yield (
                f"rollout.prompts_per_iteration = {rollout.prompts_per_iteration}: must be at most the "
                f"{trained} training prompts of the task (task.train_size)"
            )


def _train_problems(cfg: RunConfig) -> Iterator[str]:
    train, prompts = cfg.train, cfg.rollout.prompts_per_iteration
    if train.update.optimizer_steps_per_epoch > prompts:
        yield (
            f"train.update.optimizer_steps_per_epoch = {train.update.optimizer_steps_per_epoch}: must be at most "
            f"rollout.prompts_per_iteration = {prompts}, because a mini-batch holds whole groups"
        )
    if train.update.epochs * train.update.optimizer_steps_per_epoch < 2:
        yield (
            f"train.update.optimizer_steps_per_epoch = {train.update.optimizer_steps_per_epoch}: times "
            f"train.update.epochs = {train.update.epochs} it must be at least 2; with a single optimizer step a batch "
            "the ratio is 1 and the clip never acts"
        )
    if train.loss.icepop_low >= train.loss.icepop_high:
        yield (
            f"train.loss.icepop_low = {train.loss.icepop_low:g}: must be below "
            f"train.loss.icepop_high = {train.loss.icepop_high:g}"
        )
    for path, optimizer in (("train.optimizer", train.optimizer), ("warmup.optimizer", cfg.warmup.optimizer)):
        if max(optimizer.betas) >= 1.0:
            yield f"{path}.betas = {list(optimizer.betas)}: both must be below 1"


def _engine_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Settings that the rollout engine would ignore, or honour otherwise than they say."""
    if "" in rollout.sampling.stop:
        yield "rollout.sampling.stop: an empty string would end every response; remove it"
    server, engine = rollout.server, f'rollout.engine = "{rollout.engine}"'
    backend = f'rollout.server.all2all_backend = "{server.all2all_backend}"'
    if rollout.engine == "torch" and server != ServerConfig():
        yield f"rollout.server is set: {engine} has no server; use vllm or sglang, or remove it"
    if rollout.engine == "sglang" and rollout.sampling.top_p < 1.0:
        yield (
            f"rollout.sampling.top_p = {rollout.sampling.top_p:g}: SGLang's log-probabilities leave out the "
            "restriction to the most likely tokens; use 1, or rollout.engine = vllm"
        )
    if rollout.engine == "vllm" and server.all2all_backend in REPLACED_BY_VLLM:
        yield (
            f"{backend}: vLLM replaces it by allgather_reducescatter; use deepep_high_throughput or deepep_low_latency"
        )
    if server.all2all_backend and not server.expert_parallel:
        yield f"{backend}: experts are exchanged only with rollout.server.expert_parallel = true; set it too"


def _exchange_problems(cfg: RunConfig) -> Iterator[str]:
    """Settings that the dispatcher would ignore, or whose limits are known without its library."""
    moe, update = cfg.moe, cfg.train.update
    dispatcher = f'moe.dispatcher = "{moe.dispatcher}"'
    if moe.deduplicate != "none" and moe.dispatcher != "all_to_all":
        yield f'moe.deduplicate = "{moe.deduplicate}": {dispatcher} has no such option; use all_to_all, or none'
    if moe.exchange_dtype != "model" and moe.dispatcher == "local":
        yield f'moe.exchange_dtype = "{moe.exchange_dtype}": {dispatcher} exchanges nothing; use model'
    if moe.low_latency:
        yield "moe.low_latency = true: these kernels have no gradients, so no policy trains with them; use false"
    if moe.dispatcher in BFLOAT16_DISPATCHERS:
        if moe.expert_ranks(cfg.train.ranks) == 1:
            yield f"{dispatcher}: carries tokens between ranks; set train.ranks above 1, or use local"
        if moe.exchange_dtype == "model" and update.compute_dtype == "float32":
            yield (
                f"{dispatcher}: carries bfloat16 only; set moe.exchange_dtype = bfloat16 (rounds on the wire only) or "
                "train.update.compute_dtype = bfloat16"
            )
        if moe.dispatcher != "uccl_ep":  # whose buffers do not depend on the number of tokens
            yield from _buffer_problems(cfg)


def _buffer_problems(cfg: RunConfig) -> Iterator[str]:
    """A pass has the prompts or the responses of a micro-batch; one that exceeds the micro-batch has it for itself."""
    sampling = cfg.rollout.sampling
    sizes = {
        "train.update.micro_batch_tokens": cfg.train.update.micro_batch_tokens,
        "rollout.sampling.max_prompt_tokens": sampling.max_prompt_tokens,
        "rollout.sampling.max_new_tokens": sampling.max_new_tokens,
    }
    for path, tokens in sizes.items():
        if tokens > cfg.moe.max_tokens_per_rank:
            yield (
                f'{path} = {tokens}: moe.dispatcher = "{cfg.moe.dispatcher}" has buffers for '
                f"moe.max_tokens_per_rank = {cfg.moe.max_tokens_per_rank}; lower it or raise that"
            )


def _balance_problems(cfg: RunConfig) -> Iterator[str]:
    rate, family = cfg.moe.bias_update_rate, cfg.model.family
    if rate > 0 and family != "deepseek_v3":
        yield (
            f"moe.bias_update_rate = {rate:g}: model.family = {family} publishes no balancing bias; "
            "use moe.aux_loss_coefficient, or model.family = deepseek_v3"
        )


def _length_problems(cfg: RunConfig) -> Iterator[str]:
    sampling = cfg.rollout.sampling
    needed = sampling.max_prompt_tokens + sampling.max_new_tokens
    if cfg.model.max_position_embeddings < needed:
        yield (
            f"model.max_position_embeddings = {cfg.model.max_position_embeddings}: must be at least {needed} "
            "(rollout.sampling.max_prompt_tokens + rollout.sampling.max_new_tokens)"
        )
