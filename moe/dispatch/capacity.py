"""A limit on the routes that an expert takes from one rank's pass, for any dispatcher."""

import math

import torch
from torch import Tensor

from moe.dispatch.base import DispatchedTokens, ExpertShape, TokenDispatcher, TransportReport
from moe.dispatch.monitor import ExchangeMonitor


class CapacityLimit:
    """Masks the routes beyond an expert's capacity before another dispatcher sees them, and counts them as dropped.

    Capacity is ceil(factor * tokens * top_k / experts) (Switch Transformer, section 2.2), counted on each rank by
    itself. Of an expert's routes the first ones are kept, in the order of tokens.
    """

    def __init__(self, dispatcher: TokenDispatcher, factor: float, monitor: ExchangeMonitor) -> None:
        self._dispatcher, self._factor, self._monitor = dispatcher, factor, monitor

    def validate(self, shape: ExpertShape) -> None:
        """The limits of the dispatcher behind it."""
        self._dispatcher.validate(shape)

    def dispatch(
        self, hidden_TH: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, num_experts: int
    ) -> DispatchedTokens:
        """See TokenDispatcher."""
        capacity = math.ceil(self._factor * expert_ids_TK.numel() / num_experts)
        over_TK = over_capacity(expert_ids_TK, num_experts, capacity)
        if not self._monitor.is_repeated:
            self._monitor.record(self._monitor.layer).dropped_routes += int(over_TK.sum())
        return self._dispatcher.dispatch(hidden_TH, expert_ids_TK.masked_fill(over_TK, -1), weights_TK, num_experts)

    def combine(self, rows_SH: Tensor, dispatched: DispatchedTokens) -> Tensor:
        """See TokenDispatcher."""
        return self._dispatcher.combine(rows_SH, dispatched)

    def transport_report(self) -> TransportReport:
        """That of the dispatcher behind it."""
        return self._dispatcher.transport_report()

    def close(self) -> None:
        """Close the dispatcher behind it."""
        self._dispatcher.close()


def over_capacity(ids_TK: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Whether a route comes after the first `capacity` ones of its expert, in the order of tokens: bool (T, top_k)."""
    sorted_R, order_R = torch.sort(ids_TK.reshape(-1), stable=True)
    begin_E = torch.searchsorted(sorted_R, torch.arange(num_experts, device=ids_TK.device))
    rank_R = torch.arange(len(sorted_R), device=ids_TK.device) - begin_E[sorted_R.clamp(min=0)]
    over_R = torch.empty_like(sorted_R, dtype=torch.bool)
    over_R[order_R] = (sorted_R >= 0) & (rank_R >= capacity)
    return over_R.view_as(ids_TK)
