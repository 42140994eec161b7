"""Memory of one GPU, term by term: the trainer's and the engine's. All sizes are bytes unless a name says otherwise."""

from dataclasses import dataclass

from workflows.capacity.model import BF16_BYTES, F32_BYTES, Setting

RESERVE_BYTES = 6 << 30
"""CUDA context, NCCL's channels, the allocator's fragments."""
BUFFER_BYTES_PER_VALUE = 42 * (1 << 30) / (8192 * 7168)
"""DeepEP 2's communication buffer: 40 to 44 GiB at 8,192 tokens of hidden size 7,168, taken as proportional to both."""
UCCL_SHARE = 0.4
"""UCCL-EP's buffers beside DeepEP 2's: 14 to 21 GiB in the same measurement."""
LOGITS_COPIES = 3
"""Of float32 logits: the values, their softmax, their gradient."""


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a sum, and how it comes about."""

    name: str
    size_bytes: float
    formula: str


def trainer_terms(setting: Setting) -> list[Term]:
    """Of one training rank; float32 weights, gradients and AdamW moments, computed in `compute_dtype`."""
    model, dense_split = setting.model, setting.sharding
    expert_split = setting.expert_ranks * setting.expert_sharding
    held = model.dense_parameters / dense_split + model.expert_parameters / expert_split
    split = f"dense / {dense_split} + experts / {expert_split}"
    return [
        Term("weights", F32_BYTES * held, f"4 B x ({split})"),
        Term("gradients", F32_BYTES * held, "4 B x the same"),
        Term("optimizer", 2 * F32_BYTES * held, "AdamW: 8 B x the same"),
        Term("gathered layers", _gathered(setting), "FSDP2: two layers whole, in the dtype of the computation"),
        Term("activations", _activations(setting), activation_formula(setting)),
        Term("logits", _logits(setting), f"micro-batch x vocabulary x 4 B x {LOGITS_COPIES}"),
        Term(
            "exchange buffers", exchange_buffer_bytes(setting), "published 42 GiB x (tokens x hidden) / (8192 x 7168)"
        ),
        Term("reserve", RESERVE_BYTES, "CUDA context, NCCL, fragments: assumed"),
    ]


def compute_bytes(setting: Setting) -> int:
    """Bytes of a number in the forward and backward pass."""
    return BF16_BYTES if setting.config.train.update.compute_dtype == "bfloat16" else F32_BYTES


def _gathered(setting: Setting) -> float:
    if setting.sharding == 1:
        return 0.0
    model, size = setting.model, compute_bytes(setting)
    experts_of_layer = 0.0
    if setting.expert_sharding > 1:
        experts_of_layer = model.expert_parameters / model.num_moe_layers / setting.expert_ranks
    return 2 * size * (model.largest_layer_parameters + experts_of_layer)


def values_per_token(setting: Setting) -> float:
    """Numbers that the backward pass needs of one token and layer, after Korthikanti et al. (arXiv 2205.05198, section
    4.1) with flash attention and gated experts; what is recomputed is not kept."""
    model = setting.model
    attention = 4 * model.hidden_size + 2 * model.query_width + model.key_value_values / model.num_layers
    routed = model.top_k * (2 * model.hidden_size + 3 * model.expert_width)
    recompute = setting.config.train.update.recompute
    if recompute == "moe":
        return attention + model.hidden_size
    if recompute == "experts":
        return attention + model.top_k * 2 * model.hidden_size
    return attention + routed


def activation_formula(setting: Setting) -> str:
    kept = {"moe": "H", "experts": "k x 2H", "none": "k x (2H + 3I)"}[setting.config.train.update.recompute]
    return f"micro-batch x layers x (4H + 2Q + KV + {kept}) x {compute_bytes(setting)} B"


def _activations(setting: Setting) -> float:
    tokens = setting.config.train.update.micro_batch_tokens
    return tokens * setting.model.num_layers * values_per_token(setting) * compute_bytes(setting)


def _logits(setting: Setting) -> float:
    return setting.config.train.update.micro_batch_tokens * setting.model.vocab_size * F32_BYTES * LOGITS_COPIES


def exchange_buffer_bytes(setting: Setting) -> float:
    """Of the dispatcher's own buffers; all_to_all has none but the rows themselves."""
    moe = setting.config.moe
    if moe.dispatcher not in ("deepep", "uccl_ep", "nccl_ep"):
        return 0.0
    share = UCCL_SHARE if moe.dispatcher == "uccl_ep" else 1.0
    return share * BUFFER_BYTES_PER_VALUE * moe.max_tokens_per_rank * setting.model.hidden_size


def engine_terms(setting: Setting) -> list[Term]:
    """Of one GPU of a rollout engine: bfloat16 weights, and the cache that is left."""
    model, server = setting.model, setting.config.rollout.server
    expert_split = setting.engine_gpus if server.expert_parallel else server.tensor_parallel_size
    weights = BF16_BYTES * (
        model.dense_parameters / server.tensor_parallel_size + model.expert_parameters / expert_split
    )
    usable = setting.accelerator.memory_bytes * server.gpu_memory_fraction
    formula = f"2 B x (dense / {server.tensor_parallel_size} + experts / {expert_split})"
    cache = max(0.0, usable - weights - RESERVE_BYTES)
    return [
        Term("weights", weights, formula),
        Term("reserve", RESERVE_BYTES, "CUDA context, graphs, activations: assumed"),
        Term("KV cache", cache, f"what is left of {server.gpu_memory_fraction:g} of the memory"),
    ]


def cache_bytes_per_token(setting: Setting) -> float:
    """Of one token on one GPU: tensor parallelism splits the heads."""
    return BF16_BYTES * setting.model.key_value_values / setting.config.rollout.server.tensor_parallel_size


def host_checkpoint_bytes(setting: Setting) -> float:
    """Of one training node while a checkpoint waits to be written: weights and moments in float32."""
    per_rank = sum(term.size_bytes for term in trainer_terms(setting)[:1]) * 3
    return per_rank * setting.ranks_per_node
