"""Randomness and the order of prompts depend on their keys alone."""

import subprocess
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from steps.seeds import derive_seed, draw_prompts, sample_seed


def test_seeds_are_equal_in_another_process_with_another_hash_seed() -> None:
    code = "from steps.seeds import sample_seed; print(sample_seed(1, 2, 'abc', 3))"
    printed = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "77"}, capture_output=True, text=True, check=True
    )
    assert int(printed.stdout) == sample_seed(1, 2, "abc", 3)


def test_every_part_of_the_key_changes_the_seed() -> None:
    seeds = {
        sample_seed(*key) for key in [(0, 1, "a", 0), (1, 1, "a", 0), (0, 2, "a", 0), (0, 1, "b", 0), (0, 1, "a", 1)]
    }
    assert len(seeds) == 5


def test_parts_are_not_simply_joined() -> None:
    assert derive_seed("a", "bc") != derive_seed("ab", "c")


@given(num_prompts=st.integers(2, 40), count=st.integers(1, 40), seed=st.integers(0, 3))
def test_every_epoch_uses_every_prompt_once_and_no_iteration_repeats_one(
    num_prompts: int, count: int, seed: int
) -> None:
    count = min(count, num_prompts)
    uids = [f"p{number}" for number in range(num_prompts)]
    epochs = 3
    iterations = (epochs * num_prompts) // count + 1
    drawn: list[str] = []
    for iteration in range(iterations):
        batch = draw_prompts(uids, seed, iteration * count, count)
        assert len(set(batch)) == count
        drawn += batch
    for epoch in range(epochs):
        assert Counter(drawn[epoch * num_prompts : (epoch + 1) * num_prompts]) == Counter(uids)


def test_another_seed_draws_in_another_order() -> None:
    uids = [f"p{number}" for number in range(50)]
    assert draw_prompts(uids, 0, 0, 50) != draw_prompts(uids, 1, 0, 50)
