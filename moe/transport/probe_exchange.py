"""One exchange of made-up tokens: its inputs, its result and gradients against a dense computation, its phases timed.

The experts are diagonal: expert e multiplies a row by its own vector. That is cheap, so the time measured is the
exchange's, and it tells experts, tokens and weights apart, so that a row which went astray shows.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moe.dispatch.base import DispatchedTokens, ExpertGroup, TokenDispatcher

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2}
"""Largest difference from the dense computation, relative to its largest value: bfloat16 has 8 bits of mantissa, and a
result is rounded on the wire, after the weights and in the sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeShape:
    """What every rank sends through the dispatcher."""

    tokens: int = 4096
    hidden: int = 2048
    top_k: int = 8
    experts: int = 64
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    skew: float = 0.0
    """Exponent of a Zipf law over the experts: 0 is uniform, 1 sends most tokens to few experts."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One rank's inputs, and the vectors of all experts."""

    hidden_TH: Tensor
    expert_ids_TK: Tensor
    weights_TK: Tensor
    scales_EH: Tensor
    grad_TH: Tensor
    """Gradient of the result."""

    @property
    def num_experts(self) -> int:
        return len(self.scales_EH)


def make_exchange(shape: ProbeShape, rank: int, device: torch.device, seed: int = 0) -> Exchange:
    """Inputs of one rank; deterministic in (shape, rank, seed). Experts of a token are distinct.

    Top-k of Gumbel noise plus log-probability draws without replacement in proportion to the probabilities.
    """
    own = torch.Generator().manual_seed(seed * 10_007 + rank + 1)
    common = torch.Generator().manual_seed(seed)
    dtype = DTYPES[shape.dtype]
    log_probability_E = -shape.skew * torch.arange(1, shape.experts + 1).log()
    uniform_TE = torch.rand(shape.tokens, shape.experts, generator=own).clamp_(1e-9, 1 - 1e-7)
    ids_TK = (log_probability_E - (-uniform_TE.log()).log()).topk(shape.top_k, dim=1).indices
    weights_TK = torch.rand(shape.tokens, shape.top_k, generator=own).add_(0.1)
    weights_TK /= weights_TK.sum(1, keepdim=True)
    precise = dtype if dtype == torch.float64 else torch.float32
    return Exchange(
        hidden_TH=torch.randn(shape.tokens, shape.hidden, generator=own).to(device, dtype),
        expert_ids_TK=ids_TK.to(device),
        weights_TK=weights_TK.to(device, precise),
        scales_EH=torch.randn(shape.experts, shape.hidden, generator=common).to(device, precise),
        grad_TH=torch.randn(shape.tokens, shape.hidden, generator=own).to(device, dtype),
    )


Experts = Callable[[Tensor, DispatchedTokens], Tensor]


