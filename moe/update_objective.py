"""The objective of one optimizer step: a micro-batch's share of the mini-batch's loss, and of its metrics."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.batch import MicroBatch
from moe.config import LossConfig, SamplingConfig
from moe.forward import ResponseScores
from moe.losses import k3_kl, log_ratio, policy_loss, token_weights
from moe.update_shares import Pass


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What one optimizer step needs; the counts are of the rows of all ranks."""

    passes: list[Pass]
    """Of this rank; empty when no row of the mini-batch can contribute to the gradient."""
    num_tokens: int
    """Sampled tokens of the rows with a usable reward."""
    num_sequences: int
    """Rows with a usable reward."""
    num_scored_tokens: int
    """Sampled tokens of the rows that are computed."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What the ratio and the penalties are taken against: flat over response tokens, float32; N are a batch's rows."""

    advantages_N: Tensor
    old_logprobs: Tensor
    weights: Tensor
    reference_logprobs: Tensor | None


def objective(
    loss: LossConfig,
    sampling: SamplingConfig,
    micro: MicroBatch,
    scores: ResponseScores,
    targets: Targets,
    mini_batch: MiniBatch,
) -> tuple[Tensor, dict[str, float]]:
    """This micro-batch's share of the mini-batch's loss, and its shares of the metrics."""
    mask_BR, device = micro.sampled_BR, scores.logprobs_BR.device

    def rows_of(flat: Tensor) -> Tensor:
        return flat[micro.flat_BR].to(device)

    old_BR = rows_of(targets.old_logprobs)
    logprobs_BR = torch.where(mask_BR, scores.logprobs_BR, old_BR)
    advantages_B = targets.advantages_N[micro.rows_B].to(device)
    tokens = policy_loss(loss, logprobs_BR, old_BR, advantages_B, mask_BR)
    weights_BR = token_weights(loss, mask_BR, mini_batch.num_tokens, mini_batch.num_sequences, sampling.max_new_tokens)
    pg_loss = (tokens.loss_BT * rows_of(targets.weights) * weights_BR).sum()
    entropy = (scores.entropy_BR * weights_BR).sum()
    total = pg_loss - loss.entropy_coefficient * entropy
    mean_BR = mask_BR / mini_batch.num_scored_tokens
    sums = {
        "actor/pg_loss": pg_loss,
        "actor/ppo_kl": -(log_ratio(logprobs_BR, old_BR) * mean_BR).sum(),
        "actor/pg_clipfrac": (tokens.clipped_BT * mean_BR).sum(),
        "actor/pg_clipfrac_lower": (tokens.dual_clipped_BT * mean_BR).sum(),
        "actor/entropy": (scores.entropy_BR * mean_BR).sum(),
    }
    if targets.reference_logprobs is not None:
        kl = (k3_kl(logprobs_BR, rows_of(targets.reference_logprobs)) * weights_BR).sum()
        total = total + loss.kl_coefficient * kl
        sums["actor/kl_loss"] = kl
    stacked = torch.stack([value.detach() for value in sums.values()]).tolist()
    return total, dict(zip(sums, stacked, strict=True))
