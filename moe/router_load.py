"""How evenly the router spreads tokens over experts, and the loss that keeps it even.

Layers L, experts E, tokens T. A token's weight says how many sequences it stands for (a prompt that is computed once
for its group counts once for each response; padding counts 0), so that no statistic depends on how a batch was cut.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class RouterTrace:
    """What the routers of L layers did in the forward passes that were recorded, tokens in the order of the passes."""

    logits_LTE: list[list[Tensor]]
    """For each layer, one (T, E) tensor a pass, with gradient where the pass had one."""
    expert_ids_LTK: list[list[Tensor]]
    """For each layer, one (T, K) integer tensor a pass: the K experts chosen."""

    def layers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(T, E) router logits and (T, K) chosen experts of each layer, all passes together."""
        for logits, expert_ids in zip(self.logits_LTE, self.expert_ids_LTK, strict=True):
            yield torch.cat(logits), torch.cat(expert_ids)


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """Sums over tokens; add them over micro-batches."""

    counts_LE: Tensor
    """float64: weighted tokens sent to each expert."""
    probability_LE: Tensor
    """float64: weighted sum of the router's probability of each expert."""
    entropy_L: Tensor
    """float64: weighted sum of the entropy, in nats, of the router's distribution."""
    tokens: float
    """Sum of the tokens' weights."""

    def __add__(self, other: "RouterLoad") -> "RouterLoad":
        return RouterLoad(
            self.counts_LE + other.counts_LE,
            self.probability_LE + other.probability_LE,
            self.entropy_L + other.entropy_L,
            self.tokens + other.tokens,
        )

    def violations(self) -> Tensor:
        """max(load) / mean(load) - 1 of each layer, float64 of L: MaxVio of arXiv 2408.15664, section 4.1."""
        return self.counts_LE.amax(dim=1) / self.counts_LE.mean(dim=1).clamp(min=1e-12) - 1.0

    def metrics(self) -> dict[str, float]:
        """Worst and mean violation over layers, experts (of all layers) without a token, mean entropy in nats."""
        violations_L = self.violations()
        return {
            "rollout/moe/max_vio": float(violations_L.max()),
            "rollout/moe/avg_vio": float(violations_L.mean()),
            "moe/dead_experts": float((self.counts_LE == 0).sum()),
            "moe/router_entropy": float(self.entropy_L.mean()) / max(self.tokens, 1e-12),
        }


def router_modules(model: Any) -> list[nn.Module]:
    """The routers of a transformers model, in layer order, as the model class itself declares them.

    Raises ValueError when the class declares none.
    """
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    router_class = getattr(recorder, "target_class", None)
    routers = [module for module in model.modules() if router_class and isinstance(module, router_class)]
    if not routers:
        raise ValueError(f"model class {type(model).__name__} declares no router; use a Mixture-of-Experts model")
    return routers


@torch.no_grad()
def measure_load(trace: RouterTrace, weights_T: Tensor) -> RouterLoad:
    """Statistics of the recorded passes; `weights_T` float32, one weight a token."""
    counts, probabilities, entropies = [], [], []
    for logits_TE, ids_TK in trace.layers():
        log_p_TE = torch.log_softmax(logits_TE.float(), dim=-1)
        p_TE = log_p_TE.exp()
        weights_TK = weights_T.unsqueeze(1).expand_as(ids_TK).reshape(-1)
        counts.append(torch.bincount(ids_TK.reshape(-1), weights=weights_TK.double(), minlength=p_TE.shape[-1]))
        probabilities.append(weights_T @ p_TE)
        entropies.append(-(weights_T @ (p_TE * log_p_TE)).sum())
    return RouterLoad(
        torch.stack(counts).cpu(),
        torch.stack(probabilities).double().cpu(),
        torch.stack(entropies).double().cpu(),
        float(weights_T.double().sum()),
    )


def balance_loss(trace: RouterTrace, weights_T: Tensor, total: RouterLoad) -> Tensor:
    """This trace's share of the load-balancing loss of the whole mini-batch; the shares of all traces add up to it.

    For each layer E * sum over experts of f * P, with f the fraction of tokens sent to the expert and P its mean router
    probability (Switch Transformer, arXiv 2101.03961, eqs. 4-6; with K experts a token, f sums to K, as in
    transformers), averaged over layers. f comes from `total`, the counts of all traces of the mini-batch.
    """
    fraction_LE = (total.counts_LE / total.tokens).to(weights_T)
    shares = [
        logits_TE.shape[-1] * (fraction_E * (weights_T @ logits_TE.float().softmax(dim=-1))).sum()
        for (logits_TE, _), fraction_E in zip(trace.layers(), fraction_LE, strict=True)
    ]
    return torch.stack(shares).mean() / total.tokens
