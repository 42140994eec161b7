"""The gate: what counts as validated, and why."""

import pytest

from steps.config import GateConfig
from steps.policies import judge


@pytest.mark.parametrize(
    ("gate", "reward", "before", "validated"),
    [
        (GateConfig(), 0.0, None, True),
        (GateConfig(min_reward=0.5), 0.49, None, False),
        (GateConfig(min_reward=0.5), 0.5, 0.9, False),
        (GateConfig(max_regression=0.1), 0.81, 0.9, True),
        (GateConfig(max_regression=0.1), 0.79, 0.9, False),
        (GateConfig(max_regression=0.0), 0.9, 0.9, True),
    ],
)
def test_the_gate_compares_with_the_minimum_and_the_last_validated_version(
    gate: GateConfig, reward: float, before: float | None, validated: bool
) -> None:
    assert judge(gate, reward, before)[0] is validated


def test_the_reason_names_the_figures() -> None:
    assert judge(GateConfig(min_reward=0.5), 0.25, None)[1] == "held-out reward 0.2500 is below min_reward 0.5"
    assert judge(GateConfig(), 0.25, 0.75)[1] == "held-out reward fell from 0.7500 to 0.2500"
