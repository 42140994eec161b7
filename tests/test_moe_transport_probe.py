"""The probe of the exchange: it passes what is exact, finds what is not, and counts what is sent."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe.config import MoeConfig
from moe.dispatch.base import DispatchedTokens, ExpertGroup, TokenDispatcher
from moe.dispatch.catalog import build_dispatcher
from moe.dispatch.monitor import ExchangeMonitor
from moe.transport import probe
from moe.transport.probe_exchange import (
    TOLERANCES,
    PhaseTimer,
    ProbeShape,
    dense_result,
    diagonal_experts,
    make_exchange,
    run_exchange,
)
from tests.doubles import deep_ep_elastic, deep_ep_v1, nccl_ep, uccl_deep_ep
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SHAPE = ProbeShape(tokens=24, hidden=16, top_k=3, experts=12, dtype="float64")
MOE = MoeConfig(dispatcher="all_to_all")
PHASES = ["dispatch", "combine", "combine backward", "dispatch backward"]


def expert_group(rank: int = 0, size: int = 1, ranks_per_node: int = 0) -> ExpertGroup:
    return ExpertGroup(
        process_group=dist.group.WORLD if dist.is_initialized() else None,
        rank=rank,
        size=size,
        ranks_per_node=ranks_per_node or size,
        monitor=ExchangeMonitor(),
    )


def test_a_tokens_experts_are_distinct_and_its_weights_sum_to_one() -> None:
    case = make_exchange(SHAPE, rank=0, device=CPU)
    assert all(len(set(row)) == SHAPE.top_k for row in case.expert_ids_TK.tolist())
    assert case.expert_ids_TK.min() >= 0
    assert case.expert_ids_TK.max() < SHAPE.experts
    torch.testing.assert_close(case.weights_TK.sum(1), torch.ones(SHAPE.tokens, dtype=torch.float64))


def test_ranks_have_tokens_of_their_own_and_the_same_experts() -> None:
    first, second = make_exchange(SHAPE, 0, CPU), make_exchange(SHAPE, 1, CPU)
    assert not torch.equal(first.hidden_TH, second.hidden_TH)
    assert not torch.equal(first.expert_ids_TK, second.expert_ids_TK)
    assert torch.equal(first.scales_EH, second.scales_EH)
    assert torch.equal(first.hidden_TH, make_exchange(SHAPE, 0, CPU).hidden_TH)


def test_skew_sends_most_tokens_to_few_experts() -> None:
    shares = []
    for skew in (0.0, 1.0):
        case = make_exchange(replace(SHAPE, tokens=2000, hidden=1, skew=skew), 0, CPU)
        shares.append(torch.bincount(case.expert_ids_TK.flatten(), minlength=12).max().item() / (2000 * 3))
    assert shares[0] < 0.1
    assert shares[1] > 0.2


def test_the_dense_result_is_that_of_autograd() -> None:
    case = make_exchange(SHAPE, 0, CPU)
    leaves = [x.clone().requires_grad_() for x in (case.hidden_TH, case.weights_TK, case.scales_EH)]
    hidden_TH, weights_TK, scales_EH = leaves
    output_TH = torch.zeros_like(hidden_TH)
    for token in range(SHAPE.tokens):
        for k, expert in enumerate(case.expert_ids_TK[token].tolist()):
            output_TH = output_TH.index_add(
                0, torch.tensor([token]), (weights_TK[token, k] * scales_EH[expert] * hidden_TH[token]).unsqueeze(0)
            )
    expected = [output_TH, *torch.autograd.grad(output_TH, leaves, case.grad_TH)]
    for got, want in zip(dense_result(case), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def probe_in_rank(rank: int, world_size: int, cases: list[tuple[MoeConfig, ProbeShape]]) -> list[dict[str, Any]]:
    return [probe.run_probe(moe, shape, expert_group(rank, world_size), CPU, repeats=2) for moe, shape in cases]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_exact_exchanges_match(ranks: int) -> None:
    cases = [
        (MOE, SHAPE),
        (MOE, replace(SHAPE, skew=2.0, dtype="float32")),
        (replace(MOE, deduplicate="rank"), replace(SHAPE, dtype="bfloat16")),
        (replace(MOE, exchange_dtype="bfloat16"), replace(SHAPE, dtype="bfloat16", tokens=1)),
    ]
    by_rank = run_ranks(ranks, probe_in_rank, cases)
    assert all(reports == by_rank[0] for reports in by_rank)
    for report, (_, shape) in zip(by_rank[0], cases, strict=True):
        assert report["matches"], report["exact"]
        assert list(report["exact"]) == list(probe.NAMES)
        assert {entry["tolerance"] for entry in report["exact"].values()} == {TOLERANCES[shape.dtype]}
        assert list(report["phases"]) == PHASES
        assert report["ranks"] == report["transport"]["ranks"] == ranks
        assert report["transport"]["status"] == "ok"
        assert json.loads(json.dumps(report)) == report


def test_rows_that_cross_are_counted() -> None:
    report = run_ranks(2, probe_in_rank, [(MOE, SHAPE)])[0][0]
    row_bytes = SHAPE.hidden * 8
    combined = report["phases"]["combine"]["sent_bytes"]
    assert combined % (row_bytes / 2) == 0  # the mean of two ranks, whole rows each
    assert 0 < combined <= SHAPE.tokens * SHAPE.top_k * row_bytes
    assert report["phases"]["dispatch"]["sent_bytes"] >= combined  # and what tells the experts of the rows
    rounds = 3  # a warm-up and two repeats
    total = sum(phase["sent_bytes"] for phase in report["phases"].values()) * 2 * rounds
    assert report["transport"]["sent_bytes"] >= total
    assert report["transport"]["predicted_off_node_bytes"] == 0


class Astray:
    """Passes everything on, but `combine` mixes up the rows of two experts."""

    def __init__(self, dispatcher: TokenDispatcher) -> None:
        self.dispatcher = dispatcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dispatcher, name)

    def combine(self, rows_SH: Tensor, dispatched: DispatchedTokens) -> Tensor:
        return self.dispatcher.combine(rows_SH.roll(1, 0), dispatched)


class Unweighted(Astray):
    """Loses the gradient of the weights."""

    def dispatch(self, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> DispatchedTokens:
        scaled_TK = weights_TK.detach() + 0.0 * weights_TK
        return self.dispatcher.dispatch(hidden_TH, ids_TK, scaled_TK, num_experts)

    def combine(self, rows_SH: Tensor, dispatched: DispatchedTokens) -> Tensor:
        return self.dispatcher.combine(rows_SH, dispatched)


@pytest.mark.parametrize(
    ("broken", "wrong"),
    [(Astray, set(probe.NAMES)), (Unweighted, {"gradient of weights"})],
)
def test_what_is_not_exact_is_found(monkeypatch: pytest.MonkeyPatch, broken: type[Astray], wrong: set[str]) -> None:
    monkeypatch.setattr(probe, "build_dispatcher", lambda moe, group: broken(build_dispatcher(moe, group)))
    report = probe.run_probe(MOE, SHAPE, expert_group(), CPU, repeats=1)
    assert not report["matches"]
    assert {name for name, entry in report["exact"].items() if entry["error"] > entry["tolerance"]} == wrong


class Unwaited(Astray):
    """Reads the last rank's results before they have arrived."""

    def combine(self, rows_SH: Tensor, dispatched: DispatchedTokens) -> Tensor:
        return self.dispatcher.combine(rows_SH, dispatched) * (float("nan") if dist.get_rank() else 1.0)


