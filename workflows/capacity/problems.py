"""What can't work, one line each: the field, its value, what it needs and what there is."""

from collections.abc import Iterator

from moe.config import layout_problems
from workflows.capacity.memory import cache_bytes_per_token, engine_terms, host_checkpoint_bytes, trainer_terms
from workflows.capacity.model import Setting
from workflows.capacity.phases import cache_tokens
from workflows.platform import quantity_bytes

GIB = 1 << 30


def setting_problems(setting: Setting) -> list[str]:
    """In the order in which a person would mend them: layout, batch, trainer's memory, engine."""
    return [*_layout(setting), *_batch(setting), *_trainer_memory(setting), *_engine(setting)]


def _layout(setting: Setting) -> Iterator[str]:
    config, per_node = setting.config, setting.profile.gpus
    yield from layout_problems(setting.ranks, config.moe, config.train.fsdp_size, setting.model.num_experts)
    if setting.ranks > per_node and setting.ranks % per_node:
        yield f"train.ranks = {setting.ranks}: must fill nodes of {per_node} GPUs ({setting.profile.name})"
    expert_ranks = setting.expert_ranks
    if expert_ranks > per_node and expert_ranks % per_node:
        yield f"moe.expert_parallel_size = {expert_ranks}: must be a multiple of a node's {per_node} GPUs, or below"


def _batch(setting: Setting) -> Iterator[str]:
    config = setting.config
    steps, rollout = config.train.update.optimizer_steps_per_epoch, config.rollout
    rows = setting.samples // steps
    if rows < setting.ranks:
        yield (
            f"train.update.optimizer_steps_per_epoch = {steps}: a mini-batch has {rows} samples for train.ranks = "
            f"{setting.ranks}; lower it, or raise rollout.prompts_per_iteration"
        )
    longest = rollout.sampling.max_prompt_tokens + rollout.sampling.max_new_tokens
    if longest > config.train.update.micro_batch_tokens:
        yield (
            f"train.update.micro_batch_tokens = {config.train.update.micro_batch_tokens}: a sample has up to {longest} "
            "tokens (rollout.sampling); raise it"
        )
    units = -(-rollout.prompts_per_iteration // rollout.prompts_per_unit)
    if units < rollout.workers:
        yield (
            f"rollout.prompts_per_unit = {rollout.prompts_per_unit}: {units} units leave {rollout.workers - units} of "
            f"rollout.workers = {rollout.workers} idle; lower it"
        )


def _trainer_memory(setting: Setting) -> Iterator[str]:
    terms = trainer_terms(setting)
    needed = sum(term.size_bytes for term in terms)
    if needed > setting.accelerator.memory_bytes:
        largest = max(terms, key=lambda term: term.size_bytes)
        yield (
            f"train: {needed / GIB:.0f} GiB a GPU, {setting.accelerator.name} has "
            f"{setting.accelerator.memory_bytes / GIB:.0f}; the largest part are its {largest.name}, "
            f"{largest.size_bytes / GIB:.0f} GiB: {_remedy(largest.name)}"
        )
    workload = "trainer" if setting.training_nodes > 1 or setting.ranks > 1 else "solo_trainer"
    memory = quantity_bytes(setting.profile.resources[workload].memory)  # type: ignore[index]
    if host_checkpoint_bytes(setting) > memory / 2:
        yield (
            f"train.checkpoint_every: a node's copy of the state takes {host_checkpoint_bytes(setting) / GIB:.0f} GiB "
            f"of host memory, the pod has {memory / GIB:.0f}; use more nodes"
        )


def _remedy(term: str) -> str:
    return {
        "weights": "raise moe.expert_parallel_size, train.fsdp_size or train.ranks",
        "gradients": "raise moe.expert_parallel_size, train.fsdp_size or train.ranks",
        "optimizer": "raise moe.expert_parallel_size, train.fsdp_size or train.ranks",
        "activations": "lower train.update.micro_batch_tokens, or set train.update.recompute",
        "logits": "lower train.update.micro_batch_tokens",
        "exchange buffers": "lower moe.max_tokens_per_rank",
    }.get(term, "use more nodes")


def _engine(setting: Setting) -> Iterator[str]:
    server, gpus = setting.config.rollout.server, setting.profile.gpus
    if setting.engine_gpus > gpus:
        yield (
            f"rollout.server: tensor_parallel_size x data_parallel_size = {setting.engine_gpus} GPUs, a node of "
            f"{setting.profile.name} has {gpus}; a worker's engine stays on one node"
        )
    if server.expert_parallel and setting.model.num_experts % setting.engine_gpus:
        yield (
            f"rollout.server.expert_parallel: {setting.engine_gpus} GPUs do not divide the {setting.model.num_experts} "
            "experts evenly"
        )
    weights = engine_terms(setting)[0].size_bytes
    longest = setting.config.rollout.sampling.max_prompt_tokens + setting.config.rollout.sampling.max_new_tokens
    if cache_tokens(setting) < longest:
        yield (
            f"rollout.server: weights of {weights / GIB:.0f} GiB a GPU leave no cache for one sequence of {longest} "
            f"tokens ({longest * cache_bytes_per_token(setting) / GIB:.1f} GiB); raise tensor_parallel_size, "
            "data_parallel_size with expert_parallel, or gpu_memory_fraction"
        )


def setting_notes(setting: Setting) -> list[str]:
    """What works, but not as one might think."""
    notes = []
    server, longest = setting.config.rollout.server, setting.sequence_tokens
    fits = cache_tokens(setting) / longest
    if fits < server.max_running_requests:
        notes.append(
            f"rollout.server.max_running_requests = {server.max_running_requests}: the cache holds {fits:.0f} "
            f"sequences of {longest} tokens; the engine will pause others"
        )
    return notes
