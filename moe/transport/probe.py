"""Does the exchange work here, how fast is it, and what carried it? Run by every rank, before a campaign."""

import math
import statistics
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.config import MoeConfig
from moe.dispatch.base import ExpertGroup, ExpertShape, TokenDispatcher
from moe.dispatch.catalog import build_dispatcher
from moe.transport.counters import read_counters
from moe.transport.probe_exchange import (
    DTYPES,
    TOLERANCES,
    Exchange,
    PhaseTimer,
    ProbeShape,
    dense_result,
    diagonal_experts,
    make_exchange,
    run_exchange,
    run_forward,
)
from moe.transport.report import collect

NAMES = ("output", "gradient of hidden states", "gradient of weights", "gradient of experts")


def run_probe(
    moe: MoeConfig, shape: ProbeShape, group: ExpertGroup, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Probe the dispatcher that `moe` names over `group`, which is the whole world; the same result on every rank.

    Keys: `dispatcher`, `shape`, `ranks`, `matches` and `exact` (error and tolerance of the result and of each
    gradient), `phases` (median seconds of the slowest rank, bytes that a rank sends on average, GB/s), `one_token_s`
    (dispatch and combine of a single token a rank), `transport` (see `moe.transport.report.collect`). Low-latency
    kernels have no backward pass: what needs one is left out.

    Raises ValueError when the shape breaks a limit of the backend or its library is missing, ExchangeFailed when a rank
    is gone.
    """
    dispatcher = build_dispatcher(moe, group)
    dispatcher.validate(expert_shape(moe, shape, group))
    case = make_exchange(shape, group.rank, device)
    large, small = PhaseTimer(device, group), PhaseTimer(device, group)
    before = read_counters()
    result = _exchange(moe, dispatcher, group, case, large)
    for _ in range(repeats):
        _exchange(moe, dispatcher, group, case, large)
    token = make_exchange(replace(shape, tokens=1), group.rank, device)
    for _ in range(repeats + 1):
        run_forward(dispatcher, token, diagonal_experts(_own_scales(token, group)), small)
    transport = collect(
        dispatcher,
        moe,
        group,
        before=before,
        after=read_counters(),
        sent_bytes=large.total_sent_bytes + small.total_sent_bytes,
        sent_off_node_bytes=large.sent_off_node_bytes + small.sent_off_node_bytes,
    )
    dispatcher.close()
    exact = _errors(result, case, group, shape)
    return {
        "dispatcher": moe.dispatcher,
        "shape": asdict(shape),
        "ranks": group.size,
        "matches": all(entry["error"] <= entry["tolerance"] for entry in exact.values()),
        "exact": exact,
        "phases": summarize(large, group, device),
        "one_token_s": sum(phase["seconds"] for phase in summarize(small, group, device).values()),
        "transport": transport,
    }


def expert_shape(moe: MoeConfig, shape: ProbeShape, group: ExpertGroup) -> ExpertShape:
    """What a dispatcher's limits are checked against."""
    return ExpertShape(
        num_experts=shape.experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden,
        dtype=torch.bfloat16 if moe.exchange_dtype == "bfloat16" else DTYPES[shape.dtype],
        ep_size=group.size,
        ranks_per_node=group.ranks_per_node,
        tokens_per_rank=shape.tokens,
    )


def summarize(timer: PhaseTimer, group: ExpertGroup, device: torch.device) -> dict[str, dict[str, float]]:
    """Of each phase: median seconds of the slowest rank, its extremes, bytes a rank sends on average, and GB/s.

    The first exchange is left out: it pays for connections and buffers.
    """
    phases = {}
    for phase, seconds in timer.seconds.items():
        slowest_s = _reduce(torch.tensor(seconds[1:], dtype=torch.float64), group, device, dist.ReduceOp.MAX).tolist()
        own_bytes = torch.tensor(float(timer.sent_bytes[phase][-1]), dtype=torch.float64)
        sent_bytes = _reduce(own_bytes, group, device, dist.ReduceOp.SUM).item() / group.size
        median_s = statistics.median(slowest_s)
        phases[phase] = {
            "seconds": median_s,
            "fastest_s": min(slowest_s),
            "slowest_s": max(slowest_s),
            "sent_bytes": sent_bytes,
            "gb_per_s": sent_bytes / median_s / 1e9,
        }
    return phases


def _exchange(
    moe: MoeConfig, dispatcher: TokenDispatcher, group: ExpertGroup, case: Exchange, timer: PhaseTimer
) -> tuple[Tensor, ...]:
    scales_LH = _own_scales(case, group)
    if moe.low_latency:
        return (run_forward(dispatcher, case, diagonal_experts(scales_LH), timer),)
    scales_LH.requires_grad_()
    return run_exchange(dispatcher, case, diagonal_experts(scales_LH), [scales_LH], timer)


def _own_scales(case: Exchange, group: ExpertGroup) -> Tensor:
    return case.scales_EH.chunk(group.size)[group.rank].clone()


def _errors(
    result: tuple[Tensor, ...], case: Exchange, group: ExpertGroup, shape: ProbeShape
) -> dict[str, dict[str, float]]:
    """Largest difference from the dense computation over all ranks, relative to the largest value there."""
    *own, scales_EH = dense_result(case)
    scales_EH = _reduce(scales_EH, group, scales_EH.device, dist.ReduceOp.SUM)
    expected = [*own, scales_EH.chunk(group.size)[group.rank]]
    errors = {}
    for name, got, want in zip(NAMES, result, expected, strict=False):  # without gradients there is only the output
        # gloo's maximum of a number and NaN may be the number.
        difference = (got.double() - want).abs().amax().nan_to_num(nan=math.inf)
        extremes = torch.stack([difference, want.abs().amax()])
        error, largest = _reduce(extremes, group, extremes.device, dist.ReduceOp.MAX).tolist()
        finite = min(error / largest, sys.float_info.max)  # JSON has no infinity
        errors[name] = {"error": finite, "tolerance": TOLERANCES[shape.dtype]}
    return errors


def _reduce(value: Tensor, group: ExpertGroup, device: torch.device, op: dist.ReduceOp.RedOpType) -> Tensor:
    if group.process_group is not None:
        value = value.to(device)
        dist.all_reduce(value, op, group.process_group)
    return value
