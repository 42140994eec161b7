import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe.config import LossConfig
from moe.losses import (
    clip_range,
    correction_weights,
    entropy,
    icepop_weights,
    k3_kl,
    log_ratio,
    policy_loss,
    tis_weights,
    token_weights,
)

ALGORITHMS = ("grpo", "dapo", "dr_grpo", "gspo", "rloo", "cispo")


def config(algorithm: str, **fields: object) -> LossConfig:
    return LossConfig(algorithm=algorithm, **fields)  # type: ignore[arg-type]


def tokens(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


def losses(loss: LossConfig, ratios: Tensor, advantages: list[float]) -> Tensor:
    """Token losses where pi_old is 1/2 everywhere and pi = ratio / 2."""
    old = torch.full_like(ratios, math.log(0.5))
    mask = torch.ones_like(ratios, dtype=torch.bool)
    return policy_loss(loss, old + ratios.log(), old, torch.tensor(advantages), mask).loss_BT


def test_log_ratio_is_clamped() -> None:
    torch.testing.assert_close(log_ratio(tokens([0.0, -1.0]), tokens([-99.0, 99.0])), tokens([20.0, -20.0]))


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("grpo", (0.2, 0.2)),
        ("dapo", (0.2, 0.28)),
        ("dr_grpo", (0.2, 0.2)),
        ("gspo", (3e-4, 4e-4)),
        ("rloo", (0.2, 0.2)),
        ("cispo", (1.0, 0.28)),
    ],
)
def test_clip_ranges_default_to_the_published_ones(algorithm: str, expected: tuple[float, float]) -> None:
    assert clip_range(config(algorithm)) == expected
    assert clip_range(config(algorithm, clip_low=0.1, clip_high=0.3)) == (0.1, 0.3)


def test_grpo_clips_only_moves_that_go_too_far() -> None:
    ratios = tokens([0.5, 1.0, 1.5], [0.5, 1.0, 1.5])
    expected = tokens([-0.5, -1.0, -1.2], [0.8, 1.0, 1.5])
    torch.testing.assert_close(losses(config("grpo"), ratios, [1.0, -1.0]), expected)


def test_dapo_clips_higher() -> None:
    torch.testing.assert_close(losses(config("dapo"), tokens([1.27, 1.5]), [2.0]), tokens([-2.54, -2.56]))


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    ratios = tokens([2.0, 5.0])
    torch.testing.assert_close(losses(config("grpo", dual_clip=3.0), ratios, [-1.0]), tokens([2.0, 3.0]))
    torch.testing.assert_close(losses(config("grpo", dual_clip=None), ratios, [-1.0]), tokens([2.0, 5.0]))
    torch.testing.assert_close(losses(config("grpo", dual_clip=3.0), ratios, [1.0]), tokens([-1.2, -1.2]))


def test_clip_marks_say_which_tokens_lost_their_gradient() -> None:
    logprobs = (tokens([0.5, 1.0, 1.5, 5.0], [0.5, 1.0, 1.5, 5.0]) / 8).log().requires_grad_()
    old = torch.full_like(logprobs, math.log(1 / 8)).detach()
    mask = torch.ones_like(old, dtype=torch.bool)
    result = policy_loss(config("grpo"), logprobs, old, torch.tensor([1.0, -1.0]), mask)
    result.loss_BT.sum().backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad == 0, result.clipped_BT | result.dual_clipped_BT)
    assert result.clipped_BT.tolist() == [[False, False, True, True], [True, False, False, False]]
    assert result.dual_clipped_BT.tolist() == [[False] * 4, [False, False, False, True]]


def test_gspo_takes_the_length_normalised_sequence_ratio() -> None:
    # Geometric mean of 1.0002 and 1.0004 over the two real tokens; the third is padding.
    old = torch.zeros(1, 3)
    logprobs = tokens([1.0002, 1.0004, 7.0]).log().requires_grad_()
    mask = torch.tensor([[True, True, False]])
    result = policy_loss(config("gspo"), logprobs, old, torch.tensor([2.0]), mask)
    ratio = math.sqrt(1.0002 * 1.0004)
    torch.testing.assert_close(result.loss_BT[mask], torch.tensor([-2 * ratio, -2 * ratio]))
    (result.loss_BT * mask).sum().backward()
    torch.testing.assert_close(logprobs.grad, tokens([-2 * ratio, -2 * ratio, 0.0]))


def test_gspo_clips_at_its_tiny_range_and_ignores_the_dual_clip() -> None:
    far = losses(config("gspo"), tokens([1.1, 1.1]), [1.0])
    torch.testing.assert_close(far, tokens([-1.0004, -1.0004]))
    exploding = losses(config("gspo", dual_clip=3.0), tokens([9.0, 9.0]), [-1.0])
    torch.testing.assert_close(exploding, tokens([9.0, 9.0]))


def test_rloo_takes_the_ratio_of_the_whole_response() -> None:
    loss = losses(config("rloo"), tokens([1.1, 1.05], [1.2, 1.2]), [1.0, 1.0])
    torch.testing.assert_close(loss, tokens([-1.155, -1.155], [-1.2, -1.2]))


