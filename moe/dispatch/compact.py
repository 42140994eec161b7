"""What DeepEP and NCCL EP have in common: a token crosses once to each rank that holds one of its experts.

The libraries hand over received tokens (R, hidden) with the local expert ids (R, top_k) that they are for, -1 where an
expert is not here. From that, rows by expert are made and reduced in plain PyTorch: the routing weights travel with the
tokens and multiply the experts' output before the library's unweighted sum, so that autograd has their gradient. The
backward of a dispatch is a combine, of the weights too; that of a combine is a dispatch along the same routes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe.config import MoeConfig
from moe.dispatch import limits
from moe.dispatch.base import DispatchedTokens, ExpertGroup
from moe.dispatch.expert_major import LocalRoutes, local_routes, rows_by_expert, weighted_sum
from moe.dispatch.monitor import LayerExchange

_METADATA_BYTES = 8
"""A token's expert id (int32 on the wire) and weight (float32), per top_k."""


class CompactExchange(Protocol):
    """One forward pass of one layer through a library, and the backward pass of it; it remembers the routes."""

    rows_per_expert: list[int]
    """Rows that each of this rank's experts computes, known after `dispatch`."""

    def dispatch(self, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """bfloat16 tokens, int64 ids, float32 weights: received tokens (R, hidden), local ids (R, top_k), weights."""

    def combine(self, rows_RH: Tensor) -> Tensor:
        """Sum of each token's rows: (T, hidden)."""

    def dispatch_gradient(self, grad_RH: Tensor, grad_weights_RK: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `dispatch`'s hidden states and weights, from those of what it returned."""

    def combine_gradient(self, grad_TH: Tensor) -> Tensor:
        """Gradient of `combine`'s rows: each token's gradient at every rank that it was sent to."""


@dataclass
class Passage:
    """One dispatch and its combine, with the two backward exchanges that may follow."""

    exchange: CompactExchange
    group: ExpertGroup
    layer: int
    num_experts: int
    copies: tuple[int, int] = (0, 0)
    """Tokens that go to other ranks, counted once a rank, and to other nodes, counted once a node."""

    @contextmanager
    def phase(self, name: str) -> Iterator[LayerExchange]:
        with self.group.monitor.exchange(name, self.layer) as record:
            yield record

    def count(self, record: LayerExchange, row_bytes: int) -> None:
        """Bytes of one exchange, a combine's at the rank that gets the sums: over the group, both ends agree."""
        to_ranks, to_nodes = self.copies
        record.sent_bytes += to_ranks * row_bytes
        record.sent_off_node_bytes += to_nodes * row_bytes


@dataclass(frozen=True)
class _Received:
    """What `combine` needs: the passage, the routes of the received tokens and their weights, the tokens' dtype."""

    passage: Passage
    routes: LocalRoutes
    weights_RK: Tensor
    dtype: torch.dtype


def dispatch(passage: Passage, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> DispatchedTokens:
    """Send the tokens (T, hidden), in bfloat16, and group what this rank received by its experts."""
    received_RH, weights_RK, ids_RK = _dispatch(
        hidden_TH.to(torch.bfloat16).contiguous(), weights_TK.float().contiguous(), ids_TK, passage
    )
    routes = local_routes(ids_RK, passage.exchange.rows_per_expert)
    rows_SH = rows_by_expert(received_RH, routes).to(hidden_TH.dtype)
    return DispatchedTokens(rows_SH, routes.ends_E, _Received(passage, routes, weights_RK, hidden_TH.dtype))


def combine(rows_SH: Tensor, dispatched: DispatchedTokens) -> Tensor:
    """Weigh the experts' rows, sum those of one received token, and bring the sums back, in bfloat16: (T, hidden)."""
    received: _Received = dispatched.handle
    sums_RH = weighted_sum(rows_SH, received.weights_RK, received.routes)
    return _combine(sums_RH.to(torch.bfloat16), received.passage).to(received.dtype)


def count_copies(ids_TK: Tensor, num_experts: int, group: ExpertGroup) -> Tensor:
    """How many (token, other rank) and (token, other node) pairs the routes (T, top_k) hold: int64 (2,)."""
    rank_TK = torch.div(ids_TK.long(), num_experts // group.size, rounding_mode="floor").clamp(min=-1)
    node_TK = torch.div(rank_TK, group.ranks_per_node, rounding_mode="floor").clamp(min=-1)
    return torch.stack(
        [
            _distinct_others(rank_TK, group.rank, group.size),
            _distinct_others(node_TK, group.rank // group.ranks_per_node, group.num_nodes),
        ]
    )


def library_details(library: Any) -> dict[str, str]:
    """Version of a library's module and the file that it came from, for a transport report."""
    return {
        "library_version": str(getattr(library, "__version__", "unknown")),
        "library_file": str(getattr(library, "__file__", "unknown")),
    }


def warm_up(group: ExpertGroup, device: torch.device) -> None:
    """Create the communicator of this very group: the libraries take torch's, which is null before a collective."""
    dist.all_reduce(torch.zeros(1, device=device), group=group.process_group)


def require_bfloat16(hidden_TH: Tensor, moe: MoeConfig) -> None:
    """Raise ValueError when the tokens would be rounded for the wire without anybody having asked for it."""
    if hidden_TH.dtype != torch.bfloat16 and moe.exchange_dtype != "bfloat16":
        raise ValueError(limits.dtype_problem(moe.dispatcher, hidden_TH.dtype))


def require_capacity(hidden_TH: Tensor, moe: MoeConfig) -> None:
    """Raise ValueError when a rank has more tokens than the buffers are for; the other ranks run into the timeout."""
    if len(hidden_TH) > moe.max_tokens_per_rank:
        raise ValueError(limits.capacity_problem(moe.dispatcher, len(hidden_TH), moe))


def require_equal(group: ExpertGroup, constants: dict[str, int]) -> None:
    """Raise ValueError, on every rank, naming a constant that is not the same on all ranks of the group."""
    everywhere: list[Any] = [None] * group.size
    dist.all_gather_object(everywhere, constants, group=group.process_group)
    for name in constants:
        values = [other[name] for other in everywhere]
        if len(set(values)) > 1:
            raise ValueError(f"{name} differs between the ranks of an expert-parallel group ({values}): make it equal")


def _distinct_others(place_TK: Tensor, own: int, num_places: int) -> Tensor:
    """Pairs of a token and a place other than `own` that it goes to; place -1 is nowhere."""
    goes_TP = torch.zeros(len(place_TK), num_places + 1, dtype=torch.bool, device=place_TK.device)
    goes_TP.scatter_(1, place_TK + 1, True)
    goes_TP[:, 0] = goes_TP[:, own + 1] = False
    return goes_TP.sum()


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, passage: Passage
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.passage = passage
        copies = count_copies(ids_TK, passage.num_experts, passage.group)
        with passage.phase("dispatch") as record:
            received_RH, ids_RK, weights_RK = passage.exchange.dispatch(hidden_TH, ids_TK, weights_TK)
            to_ranks, to_nodes = copies.tolist()  # after the exchange, which waits for the device anyway
            passage.copies = (to_ranks, to_nodes)
            passage.count(record, hidden_TH.shape[1] * 2 + ids_TK.shape[1] * _METADATA_BYTES)
            record.received_rows += sum(passage.exchange.rows_per_expert)
        ctx.mark_non_differentiable(ids_RK)
        return received_RH, weights_RK, ids_RK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        passage: Passage = ctx.passage
        with passage.phase("dispatch backward") as record:
            grad_RH, grad_weights_RK = grads[0].contiguous(), grads[1].contiguous()
            grad_TH, grad_weights_TK = passage.exchange.dispatch_gradient(grad_RH, grad_weights_RK)
            passage.count(record, grad_TH.shape[1] * 2 + grad_weights_TK.shape[1] * _METADATA_BYTES)
        return grad_TH, grad_weights_TK, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums_RH: Tensor, passage: Passage) -> Tensor:
        ctx.passage = passage
        with passage.phase("combine") as record:
            passage.count(record, sums_RH.shape[1] * 2)
            return passage.exchange.combine(sums_RH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        passage: Passage = ctx.passage
        with passage.phase("combine backward") as record:
            passage.count(record, grads[0].shape[1] * 2)
            return passage.exchange.combine_gradient(grads[0].contiguous()), None


_dispatch: Callable[..., tuple[Tensor, Tensor, Tensor]] = _Dispatch.apply
_combine: Callable[..., Tensor] = _Combine.apply
