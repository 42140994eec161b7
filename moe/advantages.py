"""Group-relative advantages: one scalar for each response, computed from the rewards of its group.

With R the rewards of the G usable responses to one prompt:

    GRPO, DAPO, GSPO, CISPO   (R - mean(R)) / (std(R) + epsilon), sample standard deviation (DeepSeekMath, arXiv
                              2402.03300, eq. 4; DAPO 2503.14476; GSPO 2507.18071; CISPO 2506.13585)
    Dr.GRPO                   R - mean(R)                          (arXiv 2503.20783)
    RLOO                      R - mean of the others = G / (G - 1) * (R - mean(R))   (arXiv 2402.14740)

A group whose raw usable rewards are all equal has advantage exactly 0: dividing its rounding noise by a tiny epsilon
would otherwise produce a gradient out of nothing. A response without a usable reward takes no part in the statistics.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.config import LossConfig


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages of N responses in K groups."""

    advantages_N: Tensor
    """float32; 0 where the response has no usable reward or its group is degenerate."""
    degenerate_K: Tensor
    """bool; True where all usable rewards of the group are equal, or fewer than two are usable."""


def compute_advantages(loss: LossConfig, rewards_N: Tensor, reward_ok_N: Tensor, group_N: Tensor) -> GroupAdvantages:
    """Advantages of N responses.

    `rewards_N` float32 (ignored where not usable), `reward_ok_N` bool, `group_N` integer dense group index 0..K-1.
    Statistics are computed in float64. Raises ValueError for a usable reward that is not finite.
    """
    if not bool(torch.isfinite(rewards_N[reward_ok_N]).all()):
        raise ValueError("rewards_N: a usable reward is not finite; give the sample the reward status `error` instead")
    groups_N = group_N.long()
    num_groups = int(groups_N.max()) + 1 if groups_N.numel() else 0
    weight_N = reward_ok_N.double()
    values_N = torch.where(reward_ok_N, rewards_N, torch.zeros_like(rewards_N)).double()
    count_K = values_N.new_zeros(num_groups).index_add_(0, groups_N, weight_N)
    mean_K = values_N.new_zeros(num_groups).index_add_(0, groups_N, values_N) / count_K.clamp(min=1.0)
    centered_N = (values_N - mean_K[groups_N]) * weight_N
    degenerate_K = _degenerate_groups(values_N, reward_ok_N, groups_N, count_K)
    scaled_N = centered_N * _scale(loss, centered_N, groups_N, count_K)[groups_N]
    counts_N = reward_ok_N & ~degenerate_K[groups_N]
    advantages_N = torch.where(counts_N, scaled_N, torch.zeros_like(scaled_N)).float()
    return GroupAdvantages(advantages_N=advantages_N, degenerate_K=degenerate_K)


def _degenerate_groups(values_N: Tensor, reward_ok_N: Tensor, groups_N: Tensor, count_K: Tensor) -> Tensor:
    usable_values, usable_groups = values_N[reward_ok_N], groups_N[reward_ok_N]
    highest_K = torch.full_like(count_K, -torch.inf).scatter_reduce_(0, usable_groups, usable_values, "amax")
    lowest_K = torch.full_like(count_K, torch.inf).scatter_reduce_(0, usable_groups, usable_values, "amin")
    return (highest_K <= lowest_K) | (count_K < 2)


def _scale(loss: LossConfig, centered_N: Tensor, groups_N: Tensor, count_K: Tensor) -> Tensor:
    """Factor on the centered rewards of each group, float64 of K."""
    if loss.algorithm == "dr_grpo":
        return torch.ones_like(count_K)
    if loss.algorithm == "rloo":
        return count_K / (count_K - 1).clamp(min=1.0)
    square_sum_K = torch.zeros_like(count_K).index_add_(0, groups_N, centered_N.square())
    std_K = (square_sum_K / (count_K - 1).clamp(min=1.0)).sqrt()
    return 1.0 / (std_K + loss.advantage_epsilon)
