import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe.advantages import GroupAdvantages, compute_advantages
from moe.config import LossConfig

STANDARDISED = ("grpo", "dapo", "gspo", "cispo")
ALL = (*STANDARDISED, "dr_grpo", "rloo")


def advantages(
    algorithm: str, rewards: list[float | None], groups: list[int], epsilon: float = 1e-4
) -> GroupAdvantages:
    values = torch.tensor([0.0 if reward is None else reward for reward in rewards])
    usable = torch.tensor([reward is not None for reward in rewards])
    loss = LossConfig(algorithm=algorithm, advantage_epsilon=epsilon)  # type: ignore[arg-type]
    return compute_advantages(loss, values, usable, torch.tensor(groups, dtype=torch.int32))


@pytest.mark.parametrize("algorithm", STANDARDISED)
def test_standardised_by_the_sample_standard_deviation(algorithm: str) -> None:
    # Mean 0.5, squared deviations 0.25 + 0.25, sample variance 0.5 / 1.
    result = advantages(algorithm, [0.0, 1.0], [0, 0])
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)
    torch.testing.assert_close(result.advantages_N, torch.tensor([-expected, expected]))


def test_groups_are_independent_and_need_not_be_contiguous() -> None:
    result = advantages("dr_grpo", [0.0, 10.0, 1.0, 30.0], [0, 1, 0, 1])
    torch.testing.assert_close(result.advantages_N, torch.tensor([-0.5, -10.0, 0.5, 10.0]))


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    result = advantages("rloo", [1.0, 2.0, 6.0], [0, 0, 0])
    torch.testing.assert_close(result.advantages_N, torch.tensor([1.0 - 4.0, 2.0 - 3.5, 6.0 - 1.5]))


@pytest.mark.parametrize("algorithm", ALL)
@pytest.mark.parametrize("epsilon", [1e-4, 1e-9])
def test_equal_rewards_give_exactly_zero_whatever_epsilon(algorithm: str, epsilon: float) -> None:
    result = advantages(algorithm, [0.95] * 8 + [0.0, 1.0], [0] * 8 + [1, 1], epsilon)
    assert result.advantages_N[:8].tolist() == [0.0] * 8
    assert result.degenerate_K.tolist() == [True, False]


@pytest.mark.parametrize("algorithm", ALL)
def test_a_response_without_reward_is_left_out_of_the_statistics(algorithm: str) -> None:
    with_failure = advantages(algorithm, [0.0, None, 1.0, 1.0], [0, 0, 0, 0])
    without = advantages(algorithm, [0.0, 1.0, 1.0], [0, 0, 0])
    assert with_failure.advantages_N[1] == 0.0
    torch.testing.assert_close(with_failure.advantages_N[[0, 2, 3]], without.advantages_N)


@pytest.mark.parametrize("algorithm", ALL)
def test_fewer_than_two_usable_rewards_give_zero(algorithm: str) -> None:
    result = advantages(algorithm, [1.0, None, None, None], [0, 0, 1, 1])
    assert result.advantages_N.tolist() == [0.0] * 4
    assert result.degenerate_K.tolist() == [True, True]


def test_a_usable_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="rewards_N"):
        advantages("grpo", [math.nan, 1.0], [0, 0])


@given(
    st.sampled_from(ALL),
    st.lists(st.tuples(st.floats(-5, 5, width=32), st.booleans(), st.integers(0, 3)), min_size=1, max_size=24),
)
def test_each_group_sums_to_zero_and_keeps_the_order_of_rewards(
    algorithm: str, rows: list[tuple[float, bool, int]]
) -> None:
    dense = {group: index for index, group in enumerate(dict.fromkeys(group for _, _, group in rows))}
    result = advantages(
        algorithm, [reward if usable else None for reward, usable, _ in rows], [dense[group] for _, _, group in rows]
    )
    for group in dense.values():
        members = [i for i, (_, usable, name) in enumerate(rows) if dense[name] == group and usable]
        values: Tensor = result.advantages_N[members]
        assert abs(float(values.sum())) < 1e-4
        ranked = sorted(members, key=lambda i: rows[i][0])
        assert bool((result.advantages_N[ranked].diff() >= 0).all())
