"""Policy-gradient objectives as pure functions over response tokens, shape B x T (responses x tokens).

Symbols: pi the policy being trained, pi_old the policy that the ratio is taken against, A the advantage,
r = pi / pi_old for each token, m the mask (True where a token counts). Every objective returns one loss value for each
token; `token_weights` turns them into the batch's loss by GLOBAL counts, so that the sum over micro-batches does not
depend on how the mini-batch was cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.config import LossConfig

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this range before exp, as verl does, so that one broken token can't produce inf."""
KL_LIMIT = 10.0
"""Bound on one token's k3 estimate (verl `kl_penalty`)."""

PUBLISHED_CLIP: Mapping[str, tuple[float, float]] = {
    "grpo": (0.2, 0.2),  # PPO 1707.06347, DeepSeekMath 2402.03300
    "dapo": (0.2, 0.28),  # DAPO 2503.14476, clip-higher
    "dr_grpo": (0.2, 0.2),  # 2503.20783
    "gspo": (3e-4, 4e-4),  # GSPO 2507.18071, section 5.1
    "rloo": (0.2, 0.2),  # the clip of TRL's RLOOTrainer, on the sequence ratio
    "cispo": (1.0, 0.28),  # CISPO 2506.13585: no lower bound (1 - 1.0 = 0), only the upper one is tuned
}


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """An objective before aggregation; all of shape B x T."""

    loss_BT: Tensor
    """float32, differentiable; its value where the mask is False is meaningless."""
    clipped_BT: Tensor
    """bool: the clip removed (or, for CISPO, truncated) this token's gradient."""
    dual_clipped_BT: Tensor
    """bool: the dual clip removed this token's gradient."""


def clip_range(loss: LossConfig) -> tuple[float, float]:
    """Lower and upper clip range: the configured one, or the algorithm's published default."""
    low, high = PUBLISHED_CLIP[loss.algorithm]
    return (
        low if loss.clip_low is None else loss.clip_low,
        high if loss.clip_high is None else loss.clip_high,
    )


def log_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """log r = log pi - log pi_old, clamped to +-20."""
    return (logprobs_BT - old_logprobs_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def policy_loss(
    loss: LossConfig, logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor
) -> TokenLoss:
    """The configured algorithm's token losses.

    `logprobs_BT` float32 with gradient, `old_logprobs_BT` float32, `advantages_B` float32, `mask_BT` bool.
    """
    log_ratio_BT = log_ratio(logprobs_BT, old_logprobs_BT)
    low, high = clip_range(loss)
    if loss.algorithm == "cispo":
        return _truncated_importance(log_ratio_BT, logprobs_BT, advantages_B, low, high)
    dual_clip = loss.dual_clip
    if loss.algorithm == "gspo":
        dual_clip = None
        log_ratio_BT = gspo_log_ratio(log_ratio_BT, logprobs_BT, mask_BT)
    elif loss.algorithm == "rloo":
        log_ratio_BT = _sequence_log_ratio(log_ratio_BT, mask_BT)
    return clipped_surrogate(log_ratio_BT, advantages_B, low, high, dual_clip)


def clipped_surrogate(
    log_ratio_BT: Tensor, advantages_B: Tensor, low: float, high: float, dual_clip: float | None
) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A)   (PPO, arXiv 1707.06347, eq. 7).

    With `dual_clip` = c and A < 0 the loss is min(-c A, that)   (arXiv 1912.09729, eq. 5): a negative advantage times
    an exploding ratio stays bounded.
    """
    advantages_BT = advantages_B.unsqueeze(1)
    ratio_BT = log_ratio_BT.exp()
    plain_BT = -ratio_BT * advantages_BT
    limited_BT = -ratio_BT.clamp(1.0 - low, 1.0 + high) * advantages_BT
    loss_BT = torch.maximum(plain_BT, limited_BT)
    clipped_BT = limited_BT > plain_BT
    if dual_clip is None:
        return TokenLoss(loss_BT, clipped_BT, torch.zeros_like(clipped_BT))
    bound_BT = (-dual_clip * advantages_BT).expand_as(loss_BT)
    dual_clipped_BT = (advantages_BT < 0) & (loss_BT > bound_BT)
    return TokenLoss(torch.where(dual_clipped_BT, bound_BT, loss_BT), clipped_BT & ~dual_clipped_BT, dual_clipped_BT)


def gspo_log_ratio(log_ratio_BT: Tensor, logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log of GSPO-token's ratio s_t = sg(s) * pi / sg(pi), with s = exp(mean over tokens of log r).

    Its value is the sequence's length-normalised ratio for each token; its gradient flows through the token's own
    log-probability   (GSPO, arXiv 2507.18071, eqs. 7 and 14).
    """
    lengths_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    mean_B1 = (log_ratio_BT * mask_BT).sum(dim=1, keepdim=True) / lengths_B1
    return mean_B1.detach() + logprobs_BT - logprobs_BT.detach()


