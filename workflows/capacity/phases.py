"""Expected seconds of each phase of an iteration, with the formula and its source."""

from dataclasses import dataclass

from workflows.capacity import anchors
from workflows.capacity.exchange import passes, seconds_per_iteration
from workflows.capacity.memory import cache_bytes_per_token, engine_terms
from workflows.capacity.model import BF16_BYTES, Setting

PARALLEL_SHARE_OF_PEAK = 0.5
"""Of the peak that prompt processing and wide decoding reach: assumed."""
_PUBLICATION = {False: "2 B x parameters", True: "2 B x parameters, mostly deltas of 5 %,"}


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of an iteration."""

    name: str
    seconds: float
    formula: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How an engine decodes."""

    sequences_per_gpu: float
    step_s: float
    tokens_per_s_per_gpu: float
    limited_by: str


def decoding(setting: Setting) -> Decoding:
    """Mean step of an engine that is kept full: the slower of memory and arithmetic, then the experts' exchange.

    A step reads all weights that its batch needs, and the cache of its sequences, half grown on average.
    """
    model, server, gpu = setting.model, setting.config.rollout.server, setting.accelerator
    running = min(server.max_running_requests, setting.samples / setting.config.rollout.workers)
    sequences = running / server.data_parallel_size
    met = 1.0 - (1.0 - model.top_k / model.num_experts) ** running
    weights = BF16_BYTES * (
        (model.dense_parameters - model.embedding_parameters) / server.tensor_parallel_size
        + model.expert_parameters
        * met
        / (setting.engine_gpus if server.expert_parallel else server.tensor_parallel_size)
    )
    cache = sequences * cache_bytes_per_token(setting) * _mean_context(setting)
    memory_s = (weights + cache) / (gpu.memory_gb_per_s * 1e9 * anchors.DECODE_SHARE)
    work = 2 * model.active_parameters * running / setting.engine_gpus
    arithmetic_s = work / (gpu.bf16_tflops * 1e12 * PARALLEL_SHARE_OF_PEAK)
    exchange_s = _engine_exchange_s(setting) * model.num_moe_layers
    step_s = max(memory_s, arithmetic_s) + exchange_s
    return Decoding(
        sequences_per_gpu=running / setting.engine_gpus,
        step_s=step_s,
        tokens_per_s_per_gpu=running / setting.engine_gpus / step_s,
        limited_by="exchange" if exchange_s > step_s / 2 else "memory" if memory_s >= arithmetic_s else "arithmetic",
    )


def _mean_context(setting: Setting) -> float:
    return setting.config.rollout.sampling.max_prompt_tokens + setting.response_tokens / 2


def _engine_exchange_s(setting: Setting) -> float:
    if not setting.config.rollout.server.expert_parallel or setting.engine_gpus == 1:
        return 0.0
    known = anchors.LOW_LATENCY_S
    return known[min((ranks for ranks in known if ranks >= setting.engine_gpus), default=max(known))][0]


def phases(setting: Setting) -> list[Phase]:
    """In the order of an iteration; the reward is the user's code, and evaluation a short rollout: neither is here."""
    return [_rollout(setting), _train(setting), _exchange(setting), _publish(setting), _fetch(setting)]


def _rollout(setting: Setting) -> Phase:
    engine = decoding(setting)
    tokens = setting.samples * setting.response_tokens
    full_s = tokens / (engine.tokens_per_s_per_gpu * setting.rollout_gpus)
    tail_s = setting.config.rollout.sampling.max_new_tokens * engine.step_s
    formula = "tokens / (sequences / step): a step reads weights and cache once"
    if tail_s > full_s:
        formula = "the longest response, max_new_tokens x step: more engines won't help"
    source = f"memory at {anchors.DECODE_SHARE:g} of its rate: assumed"
    if setting.config.rollout.server.expert_parallel:
        source += "; exchange: published low-latency figures"
    return Phase("rollout", max(full_s, tail_s), formula, source)


def utilization(setting: Setting) -> tuple[float, anchors.Anchor]:
    """Model FLOPs utilization that is reckoned with, by the model's size."""
    return anchors.MFU_LARGE if setting.model.total_parameters > anchors.LARGE_PARAMETERS else anchors.MFU_SMALL


def _train(setting: Setting) -> Phase:
    """6 N + 12 L Q S / 2 FLOPs a token (PaLM, arXiv 2204.02311, appendix B; causal), and 2 N for each pass more."""
    model, (share, anchor) = setting.model, utilization(setting)
    attention = 12 * model.num_layers * model.query_width * setting.sequence_tokens / 2
    extra = passes(setting) / setting.config.train.update.epochs - 2
    per_token = 6 * model.active_parameters + attention + 2 * model.active_parameters * max(0.0, extra)
    seconds = per_token * setting.training_tokens / (setting.ranks * setting.accelerator.bf16_tflops * 1e12 * share)
    return Phase(
        "train", seconds, f"(6 N + attention) x tokens / (GPUs x peak x {share:g})", f"{anchor.source}: {anchor.figure}"
    )


def _exchange(setting: Setting) -> Phase:
    return Phase(
        "  of it exchange, at most",
        seconds_per_iteration(setting),
        "layers x passes x (dispatch + combine), nothing hidden",
        "fit to UCCL-EP's P5en figures; the published MFU includes its share",
    )


def _publish(setting: Setting) -> Phase:
    seconds = _publication_bytes(setting) / anchors.PUBLISH_BYTES_PER_S
    return Phase("publish", seconds, f"{_PUBLICATION[_is_delta(setting)]} / 2 GB/s", "assumed rate of one pod")


def _fetch(setting: Setting) -> Phase:
    seconds = _publication_bytes(setting) / anchors.FETCH_BYTES_PER_S
    return Phase("refresh", seconds, f"{_PUBLICATION[_is_delta(setting)]} / 5 GB/s a node", "assumed rate of one node")


def _is_delta(setting: Setting) -> bool:
    return setting.config.publish.full_every > 1


def _publication_bytes(setting: Setting) -> float:
    """Mean of a publication in bfloat16 and the deltas that follow it."""
    chain = setting.config.publish.full_every
    return BF16_BYTES * setting.model.total_parameters * (1 + (chain - 1) * anchors.DELTA_SHARE) / chain


def balanced_rollout_nodes(setting: Setting, found: list[Phase]) -> float:
    """Rollout nodes with which sampling would take as long as everything else; tail effects left out."""
    seconds = {phase.name: phase.seconds for phase in found}
    rest = seconds["train"] + seconds["publish"] + seconds["refresh"]
    engine = decoding(setting)
    tokens = setting.samples * setting.response_tokens
    return tokens / (engine.tokens_per_s_per_gpu * setting.profile.gpus * rest)


def cache_tokens(setting: Setting) -> float:
    """Tokens that the cache of one engine holds."""
    cache = next(term.size_bytes for term in engine_terms(setting) if term.name == "KV cache")
    server = setting.config.rollout.server
    return cache / cache_bytes_per_token(setting) * server.data_parallel_size
