"""Chaos plans: what a file may say, and plans that are drawn from a seed."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steps.errors import ConfigError
from workflows.local.chaos_plan import (
    LETHAL,
    MAX_FAULTS,
    OF_THE_CAMPAIGN,
    parse_plan,
    plan_toml,
    random_plan,
    read_plan,
)

WORKERS = {"rollout": 2, "reward": 1}
GOOD = """
[[fault]]
step = "rollout"
iteration = 2
worker = 0
kind = "sigkill"
after_s = 0.5
"""


@settings(deadline=None)
@given(seed=st.integers(0, 2**40), rate=st.floats(0, 1), iterations=st.integers(1, 4))
def test_a_random_plan_is_a_function_of_its_seed_that_a_file_reproduces(
    seed: int, rate: float, iterations: int
) -> None:
    plan = tuple(random_plan(seed, rate, iterations, WORKERS))
    assert plan == tuple(random_plan(seed, rate, iterations, WORKERS))
    assert parse_plan(plan_toml(plan), "plan") == plan


@settings(deadline=None)
@given(seed=st.integers(0, 2**40))
def test_a_random_plan_decides_each_pod_by_itself(seed: int) -> None:
    few = set(random_plan(seed, 0.3, 2, {"rollout": 1, "reward": 1}))
    many = set(random_plan(seed, 0.3, 3, {"rollout": 3, "reward": 2}))
    assert few <= many


@settings(deadline=None)
@given(seed=st.integers(0, 2**40))
def test_a_random_plan_never_asks_more_of_a_step_than_its_retries_allow(seed: int) -> None:
    plan = list(random_plan(seed, 1.0, 3, WORKERS))
    by_pod: dict[tuple[str, int, int], list[int]] = {}
    for fault in plan:
        by_pod.setdefault((fault.step, fault.iteration, fault.worker), []).append(fault.attempt)
        assert (fault.iteration == 0) == (fault.step in OF_THE_CAMPAIGN)
    assert all(attempts == list(range(len(attempts))) and len(attempts) <= MAX_FAULTS for attempts in by_pod.values())
    survived = {fault.target for fault in plan if fault.kind not in LETHAL}
    assert not any((*fault.target[:3], fault.attempt - 1) in survived for fault in plan)


def test_a_rate_is_faults_a_pod() -> None:
    pods = 2 + 500 * 9
    first = [fault for fault in random_plan(1, 0.1, 500, WORKERS) if fault.attempt == 0]
    assert 0.08 < len(first) / pods < 0.12


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("sigkill", "sigkil"), "fault[0].kind = 'sigkil'"),
        (("rollout", "rolout"), "fault[0].step = 'rolout'"),
        (("iteration = 2", "iteration = -1"), "fault[0].iteration = -1"),
        (("iteration = 2", "iteration = 0"), "step rollout takes an iteration"),
        (("worker = 0", ""), "step rollout takes a worker"),
        (("rollout", "train"), "step train takes no worker"),
        (("after_s = 0.5", "after_s = -1"), "fault[0].after_s = -1"),
        (("after_s = 0.5", "after_s = nan"), "fault[0].after_s"),
        (("after_s = 0.5", "at_progress = 1.5"), "fault[0].at_progress = 1.5"),
        (("after_s", "after"), "fault[0].after"),
        (("sigkill", "checkpoint"), "kind checkpoint is for step train"),
        (("iteration = 2", "iteration = 4"), "fault[0].iteration = 4: the run has 3"),
        (("worker = 0", "worker = 2"), "fault[0].worker = 2: the run has 2"),
        (("after_s", "seconds"), "fault[0].seconds: is for notice, freeze, database, not sigkill"),
        (("after_s = 0.5", 'damage = "flip"'), "fault[0].damage: is for cache, not sigkill"),
        (("[[fault]]", "seed = 1\n[[fault]]"), "'seed': unknown"),
        (("[[fault]]", "[[fault"), "not TOML"),
        ((GOOD, GOOD + GOOD), "fault[1]: the same attempt as fault[0]"),
        ((GOOD, "fault = 1"), "fault"),
    ],
)
def test_a_bad_plan_is_one_line_that_names_the_field(tmp_path: Path, change: tuple[str, str], named: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(GOOD.replace(*change))
    with pytest.raises(ConfigError) as error:
        read_plan(str(path), iterations=3, rollout_workers=2, reward_workers=1)
    assert named in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "option", ["random:", "random:1", "random:x:0.1", "random:1:2", "random:1:nan", "no-such-file", "a\0b"]
)
def test_a_bad_option_says_what_to_write(option: str) -> None:
    with pytest.raises(ConfigError, match="random:SEED:RATE|faults a pod"):
        read_plan(option, iterations=1, rollout_workers=1, reward_workers=1)


@settings(deadline=None)
@given(st.text())
def test_no_text_makes_the_reader_crash(text: str) -> None:
    try:
        parse_plan(text, "plan")
    except ConfigError as error:
        assert "\n" not in str(error)
