"""Metrics of an update, named as verl names them; every name is a leaf (none is a path prefix of another)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe.advantages import GroupAdvantages
from moe.batch import TrainingBatch
from moe.losses import k3_kl


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step; `step` counts from 1 inside the batch."""

    step: int
    num_steps: int
    global_step: int
    values: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchMetrics:
    """One batch: means over its optimizer steps, and statistics of its responses."""

    global_step: int
    values: dict[str, float]
    expert_load_LE: list[list[float]]
    """Tokens sent to each expert of each layer, summed over the optimizer steps; empty when no step had a gradient."""
    router_steps: list[dict[str, Any]]
    """For each optimizer step with a gradient `{"step": number in the batch, "layers": [metrics of each layer]}`."""


def throughput(batch: TrainingBatch, share: float, started: float) -> dict[str, float]:
    """Speed of the `share` of the update that ran since `started` (monotonic clock)."""
    elapsed_s = time.monotonic() - started
    tokens = len(batch.prompt_ids) + len(batch.response_ids)
    return {
        "perf/total_num_tokens": float(tokens),
        "perf/throughput": share * tokens / elapsed_s,
        "perf/train_samples_per_s": share * len(batch) / elapsed_s,
        "timing_s/update_actor": elapsed_s,
    }


def batch_statistics(batch: TrainingBatch, groups: GroupAdvantages, max_new_tokens: int) -> dict[str, float]:
    """Rewards and advantages over usable responses, lengths in sampled tokens over all of them."""
    usable_N = batch.reward_ok_N
    return {
        **_summary("critic/rewards", batch.rewards_N[usable_N]),
        **_summary("critic/advantages", groups.advantages_N[usable_N]),
        **_summary("response_length", batch.sampled_lens_N),
        "response_length/clip_ratio": float((batch.sampled_lens_N >= max_new_tokens).float().mean()),
        **_summary("prompt_length", batch.prompt_lens_N),
        "frac_reward_zero_std": float(groups.degenerate_K.float().mean()),
    }


def mismatch_metrics(logprobs: Tensor, sampler_logprobs: Tensor) -> dict[str, float]:
    """How far the trainer's distribution is from the sampler's, over tokens that the sampler drew (flat, float32)."""
    if logprobs.numel() == 0:
        return {}
    return {
        # The sampler drew the tokens: d = trainer - sampler.
        "rollout_corr/k3_kl": float(k3_kl(sampler_logprobs, logprobs).mean()),
        "rollout_corr/logprobs_diff_max": float((logprobs - sampler_logprobs).abs().max()),
        "training/rollout_probs_diff_mean": float((logprobs.exp() - sampler_logprobs.exp()).abs().mean()),
    }


def mean_metrics(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over the steps that have it."""
    names = dict.fromkeys(name for values in steps for name in values)
    return {
        name: float(torch.tensor([values[name] for values in steps if name in values], dtype=torch.float64).mean())
        for name in names
    }


def _summary(name: str, values: Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    values = values.float()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
