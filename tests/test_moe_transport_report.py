"""Requested against observed: the verdict on the transport, and the report of all ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe.config import MoeConfig
from moe.dispatch.base import ExpertGroup, TransportReport
from moe.dispatch.local import LocalDispatcher
from moe.dispatch.monitor import ExchangeMonitor
from moe.transport.counters import Counters
from moe.transport.report import NodeTraffic, collect, judge
from tests.ranks import run_ranks

MB = 1_000_000
QUIET = Counters(rdma_devices=0, rdma={}, ethernet_sent_bytes=0)


def sent(number: int, ethernet: int | None = 0) -> Counters:
    return Counters(rdma_devices=16, rdma={"rdma_write_bytes": number}, ethernet_sent_bytes=ethernet)


def node(predicted: int, counted: Counters) -> NodeTraffic:
    return NodeTraffic(predicted_bytes=predicted, counted=counted)


def report(backend: str, observed: str = "", **details: str) -> TransportReport:
    return TransportReport(requested=backend, observed=observed or backend, details=dict(details))


def test_another_backend_than_the_requested_one_is_a_downgrade() -> None:
    verdict = judge(report("deepep", "all_to_all"), "any", [node(0, QUIET)])
    assert (verdict.status, verdict.reason) == ("downgrade", "deepep was requested, all_to_all carried the tokens")


@pytest.mark.parametrize("network", ["auto", "rdma", "any"])
def test_nothing_has_to_be_proven_when_no_token_leaves_its_node(network: str) -> None:
    assert judge(report("deepep"), network, [node(0, QUIET)]).status == "ok"


@pytest.mark.parametrize("backend", ["all_to_all", "deepep"])
@pytest.mark.parametrize("network", ["auto", "rdma"])
def test_bytes_counted_by_the_rdma_devices_are_proof(backend: str, network: str) -> None:
    nodes = [node(100 * MB, sent(101 * MB)), node(100 * MB, sent(900 * MB))]
    assert judge(report(backend), network, nodes).status == "ok"


@pytest.mark.parametrize("backend", ["all_to_all", "deepep"])
@pytest.mark.parametrize("network", ["auto", "rdma"])
def test_silent_tcp_on_one_node_is_a_downgrade(backend: str, network: str) -> None:
    nodes = [node(100 * MB, sent(101 * MB)), node(100 * MB, sent(2 * MB, ethernet=120 * MB))]
    verdict = judge(report(backend), network, nodes)
    assert verdict.status == "downgrade"
    assert "node 1 was to send 100.0 MB" in verdict.reason
    assert "RDMA devices sent 2.0 MB" in verdict.reason
    assert "Ethernet interfaces 120.0 MB" in verdict.reason


def test_a_node_may_send_less_than_predicted_as_long_as_all_nodes_together_do_not() -> None:
    """Skewed routing: the first node's tokens go to experts of the second, whose combines are counted at the first."""
    skewed = [node(200 * MB, sent(110 * MB)), node(20 * MB, sent(110 * MB))]
    assert judge(report("deepep"), "auto", skewed).status == "ok"
    verdict = judge(report("deepep"), "auto", [node(200 * MB, sent(110 * MB)), node(20 * MB, sent(20 * MB))])
    assert verdict.status == "downgrade"
    assert verdict.reason == "220.0 MB were to go to other nodes, the RDMA devices sent 130.0 MB"


def test_one_node_of_many_that_fell_back_is_named() -> None:
    nodes = [node(100 * MB, sent(110 * MB)) for _ in range(32)]
    nodes[7] = node(100 * MB, sent(0, ethernet=None))
    verdict = judge(report("deepep"), "auto", nodes)
    assert verdict.status == "downgrade"
    assert verdict.reason.startswith("node 7 was to send 100.0 MB to others, its RDMA devices sent 0.0 MB: check")


def test_any_network_will_do_when_so_configured() -> None:
    assert judge(report("all_to_all"), "any", [node(100 * MB, sent(0))]).status == "ok"


