"""What an optimizer step says about the experts of each layer: how even their load is, and what the exchanges cost."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from moe.dispatch.monitor import LayerExchange
from moe.parallel import ParallelLayout
from moe.router_load import RouterLoad

_WALL_CLOCK = ("exchange_s", "exchange_share")


@dataclass(frozen=True, slots=True)
class ExchangeTotals:
    """The exchanges of one optimizer step over all ranks; float64, one value a layer."""

    sent_bytes_L: Tensor
    """Mean over ranks."""
    sent_off_node_bytes_L: Tensor
    """Mean over ranks."""
    dropped_routes_L: Tensor
    """Sum over ranks."""
    seconds_L: Tensor
    """Of the rank that spent most in the layer's exchanges, waiting for others included."""
    step_s: float
    """Of the slowest rank's step."""

    @classmethod
    def over_ranks(
        cls, own: Mapping[int, LayerExchange], num_layers: int, step_s: float, layout: ParallelLayout
    ) -> "ExchangeTotals":
        """Of what this rank's monitor recorded, by layer, in its step of `step_s` seconds; every rank calls it."""
        layers = [own.get(layer, LayerExchange()) for layer in range(num_layers)]
        counts_LM = torch.tensor(
            [[layer.sent_bytes, layer.sent_off_node_bytes, layer.dropped_routes] for layer in layers],
            dtype=torch.float64,
        )
        sent_L, off_node_L, dropped_L = layout.sum(counts_LM, "counts of exchanges").unbind(1)
        seconds = torch.tensor([*(layer.seconds for layer in layers), step_s], dtype=torch.float64)
        seconds = layout.max(seconds, "seconds of exchanges")
        return cls(sent_L / layout.ranks, off_node_L / layout.ranks, dropped_L, seconds[:-1], float(seconds[-1]))


def add_exchanges(total: LayerExchange, layers: Iterable[LayerExchange]) -> None:
    """Add the exchanges of `layers` to `total`, in place."""
    for layer in layers:
        for name in (field.name for field in fields(LayerExchange)):
            setattr(total, name, getattr(total, name) + getattr(layer, name))


def without_wall_clock(metrics: Mapping[str, float]) -> dict[str, float]:
    """`metrics` of a step or of a layer without the measured times: equal whenever the same work is done again."""
    return {name: value for name, value in metrics.items() if name.removeprefix("moe/") not in _WALL_CLOCK}


def sum_loads(load: RouterLoad, layout: ParallelLayout) -> RouterLoad:
    """The load of all ranks, equal on each."""
    if layout.ranks == 1:
        return load
    parts = [load.counts_LE, load.probability_LE, load.entropy_L, torch.tensor([load.tokens], dtype=torch.float64)]
    flat = layout.sum(torch.cat([part.reshape(-1) for part in parts]), "counts of experts")
    counts, probability, entropy, tokens = torch.split(flat, [part.numel() for part in parts])
    return RouterLoad(counts.view_as(load.counts_LE), probability.view_as(load.probability_LE), entropy, float(tokens))


def layer_metrics(load: RouterLoad, exchanges: ExchangeTotals, layout: ParallelLayout) -> list[dict[str, float]]:
    """One dict a layer, from the load of all ranks and the exchanges of the step.

    `max_violation` is max/mean - 1 over experts, `rank_imbalance` and `node_imbalance` max/mean of the tokens sent to
    the experts of a rank, and of a node, of one expert-parallel group; `entropy` is in nats a token.
    """
    columns = {
        "max_violation": load.violations(),
        "dead_experts": (load.counts_LE == 0).sum(dim=1),
        "entropy": load.entropy_L / max(load.tokens, 1e-12),
        "rank_imbalance": _imbalance(load.counts_LE, layout.ep_size),
        "node_imbalance": _imbalance(load.counts_LE, layout.expert_group.num_nodes),
        "dropped_routes": exchanges.dropped_routes_L,
        "sent_bytes": exchanges.sent_bytes_L,
        "sent_off_node_bytes": exchanges.sent_off_node_bytes_L,
        "exchange_s": exchanges.seconds_L,
        "exchange_share": exchanges.seconds_L / exchanges.step_s,
    }
    values = {name: column.tolist() for name, column in columns.items()}
    return [{name: float(column[layer]) for name, column in values.items()} for layer in range(len(load.entropy_L))]


def step_metrics(layers: list[dict[str, float]]) -> dict[str, float]:
    """The worst layer's imbalance, and the layers' sums, as one optimizer step's metrics."""
    worst = {f"moe/{name}": max(layer[name] for layer in layers) for name in ("rank_imbalance", "node_imbalance")}
    summed = ("dropped_routes", "sent_bytes", "sent_off_node_bytes", "exchange_s", "exchange_share")
    return worst | {f"moe/{name}": sum(layer[name] for layer in layers) for name in summed}


def _imbalance(counts_LE: Tensor, parts: int) -> Tensor:
    """max/mean over `parts` equal stretches of consecutive experts, for each layer."""
    load_LP = counts_LE.view(len(counts_LE), parts, -1).sum(dim=2)
    return load_LP.amax(dim=1) / load_LP.mean(dim=1).clamp(min=1e-12)
