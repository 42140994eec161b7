"""Received tokens, which may go to several local experts each, as rows grouped by expert, and back.

Fused libraries deliver a token once a rank together with its routes there. The experts want one row a route.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LocalRoutes:
    """Order of S routes of N received tokens by local expert; ties stay in token order, so it is reproducible."""

    ends_E: Tensor
    """int32 (local experts,): expert e owns rows `ends_E[e-1]:ends_E[e]`."""
    route_S: Tensor
    """int64: the route of each row, token * top_k + slot."""
    token_S: Tensor
    """int64: the received token of each row."""
    position_NK: Tensor
    """int64: the row of each route; 0 where `valid_NK` is false."""
    valid_NK: Tensor
    """bool: the route goes to an expert of this rank."""


def local_routes(ids_NK: Tensor, rows_per_expert: Sequence[int]) -> LocalRoutes:
    """Sort routes given by local expert ids, int64 (N, top_k), -1 for a route elsewhere.

    `rows_per_expert` are the counts that the library gave to the host: with them nothing here waits for the device.
    """
    num_routes, top_k = sum(rows_per_expert), ids_NK.shape[1]
    valid_NK = ids_NK >= 0
    keys = ids_NK.masked_fill(~valid_NK, len(rows_per_expert)).reshape(-1)
    route_S = torch.argsort(keys, stable=True)[:num_routes]
    position = torch.zeros_like(keys)
    position[route_S] = torch.arange(num_routes, device=ids_NK.device)
    ends = torch.tensor(rows_per_expert, dtype=torch.int64).cumsum(0).to(torch.int32)
    token_S = torch.div(route_S, top_k, rounding_mode="floor")
    return LocalRoutes(ends.to(ids_NK.device), route_S, token_S, position.view_as(ids_NK), valid_NK)


def rows_by_expert(received_NH: Tensor, routes: LocalRoutes) -> Tensor:
    """One row a route, (S, hidden); its gradient sums a token's routes in a fixed order, in float32 or wider."""
    return _rows_by_expert(received_NH, routes)


def weighted_sum(rows_SH: Tensor, weights_NK: Tensor, routes: LocalRoutes) -> Tensor:
    """Sum of each received token's rows times their weights, (N, hidden), in the dtype of `rows_SH`.

    It multiplies and adds in float32 or wider, slot by slot: nothing of size N x top_k x hidden is held.
    """
    return _weighted_sum(rows_SH, weights_NK, routes)


class _RowsByExpert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received_NH: Tensor, routes: LocalRoutes) -> Tensor:
        ctx.routes = routes
        return received_NH.index_select(0, routes.token_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grads[0], None, ctx.routes), None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_SH: Tensor, weights_NK: Tensor, routes: LocalRoutes) -> Tensor:
        ctx.save_for_backward(rows_SH, weights_NK)
        ctx.routes = routes
        return _sum(rows_SH, weights_NK, routes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_SH, weights_NK = ctx.saved_tensors
        routes: LocalRoutes = ctx.routes
        wide = _accumulator(rows_SH.dtype)
        weight_S = weights_NK.reshape(-1)[routes.route_S].to(wide)
        grad_SH = grads[0].index_select(0, routes.token_S).to(wide)
        grad_weights = torch.zeros(weights_NK.numel(), dtype=weights_NK.dtype, device=rows_SH.device)
        grad_weights[routes.route_S] = (grad_SH * rows_SH.to(wide)).sum(1).to(weights_NK.dtype)
        return (grad_SH * weight_S.unsqueeze(1)).to(rows_SH.dtype), grad_weights.view_as(weights_NK), None


def _sum(rows_SH: Tensor, weights_NK: Tensor | None, routes: LocalRoutes) -> Tensor:
    wide = _accumulator(rows_SH.dtype)
    total_NH = torch.zeros(len(routes.valid_NK), rows_SH.shape[1], dtype=wide, device=rows_SH.device)
    if not len(rows_SH):  # nothing to pick, not even for routes elsewhere
        return total_NH.to(rows_SH.dtype)
    for slot, (position_N, valid_N) in enumerate(
        zip(routes.position_NK.unbind(1), routes.valid_NK.unbind(1), strict=True)
    ):
        picked_NH = rows_SH.index_select(0, position_N).to(wide)
        if weights_NK is not None:
            picked_NH = picked_NH * weights_NK[:, slot, None].to(wide)
        total_NH += picked_NH.masked_fill(~valid_N.unsqueeze(1), 0.0)
    return total_NH.to(rows_SH.dtype)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


_rows_by_expert: Callable[..., Tensor] = _RowsByExpert.apply
_weighted_sum: Callable[..., Tensor] = _WeightedSum.apply