def test_cispo_truncates_the_weight_but_keeps_every_gradient() -> None:
    logprobs = (tokens([0.01, 1.0, 3.0]) * 0.25).log().requires_grad_()
    old = torch.full((1, 3), math.log(0.25))
    result = policy_loss(config("cispo"), logprobs, old, torch.tensor([2.0]), torch.ones(1, 3, dtype=torch.bool))
    weights = tokens([0.01, 1.0, 1.28])
    torch.testing.assert_close(result.loss_BT, -2.0 * weights * logprobs)
    result.loss_BT.sum().backward()
    torch.testing.assert_close(logprobs.grad, -2.0 * weights)
    assert result.clipped_BT.tolist() == [[False, False, True]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_at_ratio_one_every_objective_has_the_policy_gradient(algorithm: str) -> None:
    logprobs = tokens([-1.0, -2.0, -3.0]).requires_grad_()
    mask = torch.ones(1, 3, dtype=torch.bool)
    result = policy_loss(config(algorithm), logprobs, logprobs.detach(), torch.tensor([1.5]), mask)
    weights = token_weights(config(algorithm), mask, 3, 1, 3)
    (result.loss_BT * weights).sum().backward()
    # RLOO's ratio is a product over tokens: each token gets the whole response's gradient.
    scale = 1.5 if algorithm == "rloo" else 0.5
    torch.testing.assert_close(logprobs.grad, torch.full((1, 3), -scale))


def test_token_weights_by_hand() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    third, quarter = 1 / 3, 1 / 4
    for algorithm in ("grpo", "dapo", "cispo"):
        expected = tokens([third, 0.0], [third, third])
        torch.testing.assert_close(token_weights(config(algorithm), mask, 3, 2, 8), expected)
    for algorithm in ("gspo", "rloo"):
        expected = tokens([0.5, 0.0], [quarter, quarter])
        torch.testing.assert_close(token_weights(config(algorithm), mask, 3, 2, 8), expected)
    expected = tokens([1 / 16, 0.0], [1 / 16, 1 / 16])
    torch.testing.assert_close(token_weights(config("dr_grpo"), mask, 3, 2, 8), expected)


def test_k3_is_zero_at_equality_and_clamped() -> None:
    own, reference = tokens([-1.0, -1.0, -50.0]), tokens([-1.0, -1.5, 0.0])
    expected = tokens([0.0, math.exp(-0.5) + 0.5 - 1.0, 10.0])
    torch.testing.assert_close(k3_kl(own, reference), expected)


def test_k3_never_rounds_below_zero() -> None:
    own = torch.linspace(-3.0, 0.0, 1001)
    assert float(k3_kl(own, own + 3e-7).min()) >= 0.0


def test_entropy_of_a_uniform_and_of_a_certain_distribution() -> None:
    uniform = torch.log_softmax(torch.zeros(1, 1, 4), dim=-1)
    certain = torch.log_softmax(torch.tensor([[[50.0, 0.0, 0.0, 0.0]]]), dim=-1)
    torch.testing.assert_close(entropy(uniform), tokens([math.log(4)]))
    torch.testing.assert_close(entropy(certain), tokens([0.0]), atol=1e-6, rtol=0)


def test_corrections_by_hand() -> None:
    old, sampler = tokens([0.4, 0.9, 0.1]).log(), tokens([0.4, 0.3, 0.4]).log()
    torch.testing.assert_close(tis_weights(old, sampler, 2.0), tokens([1.0, 2.0, 0.25]))
    torch.testing.assert_close(icepop_weights(old, sampler, 0.5, 5.0), tokens([1.0, 3.0, 0.0]))
    torch.testing.assert_close(icepop_weights(old, sampler, 0.1, 2.0), tokens([1.0, 0.0, 0.25]))
    torch.testing.assert_close(correction_weights(config("grpo"), old, sampler), torch.ones(1, 3))
    assert not correction_weights(config("grpo", correction="tis"), old.requires_grad_(), sampler).requires_grad


@given(
    st.sampled_from(ALGORITHMS),
    st.lists(st.integers(1, 5), min_size=1, max_size=9),
    st.lists(st.integers(0, 3), min_size=9, max_size=9),
    st.integers(0, 2**31),
)
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(
    algorithm: str, lengths: list[int], parts: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    mask = torch.arange(5) < torch.tensor(lengths).unsqueeze(1)
    old = -3 * torch.rand(rows, 5, generator=generator)
    start = old + 0.3 * torch.randn(rows, 5, generator=generator)
    advantages = torch.randn(rows, generator=generator)
    loss = config(algorithm)

    def run(pieces: list[list[int]]) -> tuple[Tensor, Tensor]:
        logprobs = start.clone().requires_grad_()
        total = torch.zeros(())
        for piece in pieces:
            token = policy_loss(loss, logprobs[piece], old[piece], advantages[piece], mask[piece])
            share = (token.loss_BT * token_weights(loss, mask[piece], sum(lengths), rows, 5)).sum()
            share.backward()
            total = total + share.detach()
        assert logprobs.grad is not None
        return total, logprobs.grad

    whole = run([list(range(rows))])
    pieces = [[row for row in range(rows) if parts[row] == part] for part in range(4)]
    split = run([piece for piece in pieces if piece])
    torch.testing.assert_close(split, whole, atol=1e-6, rtol=1e-5)