def probe_unwaited(rank: int, ranks: int) -> bool:
    probe.build_dispatcher = lambda moe, group: Unwaited(build_dispatcher(moe, group))  # type: ignore[assignment]
    report = probe_in_rank(rank, ranks, [(MOE, SHAPE)])[0]
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    return bool(report["matches"])


def test_values_that_are_not_finite_are_found_on_any_rank() -> None:
    assert run_ranks(2, probe_unwaited) == [False, False]


def test_a_broken_limit_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="num_experts"):
        probe.run_probe(MOE, replace(SHAPE, top_k=13), expert_group(), CPU, repeats=1)


def test_low_latency_kernels_are_probed_forward_only() -> None:
    report = probe.run_probe(replace(MOE, low_latency=True), SHAPE, expert_group(), CPU, repeats=1)
    assert list(report["exact"]) == ["output"]
    assert list(report["phases"]) == ["dispatch", "combine"]
    assert report["matches"]


def test_phases_are_timed_once_an_exchange() -> None:
    group = expert_group()
    timer = PhaseTimer(CPU, group)
    case = make_exchange(SHAPE, 0, CPU)
    scales_LH = case.scales_EH.clone().requires_grad_()
    for _ in range(3):
        run_exchange(build_dispatcher(MOE, group), case, diagonal_experts(scales_LH), [scales_LH], timer)
    assert {name: len(seconds) for name, seconds in timer.seconds.items()} == dict.fromkeys(PHASES, 3)
    assert all(second > 0 for seconds in timer.seconds.values() for second in seconds)


def probe_double_in_rank(rank: int, world_size: int, name: str, moe: MoeConfig, shape: ProbeShape) -> dict[str, Any]:
    """With a double in the place of the library."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))  # as the launchers do; UCCL reads them
    sys.modules.update(LIBRARIES[name]())
    return probe.run_probe(moe, shape, expert_group(rank, world_size), CPU, repeats=1)


LIBRARIES: dict[str, Callable[[], Any]] = {
    "elastic": lambda: {"deep_ep": deep_ep_elastic.library(deep_ep_elastic.ElasticBuffer)},
    "v1": lambda: {"deep_ep": deep_ep_v1},
    "uccl": lambda: {"deep_ep": uccl_deep_ep},
    "nccl_ep": nccl_ep.modules,
}


@pytest.mark.parametrize(
    ("name", "requested", "low_latency"),
    [
        ("elastic", "deepep", False),
        ("v1", "deepep", False),
        ("v1", "deepep", True),
        ("nccl_ep", "nccl_ep", False),
    ],
)
def test_backends_of_bfloat16_pass_through_their_doubles(name: str, requested: str, low_latency: bool) -> None:
    moe = MoeConfig(dispatcher=requested, low_latency=low_latency, max_tokens_per_rank=16)
    shape = ProbeShape(tokens=12, hidden=2048 if low_latency else 256, top_k=2, experts=8, dtype="bfloat16")
    report = run_ranks(2, probe_double_in_rank, name, moe, shape)[0]
    assert report["matches"], report["exact"]
    assert (report["transport"]["observed"], report["transport"]["status"]) == (requested, "ok")
    assert list(report["phases"]) == (PHASES[:2] if low_latency else PHASES)
    assert report["phases"]["dispatch"]["sent_bytes"] > 0


def test_uccl_in_the_place_of_deepep_is_a_downgrade() -> None:
    moe = MoeConfig(dispatcher="deepep", max_tokens_per_rank=16)
    shape = ProbeShape(tokens=12, hidden=256, top_k=2, experts=8, dtype="bfloat16")
    transport = run_ranks(2, probe_double_in_rank, "uccl", moe, shape)[0]["transport"]
    assert (transport["status"], transport["observed"]) == ("downgrade", "uccl_ep")
    assert transport["reason"] == "deepep was requested, uccl_ep carried the tokens"
