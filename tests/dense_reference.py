"""The one reference that every dispatcher is held to: a dense Mixture of Experts over the tokens of all ranks.

`check_dispatcher` runs inside a rank (see tests/ranks.py) and compares outputs and all gradients with `dense`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from moe.dispatch.base import DispatchedTokens, ExpertGroup, ExpertShape, TokenDispatcher
from moe.dispatch.monitor import ExchangeMonitor

Kind = Literal["uniform", "skewed", "one_hot", "empty_rank", "masked", "zero_tokens"]
KINDS: tuple[Kind, ...] = get_args(Kind)
NAMES = ("output", *(f"gradient of {name}" for name in ("hidden", "weights", "up", "bias", "down")))
BuildDispatcher = Callable[[ExpertGroup], TokenDispatcher]


@dataclass(frozen=True)
class Experts:
    """Expert e computes tanh(x @ up[e] + bias[e]) @ down[e]; by the bias, a row of zeros is seen as well."""

    up_EHI: Tensor
    bias_EI: Tensor
    down_EIH: Tensor

    def slice(self, rank: int, world_size: int) -> "Experts":
        """The experts of one rank, as leaves that collect gradients."""
        return Experts(*(p.detach().chunk(world_size)[rank].clone().requires_grad_() for p in self.parameters()))

    def to(self, dtype: torch.dtype) -> "Experts":
        return Experts(*(p.detach().to(dtype).requires_grad_() for p in self.parameters()))

    def parameters(self) -> tuple[Tensor, ...]:
        return self.up_EHI, self.bias_EI, self.down_EIH

    def forward(self, expert: int, rows_SH: Tensor) -> Tensor:
        return torch.tanh(rows_SH @ self.up_EHI[expert] + self.bias_EI[expert]) @ self.down_EIH[expert]


@dataclass(frozen=True)
class Case:
    """Tokens of all ranks with their routes, the experts, and the gradient of the loss by the output; float64."""

    kind: Kind
    hidden_TH: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    grad_TH: Tensor
    experts: Experts

    @property
    def num_experts(self) -> int:
        return len(self.experts.bias_EI)

    def rows_of(self, rank: int, world_size: int) -> slice:
        """A rank's tokens: uneven shares; of a `zero_tokens` case, only the ranks of odd number have any."""
        shares = [float(other % 2) if self.kind == "zero_tokens" else 1.0 + other for other in range(world_size)]
        tokens, whole = len(self.hidden_TH), sum(shares)
        if not whole:
            return slice(0, 0)
        return slice(int(tokens * sum(shares[:rank]) / whole), int(tokens * sum(shares[: rank + 1]) / whole))

    def owned_by(self, world_size: int) -> "Case":
        """The case without the tokens that no rank has."""
        end = self.rows_of(world_size - 1, world_size).stop
        return replace(
            self,
            hidden_TH=self.hidden_TH[:end],
            ids_TK=self.ids_TK[:end],
            weights_TK=self.weights_TK[:end],
            grad_TH=self.grad_TH[:end],
        )


