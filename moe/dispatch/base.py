"""The seam between a model's router and its experts: how tokens reach the experts that compute them."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe.dispatch.monitor import ExchangeMonitor


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """What a backend's limits depend on: one layer's experts, over the whole expert-parallel group."""

    num_experts: int
    top_k: int
    hidden_size: int
    dtype: torch.dtype
    """Of the hidden states on the wire."""
    ep_size: int = 1
    ranks_per_node: int = 1
    tokens_per_rank: int = 0
    """Most tokens that a rank dispatches at once; 0: unknown."""


@dataclass(frozen=True, kw_only=True)
class ExpertGroup:
    """The ranks that share one replica of the experts; rank r holds experts r * E/size to (r+1) * E/size - 1.

    Consecutive ranks of the group are on one node, `ranks_per_node` at a time.
    """

    process_group: dist.ProcessGroup | None = None
    """None: this process alone, without torch.distributed."""
    rank: int = 0
    size: int = 1
    ranks_per_node: int = 1
    monitor: ExchangeMonitor

    @property
    def num_nodes(self) -> int:
        return -(-self.size // self.ranks_per_node)


@dataclass(frozen=True)
class DispatchedTokens:
    """Rows to be computed on this rank, grouped by local expert in ascending order.

    `rows_SH` is (S, hidden), `ends_E` is int32 (local experts,): expert e owns rows `ends_E[e-1]:ends_E[e]`. `handle`
    is the backend's own record of the route back; only its `combine` reads it.
    """

    rows_SH: Tensor
    ends_E: Tensor
    handle: Any


@dataclass(frozen=True)
class TransportReport:
    """The transport that was asked for, the one that carried the tokens, and facts in support of that."""

    requested: str
    observed: str
    details: dict[str, str | int | float]


class TokenDispatcher(Protocol):
    """Sends tokens to their experts and brings the weighted results back.

    Both directions are differentiable: the backward of `dispatch` is a combine, and the reverse. An expert id of -1
    masks that route: it contributes nothing and receives no gradient. A batch of zero tokens is legal, and so is a rank
    that receives none: it takes part in the exchanges all the same, forward and backward. All ranks of the group call
    `dispatch` and `combine` equally often, in the same order.
    """

    def validate(self, shape: ExpertShape) -> None:
        """Raise ValueError naming the limit of the backend that `shape` breaks; needs no accelerator."""

    def dispatch(
        self, hidden_TH: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, num_experts: int
    ) -> DispatchedTokens:
        """Route (T, hidden) tokens by int64 (T, top_k) global expert ids and their (T, top_k) weights.

        `num_experts` counts the experts of the whole group.
        """

    def combine(self, rows_SH: Tensor, dispatched: DispatchedTokens) -> Tensor:
        """Sum every token's expert outputs times their weights: (T, hidden), in the order given to `dispatch`."""

    def transport_report(self) -> TransportReport:
        """What was requested against what was observed."""

    def close(self) -> None:
        """Release buffers and process groups; the dispatcher is not used afterwards."""