def test_all_to_all_without_rdma_devices_is_what_auto_means() -> None:
    assert judge(report("all_to_all"), "auto", [node(100 * MB, QUIET)]).status == "ok"


@pytest.mark.parametrize("counted", [QUIET, Counters(rdma_devices=4, rdma={}, ethernet_sent_bytes=None)])
def test_without_counters_a_backend_that_needs_rdma_is_unverifiable(counted: Counters) -> None:
    assert judge(report("deepep"), "auto", [node(100 * MB, counted)]).status == "unverifiable"


@pytest.mark.parametrize("backend", ["all_to_all", "deepep"])
def test_network_rdma_asks_for_proof(backend: str) -> None:
    verdict = judge(report(backend), "rdma", [node(100 * MB, QUIET)])
    assert verdict.status == "downgrade"
    assert "moe.network = rdma" in verdict.reason


def test_a_contradiction_on_one_node_outweighs_missing_evidence_on_another() -> None:
    nodes = [node(100 * MB, QUIET), node(100 * MB, sent(0))]
    assert judge(report("deepep"), "auto", nodes).status == "downgrade"


def test_gin_that_nccl_does_not_have_is_a_downgrade_between_nodes() -> None:
    nodes = [node(100 * MB, sent(200 * MB))]
    backend = report("deepep", wire="gin")
    assert judge(backend, "auto", nodes, ["proxy", "proxy"]).status == "ok"
    verdict = judge(backend, "auto", nodes, ["proxy", "none"])
    assert verdict.status == "downgrade"
    assert "GIN type 0" in verdict.reason


def group(rank: int, size: int, ranks_per_node: int) -> ExpertGroup:
    return ExpertGroup(
        process_group=dist.group.WORLD if dist.is_initialized() else None,
        rank=rank,
        size=size,
        ranks_per_node=ranks_per_node,
        monitor=ExchangeMonitor(),
    )


def test_a_lone_process_reports_without_torch_distributed(tmp_path: Path) -> None:
    record = collect(
        LocalDispatcher(),
        MoeConfig(),
        group(0, 1, 1),
        before=QUIET,
        after=QUIET,
        sent_bytes=0,
        sent_off_node_bytes=0,
        root=tmp_path,
    )
    assert (record["requested"], record["observed"], record["status"]) == ("local", "local", "ok")
    assert json.loads(json.dumps(record)) == record


class Wire(LocalDispatcher):
    """Says that it is all_to_all."""

    def transport_report(self) -> TransportReport:
        return report("all_to_all")


def collect_in_rank(rank: int, world_size: int, counted: list[int]) -> dict[str, Any]:
    """Two ranks a node; both see the devices of their node."""
    return collect(
        Wire(),
        replace(MoeConfig(), dispatcher="all_to_all", network="rdma"),
        group(rank, world_size, 2),
        before=sent(5),
        after=sent(5 + counted[rank]),
        sent_bytes=100 * MB,
        sent_off_node_bytes=60 * MB,
    )


def test_the_bytes_of_a_nodes_ranks_add_up_and_its_counters_do_not() -> None:
    enough = run_ranks(4, collect_in_rank, [120 * MB, 121 * MB, 120 * MB, 120 * MB])
    assert all(record == enough[0] for record in enough)
    assert enough[0]["status"] == "ok"
    assert (enough[0]["ranks"], enough[0]["nodes"]) == (4, 2)
    assert enough[0]["sent_bytes"] == 400 * MB
    assert enough[0]["predicted_off_node_bytes"] == 240 * MB
    assert enough[0]["counted_rdma_bytes"] == 241 * MB
    assert enough[0]["counters"] == {"rdma_write_bytes": 241 * MB}


def test_every_rank_learns_of_a_downgrade_on_one_node() -> None:
    records = run_ranks(4, collect_in_rank, [120 * MB, 120 * MB, 50 * MB, 50 * MB])
    assert [record["status"] for record in records] == ["downgrade"] * 4
    assert "node 1 was to send 120.0 MB to others, its RDMA devices sent 50.0 MB" in records[0]["reason"]
