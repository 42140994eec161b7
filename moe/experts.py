"""The experts function of our models: route through the attached dispatcher, compute by grouped matrix multiplication.

It follows transformers' fused-experts interface (`transformers.integrations.moe`): any class decorated there runs on
it.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe.dispatch.base import DispatchedTokens, TokenDispatcher
from moe.dispatch.monitor import ExchangeMonitor

EXPERTS_IMPLEMENTATION = "moerl"
_ROUTE_ATTRIBUTE, _RECOMPUTE_ATTRIBUTE = "moerl_route", "moerl_recompute"
_ROW_ALIGNMENT_BYTES = 16
"""`grouped_mm` refuses operands whose row stride is not a multiple of this."""


@dataclass(frozen=True)
class _Route:
    """How the tokens of one experts module travel, and the number of its layer."""

    dispatcher: TokenDispatcher
    monitor: ExchangeMonitor
    layer: int


def experts_forward(experts: Any, hidden_TH: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Output of a mixture of experts, (T, hidden), through the dispatcher that `set_dispatcher` gave to `experts`.

    The module's fused parameters hold this rank's experts, its `num_experts` counts those of the whole group.
    """
    route: _Route = getattr(experts, _ROUTE_ATTRIBUTE)
    route.monitor.layer = route.layer
    dispatched = route.dispatcher.dispatch(hidden_TH, expert_ids_TK, weights_TK, experts.num_experts)
    if getattr(experts, _RECOMPUTE_ATTRIBUTE, False) and torch.is_grad_enabled():
        rows_SH = checkpoint(_compute_experts, experts, dispatched, use_reentrant=False, preserve_rng_state=False)
    else:
        rows_SH = _compute_experts(experts, dispatched)
    return route.dispatcher.combine(rows_SH, dispatched).to(hidden_TH.dtype)


def expert_modules(model: nn.Module) -> list[Any]:
    """The fused-experts modules of `model`, in layer order: the ones that transformers' decorator has marked."""
    return [module for module in model.modules() if hasattr(module, "is_concatenated") and hasattr(module, "has_gate")]


def set_dispatcher(experts: Any, dispatcher: TokenDispatcher, monitor: ExchangeMonitor, layer: int) -> None:
    """Make `experts`, the `layer`-th experts module of its model, send its tokens through `dispatcher`.

    `monitor` is that of the dispatcher's group.
    """
    setattr(experts, _ROUTE_ATTRIBUTE, _Route(dispatcher, monitor, layer))


def get_dispatcher(experts: Any) -> TokenDispatcher | None:
    """The dispatcher that `experts` sends its tokens through; None before `set_dispatcher`."""
    route: _Route | None = getattr(experts, _ROUTE_ATTRIBUTE, None)
    return None if route is None else route.dispatcher


def repeating(experts: Any) -> AbstractContextManager[None]:
    """Inside it the passes of `experts` are done once more, for the sums of its monitor."""
    route: _Route | None = getattr(experts, _ROUTE_ATTRIBUTE, None)
    return nullcontext() if route is None else route.monitor.repeating()


def set_recompute(experts: Any, recompute: bool) -> None:
    """Whether the backward pass computes the feed-forward of `experts` again instead of keeping its activations.

    The rows that were received are kept: no exchange is repeated.
    """
    setattr(experts, _RECOMPUTE_ATTRIBUTE, recompute)


def _compute_experts(experts: Any, dispatched: DispatchedTokens) -> Tensor:
    """Feed-forward of each row by its expert: (S, hidden)."""
    rows, ends = dispatched.rows_SH, dispatched.ends_E
    hidden = _project(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, ends)
    hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    output = _project(experts, "down_proj", hidden, ends)
    return experts.post_expert_norm(output) if experts.has_post_expert_norm else output


def _project(experts: Any, name: str, rows_SI: Tensor, ends_E: Tensor) -> Tensor:
    weight = getattr(experts, name).to(rows_SI.dtype)
    output = grouped_mm(rows_SI, weight if experts.is_transposed else weight.transpose(1, 2), ends_E)
    if experts.has_bias:
        counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
        bias = getattr(experts, f"{name}_bias").to(rows_SI.dtype)
        output = output + bias.repeat_interleave(counts_E, 0, output_size=len(rows_SI))
    return output


def grouped_mm(rows_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Rows `ends_E[e-1]:ends_E[e]` times the weight of expert e: (S, out), of one dtype.

    torch's fused kernel wherever it takes the operands, else (float64, unaligned widths) a loop over experts. Measured
    on one thread of a CPU with AMX, torch 2.13, 4 to 128 experts of width 64 to 2048 with 1 to 1024 rows each: forward
    and backward of the loop take 1.0 to 2 times as long in float32 with many rows, 2 to 6 times with few, and 1.3 to
    10 times in bfloat16; it never won by more than the noise, so that there is no crossover to choose by.
    """
    if not len(rows_SI):  # a rank that received none; whether CUDA's kernel takes that is not known
        return rows_SI @ weight_EIO[0]
    widths_bytes = [size * rows_SI.element_size() for size in weight_EIO.shape[1:]]
    if rows_SI.dtype != torch.float64 and all(width % _ROW_ALIGNMENT_BYTES == 0 for width in widths_bytes):
        return F.grouped_mm(rows_SI, weight_EIO, offs=ends_E)
    parts = torch.split(rows_SI, torch.diff(ends_E, prepend=ends_E.new_zeros(1)).tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weight_EIO.unbind(), strict=True)])


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_forward)
