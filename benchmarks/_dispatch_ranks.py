"""What one rank of `benchmarks.dispatch` does."""

import argparse
import statistics
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.config import MoeConfig
from moe.dispatch.base import DispatchedTokens, ExpertGroup
from moe.dispatch.catalog import build_dispatcher
from moe.dispatch.monitor import ExchangeMonitor
from moe.transport.probe import expert_shape
from moe.transport.probe_exchange import DTYPES, PhaseTimer, ProbeShape, make_exchange, run_exchange, run_forward

LIMIT = "limit"
PASSES = {"forward": ("dispatch", "combine"), "backward": ("combine backward", "dispatch backward")}


def measure_all(arguments: argparse.Namespace, rank: int, ranks_per_node: int) -> list[dict[str, Any]]:
    """One entry for each combination; the same on every rank."""
    size = dist.get_world_size()
    group = ExpertGroup(
        process_group=dist.group.WORLD,
        rank=rank,
        size=size,
        ranks_per_node=ranks_per_node,
        monitor=ExchangeMonitor(),
    )
    rows = []
    points = product(arguments.backends, arguments.tokens, arguments.top_k, arguments.skew, arguments.dtypes)
    for backend, tokens, top_k, skew, dtype in points:
        shape = ProbeShape(
            tokens=tokens, hidden=arguments.hidden, top_k=top_k, experts=arguments.experts, dtype=dtype, skew=skew
        )
        row = measure(backend, shape, group, arguments.repeats)
        rows.append(row)
        if rank == 0:
            print(_line(row), file=sys.stderr, flush=True)
    return rows


def backend_settings(name: str, tokens: int) -> MoeConfig:
    """`all_to_all:rank` to settings; ValueError for a name that means nothing."""
    dispatcher, _, option = name.partition(":")
    settings: dict[str, Any] = {"dispatcher": dispatcher, "max_tokens_per_rank": tokens}
    if option == "low_latency":
        settings["low_latency"] = True
    elif option in ("rank", "node"):
        settings["deduplicate"] = option
    elif option:
        raise ValueError(f"backend {name!r}: after the colon comes rank, node or low_latency")
    return MoeConfig(**settings)


def measure(backend: str, shape: ProbeShape, group: ExpertGroup, repeats: int) -> dict[str, Any]:
    """Medians of `repeats` exchanges, each next to a bare all_to_all_single; one more goes first and is left out."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    moe = backend_settings(backend, shape.tokens)
    dispatcher = build_dispatcher(moe, group)
    dispatcher.validate(expert_shape(moe, shape, group))
    case = make_exchange(shape, group.rank, device)
    timer, limit = PhaseTimer(device, group), PhaseTimer(device, group)
    rows = shape.tokens * shape.top_k // group.size * group.size
    source = torch.randn(rows, shape.hidden, device=device).to(DTYPES[shape.dtype])
    target = torch.empty_like(source)
    for _ in range(repeats + 1):
        limit.start()
        dist.all_to_all_single(target, source, group=group.process_group)
        limit.stop(LIMIT)
        if moe.low_latency:
            run_forward(dispatcher, case, _no_experts, timer)
        else:
            run_exchange(dispatcher, case, _no_experts, (), timer)
    dispatcher.close()
    limit_bytes = source.nbytes * (group.size - 1) / group.size
    limit_s = _slowest(limit.seconds[LIMIT], group, device)
    slowest_s = {name: _slowest(seconds, group, device) for name, seconds in timer.seconds.items()}
    sent = {name: _mean(sent_bytes, group, device) for name, sent_bytes in timer.sent_bytes.items()}
    for both, parts in PASSES.items():
        if parts[0] in slowest_s:
            slowest_s[both] = [sum(times) for times in zip(*(slowest_s[part] for part in parts), strict=True)]
            sent[both] = sum(sent[part] for part in parts)
    return {
        "backend": backend,
        "tokens": shape.tokens,
        "top_k": shape.top_k,
        "skew": shape.skew,
        "dtype": shape.dtype,
        LIMIT: _summary(limit_s, limit_bytes),
        "phases": {
            name: _summary(slowest_s[name], sent[name])
            | _shares(slowest_s[name], sent[name], limit_s, limit_bytes, len(PASSES.get(name, (name,))))
            for name in slowest_s
        },
    }


def _no_experts(rows_SH: Tensor, sent: DispatchedTokens) -> Tensor:
    return rows_SH.view_as(rows_SH)


def _shares(
    seconds: Sequence[float], sent_bytes: float, limit_s: Sequence[float], limit_bytes: float, exchanges: int
) -> dict[str, float]:
    """Of `exchanges` bare exchanges, each measured next to ours: in bytes per second, and in time."""
    times = [exchanges * bare / own for own, bare in zip(seconds, limit_s, strict=True)]
    speed = statistics.median(times)
    return {
        "share_of_limit": round(speed * sent_bytes / (exchanges * limit_bytes), 3) if limit_bytes else 0.0,
        "limit_time_over_time": round(speed, 3),
    }


def _summary(seconds: Sequence[float], sent_bytes: float) -> dict[str, float]:
    median_s = statistics.median(seconds)
    return {
        "seconds": round(median_s, 6),
        "fastest_s": round(min(seconds), 6),
        "slowest_s": round(max(seconds), 6),
        "sent_bytes": round(sent_bytes),
        "gb_per_s": round(sent_bytes / median_s / 1e9, 3),
    }


def _slowest(seconds: Sequence[float], group: ExpertGroup, device: torch.device) -> list[float]:
    """Of all ranks, for each exchange; without the first, which pays for connections and buffers."""
    times = torch.tensor(seconds[1:], dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group.process_group)
    values: list[float] = times.tolist()
    return values


def _mean(sent_bytes: Sequence[int], group: ExpertGroup, device: torch.device) -> float:
    """Bytes that a rank sends in one exchange, on average over the ranks."""
    total = torch.tensor(float(sent_bytes[-1]), dtype=torch.float64, device=device)
    dist.all_reduce(total, dist.ReduceOp.SUM, group.process_group)
    return total.item() / group.size


def _line(row: dict[str, Any]) -> str:
    shares = ", ".join(f"{name} {phase['share_of_limit']:.2f}" for name, phase in row["phases"].items())
    return (
        f"{row['backend']}, {row['tokens']} tokens, top-{row['top_k']}, skew {row['skew']:g}, {row['dtype']}: "
        f"limit {row[LIMIT]['gb_per_s']:.2f} GB/s; shares: {shares}"
    )
