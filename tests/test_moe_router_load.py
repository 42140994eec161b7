import math

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from moe.router_load import RouterLoad, RouterTrace, balance_loss, measure_load, router_modules


def trace_of(*layers: list[list[float]], top_k: int = 1) -> RouterTrace:
    logits = [torch.tensor(layer) for layer in layers]
    return RouterTrace([[layer] for layer in logits], [[layer.topk(top_k, dim=-1).indices] for layer in logits])


def test_counts_violation_dead_experts_and_entropy_by_hand() -> None:
    skewed = [[9.0, 0.0, 0.0], [9.0, 0.0, 0.0], [0.0, 9.0, 0.0]]
    even = [[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 9.0]]
    load = measure_load(trace_of(skewed, even), torch.ones(3))
    assert load.counts_LE.tolist() == [[2.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    torch.testing.assert_close(load.violations(), torch.tensor([1.0, 0.0], dtype=torch.float64))
    metrics = load.metrics()
    assert metrics["rollout/moe/max_vio"] == pytest.approx(1.0)
    assert metrics["rollout/moe/avg_vio"] == pytest.approx(0.5)
    assert metrics["moe/dead_experts"] == 1.0
    z = math.exp(9) + 2
    entropy = math.log(z) - 9 * math.exp(9) / z
    assert metrics["moe/router_entropy"] == pytest.approx(entropy, rel=1e-4)


def test_a_weight_counts_a_token_that_often_and_padding_not_at_all() -> None:
    logits = [[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]
    weighted = measure_load(trace_of(logits), torch.tensor([2.0, 1.0, 0.0]))
    repeated = measure_load(trace_of([logits[0], logits[0], logits[1]]), torch.ones(3))
    torch.testing.assert_close(weighted.counts_LE, repeated.counts_LE)
    torch.testing.assert_close(weighted.probability_LE, repeated.probability_LE)
    torch.testing.assert_close(weighted.entropy_L, repeated.entropy_L)
    assert weighted.tokens == repeated.tokens == 3.0


def test_balance_loss_is_transformers_loss_on_one_layer() -> None:
    logits = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    trace = RouterTrace([[logits]], [[logits.topk(2, dim=-1).indices]])
    own = balance_loss(trace, torch.ones(32), measure_load(trace, torch.ones(32)))
    torch.testing.assert_close(own, load_balancing_loss_func((logits,), 8, 2))


def test_balance_loss_and_its_gradient_add_up_over_any_split() -> None:
    start = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    weights = torch.tensor([1.0, 2.0, 0.0] * 4)

    def run(sizes: list[int]) -> tuple[Tensor, Tensor]:
        logits = start.clone().requires_grad_()
        pieces = list(zip(logits.split(sizes), weights.split(sizes), strict=True))
        traces = [(RouterTrace([[part]], [[part.topk(2, dim=-1).indices]]), weight) for part, weight in pieces]
        loads = [measure_load(trace, weight) for trace, weight in traces]
        total = sum(loads[1:], start=loads[0])
        loss = torch.stack([balance_loss(trace, weight, total) for trace, weight in traces]).sum()
        loss.backward()
        assert logits.grad is not None
        return loss.detach(), logits.grad

    torch.testing.assert_close(run([5, 4, 3]), run([12]))


def test_an_even_router_has_the_smallest_balance_loss() -> None:
    even = trace_of([[5.0, 0.0], [0.0, 5.0]])
    skewed = trace_of([[5.0, 0.0], [5.0, 0.0]])
    ones = torch.ones(2)
    assert float(balance_loss(even, ones, measure_load(even, ones))) == pytest.approx(1.0)
    assert float(balance_loss(skewed, ones, measure_load(skewed, ones))) > 1.9


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(ValueError, match="declares no router"):
        router_modules(nn.Linear(2, 2))


def test_loads_add() -> None:
    load = RouterLoad(torch.ones(1, 2).double(), torch.ones(1, 2).double(), torch.ones(1).double(), 2.0)
    both = load + load
    assert both.counts_LE.tolist() == [[2.0, 2.0]] and both.tokens == 4.0
