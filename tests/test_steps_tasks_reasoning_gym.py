"""Every reasoning-gym task by name: built, stored as JSON, read back, and its gold answer accepted."""

import importlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from steps.config import TaskConfig
from steps.errors import ConfigError
from steps.records import Prompt
from steps.tasks.catalog import build_dataset, load_verifier
from steps.tasks.dataset import Dataset
from steps.tasks.frozen import dataset_from_jsonl, dataset_to_jsonl
from steps.tasks.reasoning_gym_tasks import GenerationRequest, dataset_of_entries, generate_entries
from steps.tasks.scoring import score

pytest.importorskip("reasoning_gym")

TASK_NAMES = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)

OPTIONS: dict[str, dict[str, Any]] = {
    # A mixture of other tasks; without parts there is nothing to generate.
    "composite": {"datasets": [{"name": "chain_sum"}, {"name": "lcm", "weight": 2.0, "config": {"min_numbers": 2}}]},
}
EXAMPLE_ANSWERS = {
    # These tasks have many right answers and give none as "the" answer; an example is in their metadata.
    "graph_color": lambda metadata: json.dumps({str(node): c for node, c in metadata["possible_answer"]["__items__"]}),
    "propositional_logic": lambda metadata: metadata["example_answer"],
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
}
WITHOUT_EXAMPLE = {
    "boxnet": "a plan for several agents; reasoning-gym gives no solution",
    "rush_hour": "a list of moves; reasoning-gym gives no solution",
}
ACCEPTS_EVERY_ANSWER = {"game_of_life_halting": "it compares the truth values of two strings"}


def task_of(name: str, verifier: str = "reasoning_gym", train_size: int = 2, heldout_size: int = 1) -> TaskConfig:
    return TaskConfig(
        kind="reasoning_gym",
        reasoning_gym_task=name,
        reasoning_gym_options=OPTIONS.get(name, {}),
        verifier=verifier,
        train_size=train_size,
        heldout_size=heldout_size,
    )


def build_here(task: TaskConfig, seed: int = 0) -> Dataset:
    """As `build_dataset`, in this process: the package is loaded once for all tasks."""
    request = GenerationRequest(
        name=task.reasoning_gym_task,
        options=task.reasoning_gym_options,
        seed=seed,
        train_size=task.train_size,
        heldout_size=task.heldout_size,
    )
    return dataset_of_entries(task, generate_entries(request))


def gold(name: str, prompt: Prompt) -> str:
    return EXAMPLE_ANSWERS[name](prompt.meta["entry"]["metadata"]) if name in EXAMPLE_ANSWERS else prompt.answer


def test_the_exceptions_are_tasks() -> None:
    assert len(TASK_NAMES) >= 100
    assert {*OPTIONS, *EXAMPLE_ANSWERS, *WITHOUT_EXAMPLE, *ACCEPTS_EVERY_ANSWER} <= set(TASK_NAMES)


@pytest.mark.parametrize("name", TASK_NAMES)
def test_every_task_builds_and_accepts_its_gold_answer(name: str) -> None:
    task = task_of(name, verifier="exact" if name in ACCEPTS_EVERY_ANSWER else "reasoning_gym")
    data = dataset_from_jsonl(dataset_to_jsonl(build_here(task)))
    verifier = load_verifier(task)
    texts = [prompt.text for prompt in data.train + data.heldout]
    assert (len(data.train), len(data.heldout), len(set(texts))) == (2, 1, 3)
    for prompt in data.train + data.heldout:
        status, value, detail = score(verifier, prompt, "zq", 20.0)
        assert (status, detail) == ("ok", "")
        assert value is not None and value <= 0.25, "an answer without sense"
        if name in WITHOUT_EXAMPLE:
            assert prompt.answer == ""
            continue
        status, value, detail = score(verifier, prompt, gold(name, prompt), 20.0)
        assert (status, detail) == ("ok", "")
        assert value is not None
        assert value >= 0.99


def test_an_answer_that_a_scorer_cannot_read_is_wrong_not_an_error() -> None:
    task = task_of("prime_factorization")
    (prompt, *_) = build_here(task).train
    assert score(load_verifier(task), prompt, "two times three", 5.0) == ("ok", 0.0, "")


def test_a_scorer_that_fails_on_its_own_answer_is_an_error() -> None:
    task = task_of("prime_factorization")
    (prompt, *_) = build_here(task).train
    prompt.meta["entry"]["answer"] = "no number"
    assert score(load_verifier(task), prompt, "two times three", 5.0)[0] == "error"


