"""Responses with tokens that the policy did not sample: they are context, and nothing else."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.batch import TrainingBatch
from moe.config import LossConfig, ModelConfig, MoeConfig, OptimizerConfig, SamplingConfig, UpdateConfig
from moe.model import build_model
from moe.sampler import Sampler
from moe.update import PolicyTrainer

SAMPLING = SamplingConfig(max_new_tokens=5)
SIZES = ModelConfig(
    hidden_size=16, num_attention_heads=2, num_key_value_heads=1, num_experts=4, moe_intermediate_size=16
)
LOSSES: list[dict[str, Any]] = [
    {},
    {"algorithm": "dapo"},
    {"algorithm": "dr_grpo"},
    {"algorithm": "gspo"},
    {"correction": "tis", "kl_coefficient": 0.1, "entropy_coefficient": 0.01},
    {"correction": "icepop"},
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(seed: int = 0) -> PreTrainedModel:
    return build_model(SIZES, 11, seed)


def trained(batch: TrainingBatch, **loss: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    policy = model()
    own = PolicyTrainer(
        policy,
        loss=LossConfig(**loss),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=3),
        update=UpdateConfig(epochs=2, optimizer_steps_per_epoch=2),
        moe=MoeConfig(),
        sampling=SAMPLING,
        reference_model=model(1) if loss.get("kl_coefficient") else None,
    )
    values = own.run_batch(batch, 7, 0, lambda step: None, lambda: False).values
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}, values


def batch_of(before: list[list[int]], **changes: Any) -> TrainingBatch:
    """Twelve conversations in groups of three: a prompt, `before`, and what the policy answers to both.

    With `as_prompt` all before the answer is the prompt, otherwise it is a part of the response.
    """
    prompts = [[1, 3 + group] for group in range(4) for _ in range(3)]
    contexts = [prompt + between for prompt, between in zip(prompts, before, strict=True)]
    rows = Sampler(model(), (2,), 0).sample(contexts, range(12), SAMPLING)
    as_prompt = changes.pop("as_prompt")
    answers, logprobs = [row.response_ids for row in rows], [row.logprobs for row in rows]
    shown = [[] if as_prompt else between for between in before]
    return TrainingBatch.from_rows(
        prompts=contexts if as_prompt else prompts,
        responses=[between + answer for between, answer in zip(shown, answers, strict=True)],
        logprobs=[[0.0] * len(between) + own for between, own in zip(shown, logprobs, strict=True)],
        versions=[[0] * (len(between) + len(answer)) for between, answer in zip(shown, answers, strict=True)],
        rewards=[float(len(answer) + row % 3) for row, answer in enumerate(answers)],
        groups=[row // 3 for row in range(12)],
        masks=[[False] * len(between) + [True] * len(answer) for between, answer in zip(shown, answers, strict=True)],
    )


BETWEEN = [[5 + row % 4] * (1 + row % 3) for row in range(12)]


@pytest.mark.parametrize("loss", LOSSES)
def test_other_tokens_train_as_if_they_belonged_to_the_prompt(loss: dict[str, Any]) -> None:
    turns, values = trained(batch_of(BETWEEN, as_prompt=False), **loss)
    prompt, expected = trained(batch_of(BETWEEN, as_prompt=True), **loss)
    assert all(torch.allclose(tensor, prompt[name], atol=2e-5) for name, tensor in turns.items())
    differ = [name for name in expected if name.split("/")[0] in ("actor", "rollout_corr", "response_length")]
    assert len(differ) > 8
    for name in differ:
        assert values[name] == pytest.approx(expected[name], abs=1e-4), name


def test_what_is_recorded_of_other_tokens_changes_nothing() -> None:
    batch = batch_of(BETWEEN, as_prompt=False)
    assert batch.sampled is not None
    logprobs = torch.where(batch.sampled, batch.logprobs, -3.0)
    assert_same(trained(batch, correction="tis")[0], trained(replace(batch, logprobs=logprobs), correction="tis")[0])


def test_a_mask_of_all_tokens_trains_bit_for_bit_like_none() -> None:
    batch = batch_of(BETWEEN, as_prompt=True)
    assert batch.sampled is not None and bool(batch.sampled.all())
    assert_same(trained(batch)[0], trained(replace(batch, sampled=None))[0])


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
