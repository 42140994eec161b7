"""Our own exchange between ranks, by torch.distributed's uneven `all_to_all_single`; gloo and NCCL.

On NCCL it has not yet been run on hardware.

Let P map the tokens of all ranks to the rows that the experts compute. `dispatch` is P and its backward P^T; `combine`
is P^T times the routes' weights, and its backward the weights times P. A rank's own tokens never touch the exchange.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe.dispatch.base import DispatchedTokens, ExpertGroup, ExpertShape, TransportReport
from moe.dispatch.exchange import Peers, chunks
from moe.dispatch.monitor import ExchangeMonitor
from moe.dispatch.plan import RoutePlan, plan_routes


class AllToAllDispatcher:
    """Sends every route, or with `merge` every (token, rank) pair, as one row to the rank that owns the expert.

    The experts' outputs are multiplied by the routing weights where they are computed.
    """

    def __init__(self, group: ExpertGroup, *, merge: bool = False, wire_dtype: torch.dtype | None = None) -> None:
        home = group.rank // group.ranks_per_node
        off_node = [peer // group.ranks_per_node != home for peer in range(group.size)]
        self._group, self._merge = group, merge
        self._peers = Peers(group.process_group, group.rank, off_node, wire_dtype)

    def validate(self, shape: ExpertShape) -> None:
        """Raise ValueError when the experts do not spread evenly, or a token needs more than there are."""
        require_even_experts(shape)

    def dispatch(
        self, hidden_TH: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, num_experts: int
    ) -> DispatchedTokens:
        """See TokenDispatcher. Raises ExchangeFailed (or RuntimeError without a diagnosis) when a peer is gone."""
        monitor = self._group.monitor
        layer = monitor.layer
        with monitor.exchange("dispatch", layer) as record:
            plan = plan_routes(
                self._peers, expert_ids_TK, weights_TK, num_experts, merge=self._merge, layer=layer, record=record
            )
            record.received_rows += len(plan.source_S)
        rows_SH, weights_S = _dispatch(hidden_TH, weights_TK, plan, monitor)
        return DispatchedTokens(rows_SH, plan.ends_E, (plan, weights_S))

    def combine(self, rows_SH: Tensor, dispatched: DispatchedTokens) -> Tensor:
        """See TokenDispatcher. Sums are in a fixed order: bit-identical from run to run."""
        plan, weights_S = dispatched.handle
        return _combine(rows_SH, weights_S, plan, self._group.monitor)

    def transport_report(self) -> TransportReport:
        """torch.distributed's backend carries the rows; what lies below it is not seen from here."""
        return TransportReport(
            requested="all_to_all",
            observed="all_to_all",
            details={
                "process_group_backend": backend_name(self._group),
                "ranks": self._group.size,
                "deduplicate": "rank" if self._merge else "none",
            },
        )

    def close(self) -> None:
        """Give the buffers back."""
        self._peers.staging.clear()


def require_even_experts(shape: ExpertShape) -> None:
    """Raise ValueError when a token needs more experts than there are, or the ranks cannot hold equally many."""
    if shape.top_k > shape.num_experts:
        raise ValueError(
            f"num_experts_per_token {shape.top_k} exceeds num_experts {shape.num_experts}: lower it or add experts"
        )
    if shape.num_experts % shape.ep_size:
        raise ValueError(
            f"{shape.num_experts} experts do not spread evenly over {shape.ep_size} expert-parallel ranks: "
            "set moe.expert_parallel_size to a divisor"
        )


def backend_name(group: ExpertGroup) -> str:
    """ "gloo", "nccl", ...; "none" for a lone process."""
    return "none" if group.process_group is None else str(group.process_group.name()).lower()


class _Dispatch(torch.autograd.Function):
    """Rows and weights of the routes computed here, from the tokens and weights of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weights_TK: Tensor, plan: RoutePlan, monitor: ExchangeMonitor
    ) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.monitor = plan, monitor
        units = plan.units
        with monitor.exchange("dispatch", plan.layer) as record:
            table_RH = units.spread(hidden_TH, units.peers.staging.rows("table", units.table_rows, hidden_TH), record)
            rows_SH = units.peers.staging.result("rows", len(plan.source_S), hidden_TH)
            torch.index_select(table_RH, 0, plan.source_S, out=rows_SH)
            return rows_SH, plan.weights_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan: RoutePlan = ctx.plan
        with ctx.monitor.exchange("dispatch backward", plan.layer) as record:
            grad_TH = plan.add_up(grads[0], None, record)
            return grad_TH, plan.return_weights(grads[1], record), None, None


class _Combine(torch.autograd.Function):
    """Tokens' sums of weight times row over the routes computed on all ranks."""

    @staticmethod
    def forward(ctx: Any, rows_SH: Tensor, weights_S: Tensor, plan: RoutePlan, monitor: ExchangeMonitor) -> Tensor:
        ctx.plan, ctx.monitor = plan, monitor
        ctx.save_for_backward(rows_SH, weights_S)
        with monitor.exchange("combine", plan.layer) as record:
            return plan.add_up(rows_SH, weights_S, record)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan: RoutePlan = ctx.plan
        rows_SH, weights_S = ctx.saved_tensors
        with ctx.monitor.exchange("combine backward", plan.layer) as record:
            units, staging = plan.units, plan.units.peers.staging
            table_RH = units.spread(grads[0], staging.rows("table", units.table_rows, grads[0]), record)
            grad_rows_SH = staging.result("rows", len(rows_SH), rows_SH)
            grad_weights_S = _weigh(table_RH, plan.source_S, rows_SH, weights_S.to(rows_SH.dtype), grad_rows_SH)
            return grad_rows_SH, grad_weights_S.to(weights_S.dtype), None, None


def _weigh(table_RH: Tensor, source_S: Tensor, rows_SH: Tensor, weights_S: Tensor, grad_rows_SH: Tensor) -> Tensor:
    """Fill the gradients by the rows, weight times the token's gradient; return those by the weights, (S,): the
    products of row and token's gradient."""
    grad_weights_S = torch.empty_like(weights_S)
    for part in chunks(rows_SH):
        grads_CH = grad_rows_SH[part]
        torch.index_select(table_RH, 0, source_S[part], out=grads_CH)
        torch.sum(grads_CH * rows_SH[part], 1, out=grad_weights_S[part])
        grads_CH.mul_(weights_S[part].unsqueeze(1))
    return grad_weights_S


_dispatch: Callable[..., tuple[Tensor, Tensor]] = _Dispatch.apply
_combine: Callable[..., Tensor] = _Combine.apply
