"""Supervised warm-up: a few steps on demonstrations, until the policy answers often enough for rewards to differ."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moe.batch import BatchCutter, TrainingBatch
from moe.config import OptimizerConfig
from moe.forward import ResponseScorer
from moe.optimizer import PolicyOptimizer
from moe.tokenizer import PromptContent, encode_prompt, is_character_tokenizer

MICRO_BATCH_TOKENS = 16384


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupProgress:
    """One check: `loss` is the mean cross-entropy in nats a token of the last step, `reward` what `evaluate` said."""

    step: int
    loss: float
    reward: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupResult:
    """How the warm-up ended."""

    steps: int
    reward: float
    reached: bool
    """Whether `stop_reward` was reached within `max_steps`."""


def run_warmup(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Sequence[tuple[PromptContent, str]],
    *,
    optimizer: OptimizerConfig,
    max_steps: int,
    stop_reward: float,
    check_every: int,
    batch_size: int,
    evaluate: Callable[[], float],
    seed: int,
    on_progress: Callable[[WarmupProgress], None],
) -> WarmupResult:
    """Train `model` in place on (prompt, answer) pairs, the end-of-sequence token appended to each answer.

    Every `check_every` steps, and after the last one, `evaluate()` measures the held-out reward; training stops as soon
    as it reaches `stop_reward`. Equal arguments give bit-identical weights. Runs on the model's device, in float32.
    Raises ValueError without demonstrations or for one that the tokenizer can't encode, and Diverged when the loss or
    its gradient is not finite.
    """
    if not demonstrations:
        raise ValueError("warmup.max_steps: there are no demonstrations; give answers in the data set, or use 0 steps")
    encoded = [_encode(tokenizer, prompt, answer) for prompt, answer in demonstrations]
    scorer, adamw = ResponseScorer(model), PolicyOptimizer(model, optimizer, "warmup.optimizer")
    order = _shuffled_forever(len(encoded), seed)
    reward = 0.0
    for step in range(1, max_steps + 1):
        model.train()
        adamw.set_learning_rate(step - 1)
        rows = [encoded[next(order)] for _ in range(min(batch_size, len(encoded)))]
        loss = _accumulate_gradients(scorer, rows, int(model.config.pad_token_id or 0))
        adamw.step(loss)
        if step % check_every == 0 or step == max_steps:
            reward = evaluate()
            on_progress(WarmupProgress(step=step, loss=loss, reward=reward))
            if reward >= stop_reward:
                return WarmupResult(steps=step, reward=reward, reached=True)
    return WarmupResult(steps=max_steps, reward=reward, reached=False)


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: PromptContent, answer: str) -> tuple[list[int], list[int]]:
    if is_character_tokenizer(tokenizer):
        answer_ids = encode_prompt(tokenizer, answer)[1:]
    else:
        answer_ids = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
    return encode_prompt(tokenizer, prompt), [*answer_ids, int(tokenizer.eos_token_id)]


def _shuffled_forever(count: int, seed: int) -> Iterator[int]:
    """Indices of endless epochs, each a new permutation."""
    digest = hashlib.sha256(f"warmup/{seed}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


def _accumulate_gradients(scorer: ResponseScorer, rows: Sequence[tuple[list[int], list[int]]], pad_id: int) -> float:
    """Backward of the mean cross-entropy over all answer tokens of `rows`; returns it."""
    batch = _as_batch(rows)
    total = torch.zeros(())
    for micro in BatchCutter(batch, pad_id, scorer.model.device).micro_batches(range(len(rows)), MICRO_BATCH_TOKENS):
        loss: Tensor = -scorer.score(micro).logprobs_BR[micro.response_mask_BR].sum() / len(batch.response_ids)
        torch.autograd.backward(loss)
        total = total + loss.detach().cpu()
    return float(total)


def _as_batch(rows: Sequence[tuple[list[int], list[int]]]) -> TrainingBatch:
    responses = [response for _, response in rows]
    return TrainingBatch.from_rows(
        prompts=[prompt for prompt, _ in rows],
        responses=responses,
        logprobs=[[0.0] * len(response) for response in responses],
        versions=[[0] * len(response) for response in responses],
        rewards=[None] * len(rows),
        groups=range(len(rows)),
    )