def _sequence_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """RLOO treats the response as one action: log r is the sum over its tokens, here repeated for each token."""
    total_B1 = (log_ratio_BT * mask_BT).sum(dim=1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return total_B1.expand_as(log_ratio_BT)


def _truncated_importance(
    log_ratio_BT: Tensor, logprobs_BT: Tensor, advantages_B: Tensor, low: float, high: float
) -> TokenLoss:
    """CISPO: -sg(clip(r, 1 - low, 1 + high)) A log pi   (MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5)."""
    ratio_BT = log_ratio_BT.detach().exp()
    weight_BT = ratio_BT.clamp(1.0 - low, 1.0 + high)
    clipped_BT = weight_BT != ratio_BT
    return TokenLoss(-weight_BT * advantages_B.unsqueeze(1) * logprobs_BT, clipped_BT, torch.zeros_like(clipped_BT))


def token_weights(loss: LossConfig, mask_BT: Tensor, num_tokens: int, num_sequences: int, max_tokens: int) -> Tensor:
    """Weight of each token's loss in the mini-batch's loss; float32 of B x T, 0 outside the mask.

    `num_tokens` and `num_sequences` count the usable responses of the WHOLE mini-batch, whichever rows are in this
    micro-batch; `max_tokens` is the longest allowed response.

        GRPO, DAPO, CISPO   1 / num_tokens                          (DAPO eq. 8; verl's token-mean)
        GSPO, RLOO          1 / (own length * num_sequences)        (mean over sequences)
        Dr.GRPO             1 / (num_sequences * max_tokens)        (a constant: no length bias)
    """
    mask = mask_BT.float()
    if loss.algorithm == "dr_grpo":
        return mask / (num_sequences * max_tokens)
    if loss.algorithm in ("gspo", "rloo"):
        return mask / (mask.sum(dim=1, keepdim=True).clamp(min=1.0) * num_sequences)
    return mask / num_tokens


def k3_kl(logprobs_BT: Tensor, reference_logprobs_BT: Tensor) -> Tensor:
    """k3 estimate of KL(pi || reference) at tokens drawn from pi: exp(d) - d - 1 with d = log reference - log pi.

    d is clamped to +-20 and the result to +-10   (http://joschu.net/blog/kl-approx.html; verl's `low_var_kl`).
    """
    difference_BT = (reference_logprobs_BT - logprobs_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (difference_BT.expm1() - difference_BT).clamp(-KL_LIMIT, KL_LIMIT)


def entropy(log_distribution_BTV: Tensor) -> Tensor:
    """Entropy in nats of each token's distribution, B x T, from its log-softmax over the vocabulary V."""
    return -(log_distribution_BTV.exp() * log_distribution_BTV).sum(dim=-1)


def correction_weights(loss: LossConfig, old_logprobs_BT: Tensor, sampler_logprobs_BT: Tensor) -> Tensor:
    """Weight of each token that corrects for the sampler mu not being exactly pi_old; no gradient flows through it."""
    if loss.correction == "tis":
        return tis_weights(old_logprobs_BT, sampler_logprobs_BT, loss.tis_cap)
    if loss.correction == "icepop":
        return icepop_weights(old_logprobs_BT, sampler_logprobs_BT, loss.icepop_low, loss.icepop_high)
    return torch.ones_like(old_logprobs_BT)


def tis_weights(old_logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling: min(pi_old / mu, cap)   (https://fengyao.notion.site/off-policy-rl)."""
    return log_ratio(old_logprobs_BT, sampler_logprobs_BT).detach().exp().clamp(max=cap)


def icepop_weights(old_logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, low: float, high: float) -> Tensor:
    """IcePop: pi_old / mu inside [low, high], 0 outside: badly mismatched tokens are dropped   (arXiv 2510.18855)."""
    ratio_BT = log_ratio(old_logprobs_BT, sampler_logprobs_BT).detach().exp()
    return torch.where((ratio_BT >= low) & (ratio_BT <= high), ratio_BT, torch.zeros_like(ratio_BT))
