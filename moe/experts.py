"""The experts function of our models: route through the attached dispatcher, compute by grouped matrix multiplication.

It follows transformers' fused-experts interface (`transformers.integrations.moe`): any class decorated there runs on
it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe.dispatch.base import DispatchedTokens, TokenDispatcher

EXPERTS_IMPLEMENTATION = "moerl"
_DISPATCHER_ATTRIBUTE = "moerl_dispatcher"
_ROW_ALIGNMENT_BYTES = 16
"""`grouped_mm` refuses operands whose row stride is not a multiple of this."""


def experts_forward(experts: Any, hidden_TH: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Output of a mixture of experts, (T, hidden), through the dispatcher that `set_dispatcher` gave to `experts`."""
    dispatcher: TokenDispatcher = getattr(experts, _DISPATCHER_ATTRIBUTE)
    dispatched = dispatcher.dispatch(hidden_TH, expert_ids_TK, weights_TK, experts.num_experts)
    return dispatcher.combine(_compute_experts(experts, dispatched), dispatched).to(hidden_TH.dtype)


def expert_modules(model: nn.Module) -> list[Any]:
    """The fused-experts modules of `model`, in layer order: the ones that transformers' decorator has marked."""
    return [module for module in model.modules() if hasattr(module, "is_concatenated") and hasattr(module, "has_gate")]


def set_dispatcher(experts: Any, dispatcher: TokenDispatcher) -> None:
    """Make `experts` send its tokens through `dispatcher`."""
    setattr(experts, _DISPATCHER_ATTRIBUTE, dispatcher)


def get_dispatcher(experts: Any) -> TokenDispatcher | None:
    """The dispatcher that `experts` sends its tokens through; None before `set_dispatcher`."""
    return getattr(experts, _DISPATCHER_ATTRIBUTE, None)


def _compute_experts(experts: Any, dispatched: DispatchedTokens) -> Tensor:
    """Feed-forward of each row by its expert: (S, hidden)."""
    rows, ends = dispatched.rows_SH, dispatched.ends_E
    hidden = _project(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, ends)
    hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    output = _project(experts, "down_proj", hidden, ends)
    return experts.post_expert_norm(output) if experts.has_post_expert_norm else output


def _project(experts: Any, name: str, rows_SI: Tensor, ends_E: Tensor) -> Tensor:
    weight = getattr(experts, name)
    output = grouped_mm(rows_SI, weight if experts.is_transposed else weight.transpose(1, 2), ends_E)
    if experts.has_bias:
        counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
        output = output + getattr(experts, f"{name}_bias").repeat_interleave(counts_E, 0, output_size=len(rows_SI))
    return output


def grouped_mm(rows_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Rows `ends_E[e-1]:ends_E[e]` times the weight of expert e: (S, out).

    torch's fused kernel where it takes the operands; a loop over experts for float64 and for unaligned widths.
    """
    widths_bytes = [size * rows_SI.element_size() for size in weight_EIO.shape[1:]]
    if rows_SI.dtype != torch.float64 and all(width % _ROW_ALIGNMENT_BYTES == 0 for width in widths_bytes):
        return F.grouped_mm(rows_SI, weight_EIO, offs=ends_E)
    parts = rows_SI.tensor_split(ends_E[:-1].cpu().long())
    return torch.cat([part @ weight for part, weight in zip(parts, weight_EIO.unbind(), strict=True)])


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_forward)