def random_case(seed: int, tokens: int, experts: int, top_k: int, hidden: int, kind: Kind, inner: int = 8) -> Case:
    """A case of `tokens` tokens over all ranks; the experts of a token are distinct.

    one_hot: every token has one route, to the same expert, the others are -1; empty_rank: only the first top_k experts
    are chosen; masked: some routes of some tokens, and all routes of others, are -1.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator) * scale

    ids_TK = _routes(generator, tokens, experts, top_k, kind)
    return Case(
        kind=kind,
        hidden_TH=normal(tokens, hidden),
        ids_TK=ids_TK,
        weights_TK=torch.rand(tokens, top_k, dtype=torch.float64, generator=generator),
        grad_TH=normal(tokens, hidden),
        experts=Experts(
            normal(experts, hidden, inner, scale=hidden**-0.5),
            normal(experts, inner),
            normal(experts, inner, hidden, scale=inner**-0.5),
        ),
    )


def _routes(generator: torch.Generator, tokens: int, experts: int, top_k: int, kind: Kind) -> Tensor:
    scores_TE = torch.rand(tokens, experts, generator=generator).clamp(min=1e-9)
    if kind == "skewed":  # the share of expert e falls with 1/(e+1)^2 (Gumbel top-k)
        scores_TE = -(-scores_TE.log()).log() - 2 * torch.arange(1.0, experts + 1).log()
    if kind == "empty_rank":
        scores_TE[:, top_k:] = -1.0
    ids_TK = scores_TE.topk(top_k, -1).indices
    if kind == "one_hot":
        ids_TK[:, 0], ids_TK[:, 1:] = int(torch.randint(experts, (1,), generator=generator)), -1
    if kind == "masked":
        ids_TK.masked_fill_(torch.rand(tokens, top_k, generator=generator) < 0.3, -1)
        ids_TK.masked_fill_(torch.rand(tokens, 1, generator=generator) < 0.2, -1)
    return ids_TK


def dense(hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: Experts) -> Tensor:
    """Every expert computes every token; a gate of zero removes what was not routed there: (T, hidden)."""
    output_TH = torch.zeros_like(hidden_TH)
    for expert in range(len(experts.bias_EI)):
        gate_T = (weights_TK * (ids_TK == expert)).sum(1)
        output_TH = output_TH + gate_T.unsqueeze(1) * experts.forward(expert, hidden_TH)
    return output_TH


def through_dispatcher(
    dispatcher: TokenDispatcher, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, local: Experts, num_experts: int
) -> Tensor:
    """This rank's tokens by way of the dispatcher; `local` are the rank's own experts."""
    dispatched = dispatcher.dispatch(hidden_TH, ids_TK, weights_TK, num_experts)
    check_layout(dispatched, len(local.bias_EI), hidden_TH)
    starts = [0, *dispatched.ends_E.tolist()]
    parts = [
        local.forward(expert, dispatched.rows_SH[starts[expert] : starts[expert + 1]])
        for expert in range(len(local.bias_EI))
    ]
    return dispatcher.combine(torch.cat(parts), dispatched)


def check_layout(dispatched: DispatchedTokens, num_local_experts: int, hidden_TH: Tensor) -> None:
    """Rows are grouped by local expert, and all of them belong to one."""
    ends_E = dispatched.ends_E
    assert (ends_E.dtype, ends_E.shape) == (torch.int32, (num_local_experts,)), ends_E
    assert torch.equal(ends_E, ends_E.cummax(0).values), ends_E
    assert dispatched.rows_SH.shape == (int(ends_E[-1]), hidden_TH.shape[1])


def check_dispatcher(
    build: BuildDispatcher,
    rank: int,
    world_size: int,
    case: Case,
    dtype: torch.dtype = torch.float64,
    atol: float = 1e-12,
    *,
    weights_dtype: torch.dtype | None = None,
    ranks_per_node: int = 0,
    layers: int = 1,
) -> ExchangeMonitor:
    """Output and gradients (hidden, weights, experts) of this rank equal those of `dense` over all ranks' tokens.

    The inputs are rounded to `dtype` first, the reference computes from them in float64, and every tensor must be
    within `atol` times the larger of 1 and its largest value. `layers` > 1 chains as many passes before the backward.
    Returns the monitor of the exchanges. `weights_dtype`: of the routing weights, by default `dtype`.
    """
    group = expert_group(rank, world_size, ranks_per_node)
    dispatcher = build(group)
    dispatcher.validate(_shape(case, dtype, group))
    weights_dtype = weights_dtype or dtype
    rows = case.rows_of(rank, world_size)
    hidden_TH = case.hidden_TH[rows].to(dtype).requires_grad_()
    weights_TK = case.weights_TK[rows].to(weights_dtype).requires_grad_()
    local = case.experts.to(dtype).slice(rank, world_size)
    output_TH, ids_TK = hidden_TH, case.ids_TK[rows]
    for layer in range(layers):
        group.monitor.layer = layer
        output_TH = through_dispatcher(dispatcher, output_TH, ids_TK, weights_TK, local, case.num_experts).to(dtype)
    grads = torch.autograd.grad(output_TH, (hidden_TH, weights_TK, *local.parameters()), case.grad_TH[rows].to(dtype))
    dispatcher.close()
    want_output_TH, want = _reference(case.owned_by(world_size), dtype, weights_dtype, layers)
    owned = [grad.chunk(world_size)[rank] for grad in want[2:]]
    wanted = (want_output_TH[rows], want[0][rows], want[1][rows], *owned)
    for name, ours, reference in zip(NAMES, (output_TH.detach(), *grads), wanted, strict=True):
        _compare(f"{name} on rank {rank} of {world_size}, {case.kind}", ours, reference, atol)
    return group.monitor


def expert_group(rank: int, world_size: int, ranks_per_node: int = 0) -> ExpertGroup:
    """All ranks of the world as one expert-parallel group, with a monitor of its own; 0: one node."""
    return ExpertGroup(
        process_group=dist.group.WORLD if world_size > 1 else None,
        rank=rank,
        size=world_size,
        ranks_per_node=ranks_per_node or world_size,
        monitor=ExchangeMonitor(step=1),
    )


def _shape(case: Case, dtype: torch.dtype, group: ExpertGroup) -> ExpertShape:
    return ExpertShape(
        num_experts=case.num_experts,
        top_k=case.ids_TK.shape[1],
        hidden_size=case.hidden_TH.shape[1],
        dtype=dtype,
        ep_size=group.size,
        ranks_per_node=group.ranks_per_node,
        tokens_per_rank=len(case.hidden_TH),
    )


def _compare(what: str, ours: Tensor, reference: Tensor, atol: float) -> None:
    assert ours.shape == reference.shape, (what, ours.shape, reference.shape)
    if ours.numel():
        error, bound = float((ours.double() - reference).abs().max()), atol * max(1.0, float(reference.abs().max()))
        assert error <= bound, f"{what}: off by {error:.3g} > {bound:.3g}"


def _reference(
    case: Case, dtype: torch.dtype, weights_dtype: torch.dtype, layers: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Output of all tokens, and gradients of hidden, weights and the experts' parameters; float64."""
    hidden_TH = case.hidden_TH.to(dtype).double().requires_grad_()
    weights_TK = case.weights_TK.to(weights_dtype).double().requires_grad_()
    experts = case.experts.to(dtype).to(torch.float64)
    output_TH = hidden_TH
    for _ in range(layers):
        output_TH = dense(output_TH, case.ids_TK, weights_TK, experts)
    leaves = (hidden_TH, weights_TK, *experts.parameters())
    # A case without tokens on any rank has no gradient by the experts: zeros.
    grads = torch.autograd.grad(output_TH, leaves, case.grad_TH.to(dtype).double(), allow_unused=True)
    return output_TH.detach(), tuple(
        torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True)
    )
