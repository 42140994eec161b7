"""Node-aware exchange: a token that goes to several experts of one node crosses the network once.

It goes to the *gateway*, the rank of that node with the sender's own place among the ranks of its node, which forwards
it inside the node, once to each rank that needs it (DeepEP's normal mode takes the same way). The results are summed on
every step of the way back. On NCCL it has not yet been run on hardware.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.dispatch.all_to_all import AllToAllDispatcher, backend_name, require_even_experts
from moe.dispatch.base import DispatchedTokens, ExpertGroup, ExpertShape, TransportReport
from moe.dispatch.exchange import Peers
from moe.dispatch.monitor import ExchangeMonitor, LayerExchange
from moe.dispatch.plan import UnitPlan


class NodeDeduplicatedDispatcher:
    """Between nodes by gateways, inside a node by `AllToAllDispatcher` with `merge`."""

    def __init__(self, group: ExpertGroup, *, wire_dtype: torch.dtype | None, timeout_s: float) -> None:
        """Creates process groups, so that all ranks of the world must call it together.

        Raises ValueError when the nodes of the group have not equally many ranks.
        """
        per_node = group.ranks_per_node
        if group.process_group is None or group.size % per_node:
            raise ValueError(
                f"moe.deduplicate = node: {group.size} expert-parallel ranks do not fill nodes of {per_node}; "
                "set moe.expert_parallel_size to a multiple, or moe.deduplicate to rank"
            )
        node, place = divmod(group.rank, per_node)
        inside, between = _node_groups(group, timeout_s)
        self._group, self._own_groups = group, (inside, between)
        off_node = [other != node for other in range(group.size // per_node)]
        self._gateways = Peers(between, node, off_node, wire_dtype)
        self._inside = AllToAllDispatcher(
            replace(group, process_group=inside, rank=place, size=per_node), merge=True, wire_dtype=wire_dtype
        )

    def validate(self, shape: ExpertShape) -> None:
        """Raise ValueError when the experts do not spread evenly, or a token needs more than there are."""
        require_even_experts(shape)

    def dispatch(
        self, hidden_TH: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, num_experts: int
    ) -> DispatchedTokens:
        """See TokenDispatcher. Raises ExchangeFailed (or RuntimeError without a diagnosis) when a peer is gone."""
        monitor, per_node = self._group.monitor, num_experts // self._gateways.size
        layer = monitor.layer
        with monitor.exchange("dispatch", layer) as record:
            plan = _plan_gateways(self._gateways, expert_ids_TK, weights_TK, per_node, layer, record)
        table_RH, weights_RK = _to_gateways(hidden_TH, weights_TK, plan, monitor)
        inside = self._inside.dispatch(table_RH, plan.ids_RK, weights_RK, per_node)
        return DispatchedTokens(inside.rows_SH, inside.ends_E, (plan, inside))

    def combine(self, rows_SH: Tensor, dispatched: DispatchedTokens) -> Tensor:
        """See TokenDispatcher. Sums are in a fixed order: bit-identical from run to run."""
        plan, inside = dispatched.handle
        return _from_gateways(self._inside.combine(rows_SH, inside), plan, self._group.monitor)

    def transport_report(self) -> TransportReport:
        """torch.distributed's backend carries the rows; what lies below it is not seen from here."""
        return TransportReport(
            requested="all_to_all",
            observed="all_to_all",
            details={
                "process_group_backend": backend_name(self._group),
                "ranks": self._group.size,
                "nodes": self._group.num_nodes,
                "deduplicate": "node",
            },
        )

    def close(self) -> None:
        """Give the buffers and the two process groups back."""
        self._gateways.staging.clear()
        self._inside.close()
        for process_group in self._own_groups:
            dist.destroy_process_group(process_group)


def _node_groups(group: ExpertGroup, timeout_s: float) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The ranks of this node, and those with this one's place on each node of the expert-parallel group.

    All ranks of the world create all groups, in one order: the variant that only members call gives a group that is
    created again after its destruction the name, and the stale addresses, of the first one. Expert-parallel
    groups are consecutive ranks (see ExpertGroup), so that every rank knows them all.
    """
    per_node, own = group.ranks_per_node, dist.get_rank()
    backend, timeout = dist.get_backend(group.process_group), timedelta(seconds=timeout_s)
    mine: list[dist.ProcessGroup] = []
    for first in range(0, dist.get_world_size(), group.size):
        ranks = range(first, first + group.size)
        nodes = [ranks[start : start + per_node] for start in range(0, group.size, per_node)]
        for members in (*nodes, *(ranks[place::per_node] for place in range(per_node))):
            created = dist.new_group(list(members), timeout=timeout, backend=backend)
            if own in members:
                mine.append(created)
    inside, between = mine
    return inside, between


@dataclass(frozen=True)
class _GatewayPlan:
    """The table of `units` holds this rank's tokens, then those it is the gateway of: R rows."""

    units: UnitPlan
    layer: int
    ids_RK: Tensor
    """Experts of each row within this node; -1: masked, or on another node."""
    weights_RK: Tensor


