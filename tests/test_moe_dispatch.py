import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.config import MoeConfig
from moe.dispatch.base import ExpertShape
from moe.dispatch.capacity import over_capacity
from moe.dispatch.catalog import build_dispatcher
from moe.dispatch.local import LocalDispatcher
from tests.dense_reference import KINDS, Kind, check_dispatcher, expert_group, random_case

torch.set_num_threads(1)
EXPERTS, TOP_K, HIDDEN = 5, 2, 4


def _routes(num_tokens: int, seed: int, masked_share: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, HIDDEN, dtype=torch.float64, generator=generator)
    ids = torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOP_K, -1).indices
    ids = ids.masked_fill(torch.rand(num_tokens, TOP_K, generator=generator) < masked_share, -1)
    weights = torch.rand(num_tokens, TOP_K, dtype=torch.float64, generator=generator)
    return hidden.requires_grad_(), ids, weights.requires_grad_()


def _through_dispatcher(hidden: Tensor, ids: Tensor, weights: Tensor, scale_E: Tensor) -> Tensor:
    """Experts that multiply by a constant of their own."""
    dispatcher = LocalDispatcher()
    dispatched = dispatcher.dispatch(hidden, ids, weights, EXPERTS)
    counts = torch.diff(dispatched.ends_E, prepend=torch.zeros(1, dtype=torch.int32))
    return dispatcher.combine(dispatched.rows_SH * scale_E.repeat_interleave(counts).unsqueeze(1), dispatched)


def _dense(hidden: Tensor, ids: Tensor, weights: Tensor, scale_E: Tensor) -> Tensor:
    gate = (torch.nn.functional.one_hot(ids + 1, EXPERTS + 1)[..., 1:] * weights.unsqueeze(-1)).sum(1)
    return hidden * (gate * scale_E).sum(1, keepdim=True)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 17), st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 1.0]))
def test_dispatch_then_combine_equals_the_dense_sum_with_gradients(tokens: int, seed: int, masked: float) -> None:
    hidden, ids, weights = _routes(tokens, seed, masked)
    scale = torch.linspace(0.5, 2.0, EXPERTS, dtype=torch.float64).requires_grad_()
    grads = []
    for route in (_through_dispatcher, _dense):
        output = route(hidden, ids, weights, scale)
        assert output.shape == (tokens, HIDDEN)
        grads.append((output.detach(), *torch.autograd.grad(output.square().sum(), (hidden, weights, scale))))
    for ours, reference in zip(*grads, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-12)


def test_rows_are_grouped_by_expert() -> None:
    hidden, ids, weights = _routes(9, seed=1, masked_share=0.0)
    dispatched = LocalDispatcher().dispatch(hidden, ids, weights, EXPERTS)
    ends = dispatched.ends_E.tolist()
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        tokens = (ids == expert).any(1).nonzero().squeeze(1)
        assert torch.equal(dispatched.rows_SH[start:end], hidden[tokens])


def test_all_tokens_may_choose_the_same_experts() -> None:
    hidden, _, weights = _routes(6, seed=2, masked_share=0.0)
    ids = torch.tensor([[0, 4]]).expand(6, -1)
    scale = torch.arange(1.0, EXPERTS + 1, dtype=torch.float64)
    output = _through_dispatcher(hidden, ids, weights, scale)
    torch.testing.assert_close(output, _dense(hidden, ids, weights, scale), rtol=0, atol=1e-12)


def test_local_reports_that_nothing_is_transported() -> None:
    dispatcher = build_dispatcher(MoeConfig(), expert_group(0, 1))
    report = dispatcher.transport_report()
    assert (report.requested, report.observed) == ("local", "local")
    dispatcher.close()


def test_more_routes_than_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="num_experts_per_token 3 exceeds num_experts 2"):
        LocalDispatcher().validate(ExpertShape(num_experts=2, top_k=3, hidden_size=8, dtype=torch.float32))


def test_an_unknown_dispatcher_is_named() -> None:
    with pytest.raises(ValueError, match="'teleport'"):
        build_dispatcher(MoeConfig(dispatcher="teleport"), expert_group(0, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_local_equals_the_dense_reference(kind: Kind) -> None:
    check_dispatcher(lambda group: LocalDispatcher(), 0, 1, random_case(5, 23, 6, 3, 4, kind), layers=2)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 12), st.integers(1, 4), st.integers(0, 5), st.integers(0, 2**31))
def test_the_first_routes_of_an_expert_are_within_its_capacity(
    tokens: int, top_k: int, capacity: int, seed: int
) -> None:
    ids_TK = torch.randint(-1, 3, (tokens, top_k), generator=torch.Generator().manual_seed(seed))
    over = over_capacity(ids_TK, 3, capacity).reshape(-1).tolist()
    taken = [0, 0, 0]
    for expert, is_over in zip(ids_TK.reshape(-1).tolist(), over, strict=True):
        assert is_over == (expert >= 0 and taken[expert] >= capacity)
        taken[expert] += expert >= 0


def test_routes_over_capacity_are_dropped_and_counted() -> None:
    """4 tokens, top-1, 2 experts, factor 1: ceil(4 * 1 / 2) = 2 routes an expert; expert 0 is asked for 3 times."""
    group = expert_group(0, 1)
    dispatcher = build_dispatcher(MoeConfig(capacity_factor=1.0), group)
    hidden, ids = torch.eye(4), torch.tensor([[0], [0], [1], [0]])
    group.monitor.layer = 2
    output = dispatcher.combine(
        (dispatched := dispatcher.dispatch(hidden, ids, torch.ones(4, 1), 2)).rows_SH, dispatched
    )
    assert torch.equal(output, torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0])))
    assert group.monitor.take()[2].dropped_routes == 1
    assert dispatcher.transport_report().requested == "local"


def test_a_capacity_nobody_reaches_drops_nothing() -> None:
    group = expert_group(0, 1)
    check_dispatcher(
        lambda _: build_dispatcher(MoeConfig(dispatcher="all_to_all", capacity_factor=100.0), group),
        0,
        1,
        random_case(1, 12, 6, 2, 4, "skewed"),
    )
    assert all(layer.dropped_routes == 0 for layer in group.monitor.take().values())