class PhaseTimer:
    """Seconds and bytes sent of each phase, by name, one entry an exchange. The ranks start a phase together."""

    def __init__(self, device: torch.device, group: ExpertGroup) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.sent_bytes: dict[str, list[int]] = {}
        self.sent_off_node_bytes = 0
        self._device = device
        self._group = group
        self._started_s = 0.0

    def start(self) -> None:
        self._synchronize()
        if self._group.process_group is not None:
            dist.barrier(self._group.process_group)
        self._group.monitor.take()
        self._started_s = time.perf_counter()

    def stop(self, phase: str) -> None:
        self._synchronize()
        self.seconds.setdefault(phase, []).append(time.perf_counter() - self._started_s)
        layers = self._group.monitor.take().values()
        self.sent_bytes.setdefault(phase, []).append(sum(layer.sent_bytes for layer in layers))
        self.sent_off_node_bytes += sum(layer.sent_off_node_bytes for layer in layers)

    @property
    def total_sent_bytes(self) -> int:
        return sum(sum(entries) for entries in self.sent_bytes.values())

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def run_exchange(
    dispatcher: TokenDispatcher, case: Exchange, experts: Experts, parameters: Sequence[Tensor], timer: PhaseTimer
) -> tuple[Tensor, ...]:
    """Forward and backward through `dispatcher`: the (T, hidden) result, and the gradients of the hidden states, of the
    weights and of `parameters`, which `experts(rows_SH, dispatched)` used."""
    hidden_TH = case.hidden_TH.clone().requires_grad_()
    weights_TK = case.weights_TK.clone().requires_grad_()
    timer.start()
    sent = dispatcher.dispatch(hidden_TH, case.expert_ids_TK, weights_TK, case.num_experts)
    timer.stop("dispatch")
    computed_SH = experts(sent.rows_SH, sent)
    timer.start()
    output_TH = dispatcher.combine(computed_SH, sent)
    timer.stop("combine")
    # One backward pass, as in training: the gradients of the rows arrive where one exchange ends and the other begins.
    _on_gradient(computed_SH, lambda _: timer.stop("combine backward"))
    _on_gradient(sent.rows_SH, lambda _: timer.start())
    timer.start()
    grads = torch.autograd.grad(output_TH, [hidden_TH, weights_TK, *parameters], case.grad_TH)
    timer.stop("dispatch backward")
    return output_TH.detach(), *grads


def _on_gradient(tensor: Any, action: Callable[[Tensor], None]) -> None:
    """`register_hook` of torch is untyped."""
    tensor.register_hook(action)


def run_forward(dispatcher: TokenDispatcher, case: Exchange, experts: Experts, timer: PhaseTimer) -> Tensor:
    """Only forward, without a graph; the (T, hidden) result."""
    with torch.no_grad():
        timer.start()
        sent = dispatcher.dispatch(case.hidden_TH, case.expert_ids_TK, case.weights_TK, case.num_experts)
        timer.stop("dispatch")
        computed_SH = experts(sent.rows_SH, sent)
        timer.start()
        output_TH = dispatcher.combine(computed_SH, sent)
        timer.stop("combine")
    return output_TH


def diagonal_experts(scales_LH: Tensor) -> Experts:
    """Local expert e multiplies its rows by scales_LH[e], in float32 or float64: they sum gradients of many rows."""

    def compute(rows_SH: Tensor, sent: DispatchedTokens) -> Tensor:
        counts_L = sent.ends_E.diff(prepend=sent.ends_E.new_zeros(1))
        scale_SH = scales_LH.repeat_interleave(counts_L, dim=0, output_size=len(rows_SH))
        return (rows_SH.to(scale_SH.dtype) * scale_SH).to(rows_SH.dtype)

    return compute


def dense_result(case: Exchange) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In float64, from this rank's tokens alone: the result, and the gradients of the hidden states, the weights and
    the vectors of all experts, (experts, hidden). One route of all tokens at a time, so that memory stays small."""
    hidden_TH, grad_TH, scales_EH = case.hidden_TH.double(), case.grad_TH.double(), case.scales_EH.double()
    output_TH, grad_hidden_TH = torch.zeros_like(hidden_TH), torch.zeros_like(hidden_TH)
    grad_weights_TK = torch.zeros(case.weights_TK.shape, dtype=torch.float64, device=hidden_TH.device)
    grad_scales_EH = torch.zeros_like(scales_EH)
    for k in range(case.expert_ids_TK.shape[1]):
        ids_T, weights_T1 = case.expert_ids_TK[:, k], case.weights_TK[:, k : k + 1].double()
        scale_TH = scales_EH[ids_T]
        output_TH += weights_T1 * scale_TH * hidden_TH
        grad_hidden_TH += weights_T1 * scale_TH * grad_TH
        grad_weights_TK[:, k] = (scale_TH * hidden_TH * grad_TH).sum(1)
        grad_scales_EH.index_add_(0, ids_T, weights_T1 * hidden_TH * grad_TH)
    return output_TH, grad_hidden_TH, grad_weights_TK, grad_scales_EH
