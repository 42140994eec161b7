"""The weights that a router gives to chosen experts, as a function of its logits, for router classes of transformers.

Routing replay and recomputation choose the experts themselves; the weights then follow from the router's logits, with
gradient, as if it had chosen them itself. Each function states what the `forward` of its router classes computes (read
in transformers 5.24); T tokens, E experts, K chosen.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WeightsRule = Callable[[Any, Tensor, Tensor], Tensor]
"""(router module, (T, E) logits, (T, K) int64 expert ids) -> (T, K) weights, in the dtype that the router returns."""


def _softmax_then_choose(router: Any, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Probabilities over all experts, renormalised over the chosen where the model says so; in the logits' dtype."""
    weights_TK = torch.softmax(logits_TE, dtype=torch.float, dim=-1).gather(-1, ids_TK)
    if router.norm_topk_prob:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK.to(logits_TE.dtype)


def _softmax_renormalised(router: Any, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Probabilities over all experts, renormalised over the chosen ones; float32."""
    weights_TK = torch.softmax(logits_TE.float(), dim=-1).gather(-1, ids_TK)
    return weights_TK / weights_TK.sum(dim=-1, keepdim=True)


def _sigmoid_scores(router: Any, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Sigmoid scores without the selection bias, normalised over the chosen ones, times a factor; float32 (DeepSeek-V3,
    arXiv 2412.19437, section 2.1.2)."""
    weights_TK = logits_TE.sigmoid().gather(-1, ids_TK)
    if router.norm_topk_prob:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_TK * float(router.routed_scaling_factor)


def _choose_then_softmax(router: Any, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Softmax over the chosen experts' logits alone, in their dtype."""
    chosen_TK = logits_TE.gather(-1, ids_TK)
    return torch.softmax(chosen_TK, dim=-1, dtype=chosen_TK.dtype)


_RULES: dict[str, WeightsRule] = {
    "Qwen2MoeTopKRouter": _softmax_then_choose,
    "Qwen3MoeTopKRouter": _softmax_then_choose,
    "OlmoeTopKRouter": _softmax_then_choose,
    "FlexOlmoTopKRouter": _softmax_then_choose,
    "MixtralTopKRouter": _softmax_renormalised,
    "DeepseekV3TopkRouter": _sigmoid_scores,
    "Dots1TopkRouter": _sigmoid_scores,
    "Glm4MoeTopkRouter": _sigmoid_scores,
    "GptOssTopKRouter": _choose_then_softmax,
}


def weights_rule(router: Any) -> WeightsRule:
    """The rule of a router's class; ValueError naming the class when it is not one of those known here."""
    name = type(router).__name__
    if name not in _RULES:
        raise ValueError(
            f"router class {name}: its weights for given experts are not known; replay and recomputation of its "
            f"routing need one of {', '.join(sorted(_RULES))}"
        )
    return _RULES[name]
