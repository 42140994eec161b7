from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from moe.config import ModelConfig, OptimizerConfig, SamplingConfig
from moe.divergence import Diverged
from moe.model import build_model
from moe.sampler import Sampler
from moe.tokenizer import build_char_tokenizer, decode_response, encode_prompt
from moe.warmup import WarmupProgress, WarmupResult, run_warmup

PAIRS = [(f"{letter}>", letter.upper() * 2) for letter in "abcd"]
SIZES = ModelConfig(hidden_size=32, num_experts=4, moe_intermediate_size=32)


def tokenizer() -> PreTrainedTokenizerFast:
    return build_char_tokenizer("abcdABCD>")


def model() -> PreTrainedModel:
    return build_model(SIZES, len(tokenizer()), 0)


def warm(
    policy: PreTrainedModel, evaluate: Callable[[], float], **fields: Any
) -> tuple[WarmupResult, list[WarmupProgress]]:
    seen: list[WarmupProgress] = []
    settings: dict[str, Any] = {"max_steps": 12, "stop_reward": 0.9, "check_every": 4, "batch_size": 4, "seed": 0}
    result = run_warmup(
        policy,
        tokenizer(),
        PAIRS,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        evaluate=evaluate,
        on_progress=seen.append,
        **(settings | fields),
    )
    return result, seen


def test_it_learns_the_answers_and_their_end() -> None:
    policy = model()
    result, seen = warm(policy, lambda: 0.0, max_steps=60)
    prompts = [encode_prompt(tokenizer(), prompt) for prompt, _ in PAIRS]
    responses = Sampler(policy, (2,), 0).sample(prompts, [0] * 4, SamplingConfig(max_new_tokens=5), greedy=True)
    assert [decode_response(tokenizer(), response.response_ids) for response in responses] == [a for _, a in PAIRS]
    assert [response.finish_reason for response in responses] == ["stop"] * 4
    assert seen[-1].loss < seen[0].loss
    assert result == WarmupResult(steps=60, reward=0.0, reached=False)


def test_it_stops_at_the_first_check_that_reaches_the_reward() -> None:
    rewards = iter([0.1, 0.95, 1.0])
    result, seen = warm(model(), lambda: next(rewards))
    assert result == WarmupResult(steps=8, reward=0.95, reached=True)
    assert [(progress.step, progress.reward) for progress in seen] == [(4, 0.1), (8, 0.95)]


def test_the_last_step_is_always_checked() -> None:
    result, seen = warm(model(), lambda: 0.2, max_steps=5)
    assert [progress.step for progress in seen] == [4, 5]
    assert result == WarmupResult(steps=5, reward=0.2, reached=False)


def test_no_steps_leave_the_model_alone() -> None:
    policy, untouched = model(), model()
    result, seen = warm(policy, lambda: 1.0, max_steps=0)
    assert (result.steps, seen) == (0, [])
    assert all(torch.equal(tensor, untouched.state_dict()[name]) for name, tensor in policy.state_dict().items())


def test_the_seed_decides_the_weights() -> None:
    def trained(seed: int) -> dict[str, torch.Tensor]:
        policy = model()
        warm(policy, lambda: 0.0, seed=seed, batch_size=2)
        return policy.state_dict()

    first, again, other = trained(1), trained(1), trained(2)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_an_answer_outside_the_alphabet_is_named() -> None:
    with pytest.raises(ValueError, match="'z'"):
        run_warmup(
            model(),
            tokenizer(),
            [("a>", "z")],
            optimizer=OptimizerConfig(),
            max_steps=1,
            stop_reward=1.0,
            check_every=1,
            batch_size=1,
            evaluate=lambda: 0.0,
            seed=0,
            on_progress=lambda progress: None,
        )


def test_no_demonstrations_are_refused() -> None:
    with pytest.raises(ValueError, match="no demonstrations"):
        run_warmup(
            model(),
            tokenizer(),
            [],
            optimizer=OptimizerConfig(),
            max_steps=1,
            stop_reward=1.0,
            check_every=1,
            batch_size=1,
            evaluate=lambda: 0.0,
            seed=0,
            on_progress=lambda progress: None,
        )


def test_divergence_names_the_warm_ups_learning_rate() -> None:
    policy = model()
    with torch.no_grad():
        policy.lm_head.weight[3] = torch.inf
    with pytest.raises(Diverged, match=r"^warmup\.optimizer\.learning_rate = 0\.01: the loss became nan"):
        warm(policy, lambda: 0.0)
