"""All experts on this device: the reference that every other dispatcher is held to."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe.dispatch.base import DispatchedTokens, ExpertShape, TransportReport


class LocalDispatcher:
    """Sorts the routes by expert and sums the weighted results back, within one device's memory."""

    def validate(self, shape: ExpertShape) -> None:
        """Raise ValueError when a token needs more experts than there are; nothing else is limited."""
        if shape.top_k > shape.num_experts:
            raise ValueError(
                f"num_experts_per_token {shape.top_k} exceeds num_experts {shape.num_experts}: lower it or add experts"
            )

    def dispatch(
        self, hidden_TH: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, num_experts: int
    ) -> DispatchedTokens:
        """Gather one row a route, by expert; a masked route travels with weight 0, so no shape depends on data."""
        top_k = expert_ids_TK.shape[1]
        flat_ids_S = expert_ids_TK.reshape(-1)
        weights_TK = weights_TK.masked_fill(expert_ids_TK < 0, 0.0)
        sorted_ids_S, order_S = torch.sort(flat_ids_S.clamp(min=0), stable=True)
        experts_E = torch.arange(num_experts, device=flat_ids_S.device)
        ends_E = torch.searchsorted(sorted_ids_S, experts_E, right=True, out_int32=True)
        position_S = torch.empty_like(order_S)
        position_S[order_S] = torch.arange(order_S.numel(), device=order_S.device)
        token_S = torch.div(order_S, top_k, rounding_mode="floor")
        rows_SH = _gather(hidden_TH, token_S, position_S, top_k)
        return DispatchedTokens(rows_SH, ends_E, (weights_TK, token_S, order_S, position_S))

    def combine(self, rows_SH: Tensor, dispatched: DispatchedTokens) -> Tensor:
        """Weighted sum of each token's rows, accumulated in a fixed order: bit-identical from run to run."""
        return _weighted_scatter_add(rows_SH, *dispatched.handle)

    def transport_report(self) -> TransportReport:
        """Tokens never leave the device."""
        return TransportReport(requested="local", observed="local", details={})

    def close(self) -> None:
        """Nothing is held."""


class _Gather(torch.autograd.Function):
    """Rows of tokens by route. autograd's own backward scatters with atomics or one row at a time; a token's routes are
    known, so ours gathers them and sums."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, token_S: Tensor, position_S: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(position_S)
        ctx.shape = (hidden_TH.shape[0], top_k, hidden_TH.shape[1])
        return hidden_TH.index_select(0, token_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (position_S,) = ctx.saved_tensors
        return grads[0].index_select(0, position_S).view(ctx.shape).sum(1), None, None, None


class _WeightedScatterAdd(torch.autograd.Function):
    """Token t gets the sum over its routes of weight times row; the backward is the gather, times the weight."""

    @staticmethod
    def forward(
        ctx: Any, rows_SH: Tensor, weights_TK: Tensor, token_S: Tensor, order_S: Tensor, position_S: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows_SH, weights_TK, token_S, order_S, position_S)
        by_token_TKH = rows_SH.index_select(0, position_S).view(*weights_TK.shape, rows_SH.shape[1])
        output_TH = rows_SH.new_empty(len(weights_TK), rows_SH.shape[1])  # not a view: FSDP2 wants none
        torch.bmm(weights_TK.to(rows_SH.dtype).unsqueeze(1), by_token_TKH, out=output_TH.unsqueeze(1))
        return output_TH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_SH, weights_TK, token_S, order_S, position_S = ctx.saved_tensors
        grad_SH = grads[0].index_select(0, token_S)
        grad_weights_TK = (grad_SH * rows_SH).sum(1).index_select(0, position_S).view_as(weights_TK)
        grad_rows_SH = grad_SH * weights_TK.reshape(-1).index_select(0, order_S).to(grad_SH.dtype).unsqueeze(1)
        return grad_rows_SH, grad_weights_TK.to(weights_TK.dtype), None, None, None


_gather: Callable[..., Tensor] = _Gather.apply
_weighted_scatter_add: Callable[..., Tensor] = _WeightedScatterAdd.apply
