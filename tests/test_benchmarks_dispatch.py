"""The benchmark of the exchange measures what it says."""

from typing import Any

import pytest
import torch.distributed as dist

from benchmarks._dispatch_ranks import backend_settings, measure
from moe.dispatch.base import ExpertGroup
from moe.dispatch.monitor import ExchangeMonitor
from moe.transport.probe_exchange import ProbeShape
from tests.ranks import run_ranks

SHAPE = ProbeShape(tokens=64, hidden=32, top_k=4, experts=8)


def measure_in_rank(rank: int, world_size: int, backends: list[str]) -> list[dict[str, Any]]:
    group = ExpertGroup(
        process_group=dist.group.WORLD,
        rank=rank,
        size=world_size,
        ranks_per_node=world_size,
        monitor=ExchangeMonitor(),
    )
    return [measure(backend, SHAPE, group, repeats=2) for backend in backends]


def test_bytes_and_times_of_both_passes_are_those_of_their_exchanges() -> None:
    plain, once = run_ranks(2, measure_in_rank, ["all_to_all", "all_to_all:rank"])[0]
    assert list(plain["phases"])[:4] == ["dispatch", "combine", "combine backward", "dispatch backward"]
    assert plain["limit"]["sent_bytes"] == 64 * 4 * 32 * 4 / 2  # half of all routes go to the other rank
    for row in (plain, once):
        phases = row["phases"]
        assert phases["forward"]["sent_bytes"] == phases["dispatch"]["sent_bytes"] + phases["combine"]["sent_bytes"]
        assert all(phase["share_of_limit"] > 0 for phase in phases.values())
        assert all(phase["fastest_s"] <= phase["seconds"] <= phase["slowest_s"] for phase in phases.values())
    assert once["phases"]["combine"]["sent_bytes"] < plain["phases"]["combine"]["sent_bytes"]


def test_backends_are_named_as_in_the_configuration() -> None:
    assert backend_settings("all_to_all:node", 8).deduplicate == "node"
    assert backend_settings("deepep:low_latency", 8).low_latency
    with pytest.raises(ValueError, match="after the colon comes rank, node or low_latency"):
        backend_settings("all_to_all:fast", 8)
