"""Bytes and time of the expert exchange, in closed form.

With E experts, k of them chosen uniformly for each token, a group of G equal parts is reached with probability
p(G) = 1 - C(E - E/G, k) / C(E, k). A token that goes to several experts of one rank (or node) crosses once where the
backend deduplicates.
"""

from dataclasses import dataclass
from math import comb

from workflows.capacity.anchors import EXCHANGE_LATENCY_S, NETWORK_SHARE, NVLINK_SHARE, PIPELINE_SHARE
from workflows.capacity.model import BF16_BYTES, F32_BYTES, Setting

DIRECTIONS_PER_PASS = 2
"""Dispatch and combine."""


def reached(experts: int, parts: int, top_k: int) -> float:
    """p(G): probability that a token has an expert in a given one of `parts` equal parts."""
    return 1.0 - comb(experts - experts // parts, top_k) / comb(experts, top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Mean copies of one token in one direction of one layer's exchange."""

    nodes: float
    """Nodes that it reaches, its own included."""
    off_node: float
    """Copies that cross the network."""
    in_node: float
    """Copies that cross NVLink."""
    how: str


def crossing(setting: Setting) -> Crossing:
    """By the way in which the configured dispatcher sends: DeepEP and UCCL-EP once a node, all_to_all as it is told."""
    model, ranks = setting.model, setting.expert_ranks
    per_node = min(ranks, setting.profile.gpus)
    nodes = max(1, ranks // per_node)
    ranks_reached = ranks * reached(model.num_experts, ranks, model.top_k)
    nodes_reached = nodes * reached(model.num_experts, nodes, model.top_k) if nodes > 1 else 1.0
    once = _deduplicates(setting)
    if once == "node":
        off_node = nodes_reached * (nodes - 1) / nodes
        return Crossing(
            nodes=nodes_reached,
            off_node=off_node,
            in_node=ranks_reached * (per_node - 1) / per_node,
            how="once a node: (N - 1) p(N)",
        )
    copies = ranks_reached if once == "rank" else float(model.top_k)
    return Crossing(
        nodes=nodes_reached,
        off_node=copies * (nodes - 1) / nodes,
        in_node=copies / nodes * (per_node - 1) / per_node,
        how="once a rank: R p(R) (N - 1) / N" if once == "rank" else "once a route: k (N - 1) / N",
    )


def _deduplicates(setting: Setting) -> str:
    moe = setting.config.moe
    if moe.dispatcher in ("deepep", "uccl_ep"):
        return "node"
    return "rank" if moe.dispatcher == "nccl_ep" else moe.deduplicate


def row_bytes(setting: Setting) -> int:
    """Of one copy of a token's hidden state on the wire."""
    moe, update = setting.config.moe, setting.config.train.update
    narrow = moe.exchange_dtype == "bfloat16" or update.compute_dtype == "bfloat16"
    return setting.model.hidden_size * (BF16_BYTES if narrow else F32_BYTES)


def passes(setting: Setting) -> int:
    """Times that an iteration's tokens go through the exchanges: forward, backward, and what is computed again."""
    update, config = setting.config.train.update, setting.config
    again = update.recompute == "moe"
    scored_before = config.train.loss.correction != "none" or config.moe.routing_replay == "trainer"
    return (2 + again) * update.epochs + scored_before


def tokens_per_rank(setting: Setting) -> float:
    """That one rank dispatches in one pass over an iteration's batch."""
    return setting.samples * setting.sequence_tokens / setting.ranks


def seconds_per_direction(setting: Setting, tokens: float) -> float:
    """Of one dispatch or combine of `tokens` tokens a rank: the slowest of network, NVLink and the kernels' pipeline.

    The law and its constants are fitted to published figures on P5en (`anchors`), not measured here.
    """
    cross, size, gpu = crossing(setting), row_bytes(setting), setting.accelerator
    network = cross.off_node * size / (gpu.network_gb_per_s * 1e9 * NETWORK_SHARE) if cross.off_node else 0.0
    nvlink = cross.in_node * size / (gpu.nvlink_gb_per_s * 1e9 * NVLINK_SHARE) if gpu.nvlink_gb_per_s else 0.0
    several = setting.expert_ranks > setting.profile.gpus
    pipeline = cross.nodes * size / (gpu.network_gb_per_s * 1e9 * PIPELINE_SHARE) if several else 0.0
    return EXCHANGE_LATENCY_S + tokens * max(network, nvlink, pipeline)


def seconds_per_iteration(setting: Setting) -> float:
    """Of all exchanges of one iteration's update, none of it hidden behind computation."""
    if setting.expert_ranks == 1:
        return 0.0
    total = tokens_per_rank(setting)
    micro_batches = max(1.0, total / setting.config.train.update.micro_batch_tokens)
    one = seconds_per_direction(setting, total / micro_batches)
    return one * micro_batches * DIRECTIONS_PER_PASS * passes(setting) * setting.model.num_moe_layers
