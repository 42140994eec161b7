"""What DeepEP v1's and UCCL's dispatchers are both held to, run inside a rank (see tests/ranks.py)."""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from moe.config import MoeConfig
from moe.dispatch.base import ExpertGroup
from moe.dispatch.buffer_limits import BufferLimits
from moe.dispatch.deepep_low_latency import DeepEpLowLatencyDispatcher
from moe.dispatch.deepep_v1 import DeepEpV1Dispatcher
from moe.dispatch.monitor import LayerExchange
from tests.dense_reference import Case, Kind, check_dispatcher, dense, expert_group, random_case, through_dispatcher
from tests.doubles import deep_ep_v1_types

BFLOAT16_TOLERANCE = 0.03
"""Of the largest value: a few roundings of 2^-9 each, in the experts' own computation as much as on the wire."""
WIRE_TOLERANCE = 0.02
"""The same with experts in float32: tokens, expert outputs and both gradients are rounded once on each way."""
LOW_LATENCY = dict(max_tokens_per_rank=16, low_latency=True)
HIDDEN, LOW_LATENCY_HIDDEN, NODE_HIDDEN = 64, 2048, 256


@dataclass(frozen=True)
class Flavour:
    """A double with the limits of the library that it stands for."""

    library: ModuleType
    limits: BufferLimits

    def settings(self, **changes: Any) -> MoeConfig:
        return MoeConfig(dispatcher=self.limits.backend, exchange_dtype="bfloat16", **changes)  # type: ignore[arg-type]

    def build(self, group: ExpertGroup, **changes: Any) -> DeepEpV1Dispatcher:
        name = self.limits.backend
        return DeepEpV1Dispatcher(self.library, self.settings(**changes), group, requested=name, limits=self.limits)

    def build_low_latency(self, group: ExpertGroup, **changes: Any) -> DeepEpLowLatencyDispatcher:
        moe, name = self.settings(**(LOW_LATENCY | changes)), self.limits.backend
        return DeepEpLowLatencyDispatcher(self.library, moe, group, requested=name, limits=self.limits)

    def place(self, rank: int, ranks_per_node: int) -> "Flavour":
        """Make "nodes" of fewer ranks than eight, and tell the rank where it is; for the rest of its process."""
        deep_ep_v1_types.NUM_MAX_NVL_PEERS = ranks_per_node
        os.environ.update(LOCAL_RANK=str(rank % ranks_per_node), LOCAL_WORLD_SIZE=str(ranks_per_node))
        return replace(self, limits=replace(self.limits, gpus_per_node=ranks_per_node))


def check_cases(
    rank: int, world_size: int, flavour: Flavour, cases: list[Case], dtype: torch.dtype, layers: int
) -> dict[int, LayerExchange]:
    """Outputs and all gradients equal the dense reference, case by case; the last case's exchanges."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="8")
    atol = BFLOAT16_TOLERANCE if dtype == torch.bfloat16 else WIRE_TOLERANCE
    for case in cases:
        monitor = check_dispatcher(
            flavour.build, rank, world_size, case, dtype, atol, weights_dtype=torch.float32, layers=layers
        )
    return monitor.take()


def check_nodes(rank: int, world_size: int, flavour: Flavour, kinds: tuple[Kind, ...]) -> list[tuple[int, int]]:
    """As `check_cases` with two ranks on a node; bytes to other ranks and to other nodes, for each kind."""
    flavour = flavour.place(rank, 2)
    counted = []
    for kind in kinds:
        case = random_case(3, 20, 8, 3, NODE_HIDDEN, kind)
        monitor = check_dispatcher(
            flavour.build, rank, world_size, case, torch.float32, WIRE_TOLERANCE, ranks_per_node=2, layers=2
        )
        layer = monitor.take()[0]
        counted.append((layer.sent_bytes, layer.sent_off_node_bytes))
    return counted


def check_whole_numbers(rank: int, world_size: int, flavour: Flavour) -> None:
    """Numbers that bfloat16 holds exactly arrive exactly: no row is lost, doubled, rounded twice or misplaced."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="8")
    group = expert_group(rank, world_size)
    dispatcher = flavour.build(group)
    generator = torch.Generator().manual_seed(rank)
    experts, tokens, top_k = 2 * world_size, 5 + rank, 3
    hidden_TH = torch.randint(-3, 4, (tokens, HIDDEN), generator=generator).bfloat16().requires_grad_()
    weights_TK = torch.randint(1, 3, (tokens, top_k), generator=generator).float().requires_grad_()
    ids_TK = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
    dispatched = dispatcher.dispatch(hidden_TH, ids_TK, weights_TK, experts)
    local = experts // world_size
    counts = torch.diff(dispatched.ends_E, prepend=torch.zeros(1, dtype=torch.int32))
    scale_S = (torch.arange(rank * local, (rank + 1) * local) % 3 + 1).bfloat16().repeat_interleave(counts)
    output_TH = dispatcher.combine(dispatched.rows_SH * scale_S.unsqueeze(1), dispatched)
    gate_T = (weights_TK * (ids_TK % 3 + 1)).sum(1, keepdim=True)
    expected_TH = hidden_TH.float() * gate_T
    assert torch.equal(output_TH.float(), expected_TH)
    ones = torch.ones_like(hidden_TH)
    ours = torch.autograd.grad(output_TH, (hidden_TH, weights_TK), ones)
    theirs = torch.autograd.grad(expected_TH, (hidden_TH, weights_TK), ones.float())
    assert all(torch.equal(mine, reference) for mine, reference in zip(ours, theirs, strict=True))
    dispatcher.close()


def check_low_latency(rank: int, world_size: int, flavour: Flavour, kinds: tuple[Kind, ...]) -> None:
    """Outputs of a pass without gradients equal the dense reference, twice over the same buffer."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="8")
    group = expert_group(rank, world_size)
    dispatcher = flavour.build_low_latency(group)
    for kind in kinds:
        case = random_case(5, 12, 8, 3, LOW_LATENCY_HIDDEN, kind)
        rows = case.rows_of(rank, world_size)
        inputs = case.hidden_TH[rows].float(), case.ids_TK[rows], case.weights_TK[rows].float()
        with torch.no_grad():
            local = case.experts.to(torch.float32).slice(rank, world_size)
            for _ in range(2):
                ours = through_dispatcher(dispatcher, *inputs, local, case.num_experts)
            reference = dense(inputs[0].double(), inputs[1], inputs[2].double(), case.experts)
        torch.testing.assert_close(ours.double(), reference, rtol=WIRE_TOLERANCE, atol=WIRE_TOLERANCE)
    dispatcher.close()


def signature(function: Callable[..., Any]) -> str:
    """Names and defaults as in `a, b=1`, without `self` and annotations."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)


def messages(attempts: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """What each attempt raises, by name; "nothing" when it goes through."""
    raised = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            raised[name] = "nothing"
        except (AssertionError, RuntimeError, ValueError) as error:
            raised[name] = f"{type(error).__name__}: {error}"
    return raised
