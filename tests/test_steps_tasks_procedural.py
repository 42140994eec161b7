"""Generated tasks: right answers, distinct prompts, the same everywhere."""

import os
import subprocess
import sys

import pytest

from steps.config import TaskConfig
from steps.errors import ConfigError
from steps.tasks.catalog import build_dataset
from steps.tasks.dataset import Dataset
from steps.tasks.procedural import problem_count, reverse_digits, sort_digits, two_digit_addition

KINDS = ("reverse_digits", "sort_digits", "two_digit_addition")


def test_problems_are_written_as_documented() -> None:
    assert reverse_digits(482913, 6) == ("482913>", "319284")
    assert reverse_digits(7, 3) == ("007>", "700")
    assert sort_digits(482913, 6) == ("482913>", "123489")
    assert two_digit_addition(4785, 6) == ("47+85=", "132")
    assert two_digit_addition(305, 6) == ("03+05=", "8")


def small(kind: str, seed: int = 0, train_size: int = 500) -> Dataset:
    return build_dataset(TaskConfig(kind=kind, train_size=train_size, heldout_size=100), seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_distinct_and_held_out_ones_are_not_trained_on(kind: str) -> None:
    data = small(kind)
    texts = [prompt.text for prompt in data.train + data.heldout]
    assert (len(data.train), len(data.heldout), len(set(texts))) == (500, 100, 600)
    assert len({prompt.uid for prompt in data.train + data.heldout}) == 600


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_prompts_do_not_depend_on_the_training_size(kind: str) -> None:
    assert small(kind).heldout == small(kind, train_size=50).heldout


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_decides_the_data(kind: str) -> None:
    assert small(kind) == small(kind)
    assert small(kind).train != small(kind, seed=1).train


def test_alphabet_is_what_prompts_and_answers_use() -> None:
    assert small("reverse_digits").alphabet == "0123456789>"
    assert small("two_digit_addition").alphabet == "+0123456789="


def test_training_takes_what_the_held_out_problems_leave() -> None:
    data = build_dataset(TaskConfig(kind="two_digit_addition"), 0)
    assert (len(data.train), len(data.heldout)) == (10_000 - 256, 256)


def test_a_space_too_small_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"task.heldout_size = 256: .* only 10 distinct prompts"):
        build_dataset(TaskConfig(digits=1), 0)


def test_only_procedural_tasks_have_a_known_size() -> None:
    assert problem_count(TaskConfig(digits=3)) == 1000
    assert problem_count(TaskConfig(kind="jsonl")) is None


def test_data_is_the_same_in_a_process_with_another_hash_seed() -> None:
    code = (
        "import hashlib; from steps.config import TaskConfig; from steps.tasks.catalog import build_dataset\n"
        "from steps.tasks.frozen import dataset_to_jsonl\n"
        "data = build_dataset(TaskConfig(train_size=500, heldout_size=100), 0)\n"
        "print(hashlib.sha256(dataset_to_jsonl(data)).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
