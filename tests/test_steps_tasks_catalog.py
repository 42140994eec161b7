"""What a warm-up may imitate."""

import pytest

from steps.config import TaskConfig
from steps.errors import ConfigError
from steps.tasks.catalog import build_dataset, demonstrations
from steps.tasks.dataset import make_dataset, make_prompt


def test_demonstrations_are_the_training_prompts_with_their_answers() -> None:
    task = TaskConfig(kind="sort_digits", digits=3, train_size=5, heldout_size=2)
    data = build_dataset(task, 0)
    assert demonstrations(task, data) == [(prompt.text, prompt.answer) for prompt in data.train]


def test_prompts_without_an_answer_are_left_out_and_none_at_all_is_refused() -> None:
    task = TaskConfig(kind="reasoning_gym", verifier="reasoning_gym")
    silent, spoken = make_prompt("a", ""), make_prompt("b", "c")
    assert demonstrations(task, make_dataset([silent, spoken], [])) == [("b", "c")]
    with pytest.raises(ConfigError, match="no training prompt has an answer .*set warmup.max_steps = 0") as caught:
        demonstrations(task, make_dataset([silent], [spoken]))
    assert "\n" not in str(caught.value)


def test_patterns_are_never_demonstrated() -> None:
    task = TaskConfig(kind="jsonl", verifier="regex")
    with pytest.raises(ConfigError, match="regex .*set warmup.max_steps = 0 .*checkpoint") as caught:
        demonstrations(task, make_dataset([make_prompt("a", "b+")], []))
    assert "\n" not in str(caught.value)