@pytest.mark.parametrize("name", ACCEPTS_EVERY_ANSWER)
def test_a_scorer_that_accepts_every_answer_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match='accepts every answer, .* set task.verifier = "exact"'):
        load_verifier(task_of(name))


def test_exact_verifier_compares_with_the_answer() -> None:
    task = task_of("spell_backward", verifier="exact")
    (prompt, *_) = build_here(task).train
    assert load_verifier(task)(prompt, prompt.answer) == 1.0


def test_a_task_without_an_answer_needs_its_own_verifier() -> None:
    with pytest.raises(ConfigError, match='set task.verifier = "reasoning_gym"'):
        build_here(task_of("rush_hour", verifier="exact"))


def test_options_are_passed_on() -> None:
    task = TaskConfig(
        kind="reasoning_gym",
        reasoning_gym_task="spell_backward",
        reasoning_gym_options={"min_word_len": 3, "max_word_len": 4},
        train_size=30,
        heldout_size=5,
    )
    assert {len(prompt.answer) for prompt in build_here(task).train} == {3, 4}


def test_questions_are_distinct_and_capped_by_what_there_is() -> None:
    task = TaskConfig(
        kind="reasoning_gym",
        reasoning_gym_task="coin_flip",
        reasoning_gym_options={"min_trials": 1, "max_trials": 2},
        train_size=100_000,
        heldout_size=2,
    )
    data = build_here(task)
    texts = [prompt.text for prompt in data.train + data.heldout]
    assert len(set(texts)) == len(texts) < 100_000
    with pytest.raises(ConfigError, match="gave only .* distinct questions"):
        dataset_of_entries(task_of("coin_flip", heldout_size=3), generate_entries_of(data))


def generate_entries_of(data: Dataset) -> list[dict[str, Any]]:
    return [prompt.meta["entry"] for prompt in data.heldout]


def test_neighbouring_seeds_share_no_questions() -> None:
    first, second = (build_here(task_of("spell_backward", train_size=40), seed) for seed in (0, 1))
    assert len({p.text for p in first.train} & {p.text for p in second.train}) < 5


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("spell_backwards", {}, "did you mean spell_backward?"),
        ("qqqqqqqqqq", {}, "known are ab, acre"),
        ("spell_backward", {"max_word_length": 4}, "did you mean max_word_len?"),
        ("spell_backward", {"size": 4}, "set task.train_size, task.heldout_size and seed instead"),
        ("spell_backward", {"min_word_len": 9, "max_word_len": 3}, "spell_backward refuses"),
        ("spell_backward", {"min_word_len": "x"}, "spell_backward refuses"),
        ("composite", {}, "composite refuses its default options: Must specify at least one dataset"),
        ("composite", {"datasets": [{"nme": "lcm"}]}, "composite refuses"),
        ("composite", {"datasets": 3}, "composite refuses"),
    ],
)
def test_a_wrong_name_or_option_is_a_config_error(name: str, options: dict[str, Any], reason: str) -> None:
    task = TaskConfig(
        kind="reasoning_gym", reasoning_gym_task=name, reasoning_gym_options=options, train_size=2, heldout_size=1
    )
    with pytest.raises(ConfigError) as caught:
        build_here(task)
    assert reason in str(caught.value)
    assert str(caught.value).startswith("task.reasoning_gym_")
    assert "\n" not in str(caught.value)


def test_the_child_process_hands_on_prompts_and_errors() -> None:
    task = task_of("chain_sum")
    assert build_dataset(task, 3) == build_here(task, 3)
    with pytest.raises(ConfigError, match=r'^task.reasoning_gym_task = "chain_sums": .* did you mean chain_sum\?$'):
        build_dataset(task_of("chain_sums"), 0)


def test_a_seed_gives_the_same_prompts_whatever_the_hash_seed() -> None:
    """word_ladder walks over sets of strings."""
    code = (
        "import sys; from steps.config import TaskConfig; from steps.tasks.catalog import build_dataset\n"
        "from steps.tasks.frozen import dataset_to_jsonl\n"
        "task = TaskConfig(kind='reasoning_gym', reasoning_gym_task='word_ladder', train_size=6, heldout_size=2)\n"
        "sys.stdout.buffer.write(dataset_to_jsonl(build_dataset(task, 0)))"
    )
    copies = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(copies) == 1
