"""The transport that carried the tokens against the one that was asked for, with the evidence."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from moe.config import MoeConfig
from moe.dispatch.base import ExpertGroup, TokenDispatcher, TransportReport
from moe.transport.counters import Counters, difference
from moe.transport.gin import gin_of_group
from moe.transport.versions import read_variables, read_versions

RDMA_BACKENDS = ("deepep", "uccl_ep", "nccl_ep")
"""Backends that leave a node by RDMA or not at all."""
COUNTED_SHARE = 0.9
"""Of the bytes predicted for all nodes; when less was counted, they went another way. More is usual: gradients use the
same devices."""
NODE_SHARE = COUNTED_SHARE / 2
"""The same for one node. Backends count a combine at the rank that gets the sums, so a node that sends D to others and
receives R is predicted to send 2 D, and sends D + R."""

Status = Literal["ok", "downgrade", "unverifiable"]


@dataclass(frozen=True)
class Verdict:
    """`downgrade`: the evidence contradicts the request. `unverifiable`: there is no evidence."""

    status: Status
    reason: str


@dataclass(frozen=True, kw_only=True)
class NodeTraffic:
    """What one node was to send to others, and what its devices counted meanwhile."""

    predicted_bytes: int
    counted: Counters


def collect(
    dispatcher: TokenDispatcher,
    moe: MoeConfig,
    group: ExpertGroup,
    *,
    before: Counters,
    after: Counters,
    sent_bytes: int,
    sent_off_node_bytes: int,
    root: Path = Path("/"),
) -> dict[str, Any]:
    """The transport report of all ranks, as JSON values; the same on every rank.

    A collective: every rank of the world calls it, after its exchanges, with what the ExchangeMonitor counted on that
    rank (`sent_bytes`, `sent_off_node_bytes`) between the snapshots `before` and `after` (`read_counters`).

    Keys: `requested`, `observed`, `details` (the dispatcher's own), `status` (ok, downgrade, unverifiable), `reason`
    (one line), `network` (as configured), `ranks`, `nodes`, `sent_bytes`, `predicted_off_node_bytes`,
    `counted_rdma_bytes` and `counted_ethernet_bytes` (None: no counter), `counters`, `gin_type`, `railed_gin_type`
    (absent without NCCL), `versions`, `environment`.
    """
    facts = gin_of_group(group.process_group)
    delta = difference(before, after)
    rows = _gather((sent_bytes, sent_off_node_bytes, delta, facts.get("gin_type")))
    nodes = _nodes(rows, group.ranks_per_node)
    backend = dispatcher.transport_report()
    verdict = judge(backend, moe.network, nodes, [row[3] for row in rows if row[3] is not None])
    return {
        "requested": moe.dispatcher,
        "observed": backend.observed,
        "details": backend.details,
        "status": verdict.status,
        "reason": verdict.reason,
        "network": moe.network,
        "ranks": len(rows),
        "nodes": len(nodes),
        "sent_bytes": sum(row[0] for row in rows),
        "predicted_off_node_bytes": sum(node.predicted_bytes for node in nodes),
        "counted_rdma_bytes": _sum([node.counted.rdma_sent_bytes for node in nodes]),
        "counted_ethernet_bytes": _sum([node.counted.ethernet_sent_bytes for node in nodes]),
        "counters": _totals(nodes),
        **facts,
        "versions": read_versions(root),
        "environment": read_variables(),
    }


def judge(
    backend: TransportReport, network: str, nodes: Sequence[NodeTraffic], gin_types: Sequence[str] = ()
) -> Verdict:
    """Compare what was observed with what was requested.

    `network` "any": only the backend counts. "auto": evidence against RDMA is a downgrade where the backend needs RDMA
    or a node has such a device. "rdma": bytes that are not proven to have gone by RDMA are a downgrade.
    """
    if backend.observed != backend.requested:
        return Verdict("downgrade", f"{backend.requested} was requested, {backend.observed} carried the tokens")
    if not any(node.predicted_bytes for node in nodes):
        return Verdict("ok", "no token left its node")
    if network == "any":
        return Verdict("ok", "any network may carry the tokens (moe.network)")
    needs_rdma = network == "rdma" or backend.requested in RDMA_BACKENDS
    if not needs_rdma and not any(node.counted.rdma_devices for node in nodes):
        return Verdict("ok", "no node has an RDMA device, and moe.network does not require one")
    if backend.details.get("wire") == "gin" and "none" in gin_types:
        return Verdict("downgrade", "NCCL reports no GPU-initiated networking (GIN type 0) on the communicator")
    verdict = _judge_counters([(number, node) for number, node in enumerate(nodes) if node.predicted_bytes])
    if network == "rdma" and verdict.status == "unverifiable":
        return Verdict("downgrade", f"{verdict.reason}; moe.network = rdma asks for proof")
    return verdict


def _judge_counters(nodes: Sequence[tuple[int, NodeTraffic]]) -> Verdict:
    """Each node first, so that one that fell back is named also among many; then all of them together."""
    verdicts = [verdict for number, node in nodes if (verdict := _judge_node(number, node)) is not None]
    for status in ("downgrade", "unverifiable"):
        for verdict in verdicts:
            if verdict.status == status:
                return verdict
    predicted = sum(node.predicted_bytes for _, node in nodes)
    counted = sum(node.counted.rdma_sent_bytes or 0 for _, node in nodes)
    sent = f"{_size(predicted)} were to go to other nodes, the RDMA devices sent {_size(counted)}"
    return Verdict("ok" if counted >= COUNTED_SHARE * predicted else "downgrade", sent)


def _judge_node(number: int, node: NodeTraffic) -> Verdict | None:
    """What is wrong with one node's counters; None: nothing."""
    counted = node.counted.rdma_sent_bytes
    if not node.counted.rdma_devices:
        return Verdict("unverifiable", f"node {number} shows no device in /sys/class/infiniband: mount the host's /sys")
    if counted is None:
        return Verdict("unverifiable", f"the RDMA devices of node {number} have no readable byte counters")
    if counted >= NODE_SHARE * node.predicted_bytes:
        return None
    share = f"node {number} was to send {_size(node.predicted_bytes)} to others, its RDMA devices sent {_size(counted)}"
    ethernet = node.counted.ethernet_sent_bytes
    other = "" if ethernet is None else f", its Ethernet interfaces {_size(ethernet)}"
    return Verdict("downgrade", f"{share}{other}: check NCCL_NET_PLUGIN and the EFA plug-in")


def _nodes(rows: Sequence[tuple[int, int, Counters, str | None]], ranks_per_node: int) -> list[NodeTraffic]:
    """By node: its ranks share its devices, so their bytes add up and their counters are views of the same."""
    nodes = []
    for first in range(0, len(rows), ranks_per_node):
        ranks = rows[first : first + ranks_per_node]
        widest = max((row[2] for row in ranks), key=lambda counted: counted.rdma_sent_bytes or 0)
        nodes.append(NodeTraffic(predicted_bytes=sum(row[1] for row in ranks), counted=widest))
    return nodes


def _gather(row: tuple[int, int, Counters, str | None]) -> list[tuple[int, int, Counters, str | None]]:
    if not dist.is_initialized():
        return [row]
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    return rows


def _totals(nodes: Sequence[NodeTraffic]) -> dict[str, int]:
    names = sorted({name for node in nodes for name in node.counted.rdma})
    return {name: sum(node.counted.rdma.get(name, 0) for node in nodes) for name in names}


def _sum(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