def _plan_gateways(
    gateways: Peers, ids_TK: Tensor, weights_TK: Tensor, experts_per_node: int, layer: int, record: LayerExchange
) -> _GatewayPlan:
    nodes, node = gateways.size, gateways.rank
    node_TK = torch.where(ids_TK < 0, nodes, torch.div(ids_TK, experts_per_node, rounding_mode="floor"))
    visits_TN = ids_TK.new_zeros(len(ids_TK), nodes + 1, dtype=torch.bool).scatter_(1, node_TK, True)[:, :nodes]
    visits_TN[:, node] = False
    node_U, token_U = visits_TN.T.nonzero(as_tuple=True)
    counts_PC = visits_TN.sum(0).unsqueeze(1)
    received_PC = gateways.swap_counts(counts_PC, record)
    units = UnitPlan.of(gateways, len(ids_TK), token_U, counts_PC.squeeze(1).tolist(), received_PC.squeeze(1).tolist())
    sent_UK = (ids_TK % experts_per_node)[token_U].masked_fill(node_TK[token_U] != node_U.unsqueeze(1), -1)
    own_TK = (ids_TK % experts_per_node).masked_fill(node_TK != node, -1)
    arrived_UK = _swap(units, sent_UK.int(), units.receive, units.send, record).long()
    weights_UK = _swap(units, weights_TK.detach()[token_U], units.receive, units.send, record)
    return _GatewayPlan(units, layer, torch.cat([own_TK, arrived_UK]), torch.cat([weights_TK.detach(), weights_UK]))


def _swap(
    units: UnitPlan, sent_UK: Tensor, receive: Sequence[int], send: Sequence[int], record: LayerExchange
) -> Tensor:
    received_UK = sent_UK.new_empty(sum(receive), sent_UK.shape[1])
    units.peers.swap(received_UK, sent_UK, receive, send, record)
    return received_UK


class _ToGateways(torch.autograd.Function):
    """The rows that this rank forwards inside its node, and the weights of their routes."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weights_TK: Tensor, plan: _GatewayPlan, monitor: ExchangeMonitor
    ) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.monitor = plan, monitor
        with monitor.exchange("dispatch", plan.layer) as record:
            return _fill_table(plan.units, hidden_TH, record), plan.weights_RK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        units: UnitPlan = ctx.plan.units
        with ctx.monitor.exchange("dispatch backward", ctx.plan.layer) as record:
            grad_TH = _empty_table(units, grads[0], record)
            back_UK = _swap(units, grads[1][units.num_tokens :], units.send, units.receive, record)
            grad_TK = grads[1][: units.num_tokens].index_add(0, units.token_U, back_UK)
            return grad_TH, grad_TK, None, None


class _FromGateways(torch.autograd.Function):
    """The transpose: results of the rows, back to the ranks of their tokens, summed over nodes."""

    @staticmethod
    def forward(ctx: Any, table_RH: Tensor, plan: _GatewayPlan, monitor: ExchangeMonitor) -> Tensor:
        ctx.plan, ctx.monitor = plan, monitor
        with monitor.exchange("combine", plan.layer) as record:
            return _empty_table(plan.units, table_RH, record)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.monitor.exchange("combine backward", ctx.plan.layer) as record:
            return _fill_table(ctx.plan.units, grads[0], record), None, None


def _fill_table(units: UnitPlan, hidden_TH: Tensor, record: LayerExchange) -> Tensor:
    return units.spread(hidden_TH, hidden_TH.new_empty(units.table_rows, hidden_TH.shape[1]), record)


def _empty_table(units: UnitPlan, table_RH: Tensor, record: LayerExchange) -> Tensor:
    own_TH, arrived_UH = table_RH[: units.num_tokens], table_RH[units.num_tokens :]
    total_TH = units.peers.staging.result("tokens", units.num_tokens, table_RH)
    return units.collect(arrived_UH, total_TH.copy_(own_TH), record)


_to_gateways: Callable[..., tuple[Tensor, Tensor]] = _ToGateways.apply
_from_gateways: Callable[..., Tensor] = _FromGateways.apply
