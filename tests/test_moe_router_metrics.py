import pytest
import torch

from moe.dispatch.base import ExpertGroup
from moe.dispatch.monitor import ExchangeMonitor, LayerExchange
from moe.parallel import ParallelLayout
from moe.router_load import RouterLoad
from moe.router_metrics import (
    ExchangeTotals,
    add_exchanges,
    layer_metrics,
    step_metrics,
    without_wall_clock,
)


def load_of(*counts_LE: list[float], tokens: float = 4.0) -> RouterLoad:
    counts = torch.tensor(counts_LE, dtype=torch.float64)
    return RouterLoad(counts, torch.zeros_like(counts), torch.full((len(counts),), 2.0, dtype=torch.float64), tokens)


def layout_of(ep_size: int, ranks_per_node: int) -> ParallelLayout:
    group = ExpertGroup(size=ep_size, ranks_per_node=ranks_per_node, monitor=ExchangeMonitor())
    return ParallelLayout(ep_size=ep_size, expert_group=group)


def test_imbalance_is_of_the_experts_of_a_rank_and_of_a_node() -> None:
    layout = layout_of(4, 2)
    exchanges = ExchangeTotals.over_ranks({}, 2, 1.0, layout)
    even, skewed = [1.0] * 8, [8.0, 0.0, 4.0, 0.0, 2.0, 0.0, 2.0, 0.0]
    first, second = layer_metrics(load_of(even, skewed), exchanges, layout)
    assert (first["rank_imbalance"], first["node_imbalance"], first["max_violation"]) == (1.0, 1.0, 0.0)
    assert (second["rank_imbalance"], second["node_imbalance"], second["max_violation"]) == (2.0, 1.5, 3.0)
    assert (first["dead_experts"], second["dead_experts"]) == (0.0, 4.0)
    assert second["entropy"] == 0.5


def test_exchanges_are_reported_by_layer_and_summed_for_the_step() -> None:
    layout = layout_of(1, 1)
    own = {0: LayerExchange(1.0, 100, 40, 9, 3), 1: LayerExchange(0.5, 50, 10, 9, 0)}
    layers = layer_metrics(load_of([1.0], [1.0]), ExchangeTotals.over_ranks(own, 2, 3.0, layout), layout)
    assert [layer["sent_bytes"] for layer in layers] == [100.0, 50.0]
    assert [layer["exchange_share"] for layer in layers] == pytest.approx([1 / 3, 1 / 6])
    step = step_metrics(layers)
    assert (step["moe/sent_bytes"], step["moe/sent_off_node_bytes"], step["moe/dropped_routes"]) == (150.0, 50.0, 3.0)
    assert (step["moe/exchange_s"], step["moe/exchange_share"]) == pytest.approx((1.5, 0.5))
    assert step.keys() - without_wall_clock(step).keys() == {"moe/exchange_s", "moe/exchange_share"}
    assert layers[0].keys() - without_wall_clock(layers[0]).keys() == {"exchange_s", "exchange_share"}


def test_exchanges_add() -> None:
    total = LayerExchange(1.0, 1, 1, 1, 1)
    add_exchanges(total, [LayerExchange(1.0, 2, 3, 4, 5), LayerExchange()])
    assert total == LayerExchange(2.0, 3, 4, 5, 6)
