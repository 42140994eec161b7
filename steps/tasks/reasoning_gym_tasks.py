"""Every task of the reasoning-gym package by its name.

Some of its generators walk over sets of strings, whose order Python draws anew for every process. Generation therefore
runs in a child process with a fixed hash seed (`python -m steps.tasks.reasoning_gym_tasks`), so that a seed gives the
same prompts everywhere.
"""

import contextlib
import difflib
import hashlib
import importlib
import json
import numbers
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from steps.config import TaskConfig
from steps.errors import ConfigError
from steps.records import Prompt
from steps.tasks.dataset import PRINTABLE_ASCII, Dataset, Verifier, make_dataset, make_prompt

_TUPLE, _ITEMS = "__tuple__", "__items__"
_FULL_SCORE = 0.99
_NONSENSE = "zq"
_OURS = ("size", "seed")
_FRUITLESS_DRAWS = 2000
"""Draws in a row without a new question after which a task counts as exhausted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """What the child process is asked for."""

    name: str
    options: dict[str, Any]
    seed: int
    train_size: int
    heldout_size: int


def build_reasoning_gym(task: TaskConfig, seed: int) -> Dataset:
    """Distinct questions: the first `heldout_size` are held out, the next `train_size` (or all there are) train.

    Raises:
        ConfigError: the task, an option or the package does not exist, or there are too few distinct questions.
    """
    request = GenerationRequest(
        name=task.reasoning_gym_task,
        options=task.reasoning_gym_options,
        seed=seed,
        train_size=task.train_size,
        heldout_size=task.heldout_size,
    )
    entries = generate_entries(request) if sys.flags.hash_randomization == 0 else _generate_in_child(request)
    return dataset_of_entries(task, entries)


def dataset_of_entries(task: TaskConfig, entries: list[dict[str, Any]]) -> Dataset:
    """Split encoded entries into held-out and training prompts."""
    if len(entries) <= task.heldout_size:
        raise ConfigError(
            f"task.heldout_size = {task.heldout_size}: {task.reasoning_gym_task} gave only {len(entries)} distinct "
            "questions with these options; lower it, or widen task.reasoning_gym_options"
        )
    has_answers = all(isinstance(entry["answer"], str) and entry["answer"] for entry in entries)
    if not has_answers and task.verifier != "reasoning_gym":
        raise ConfigError(
            f"task.verifier = {task.verifier}: {task.reasoning_gym_task} gives no single answer to compare with; "
            'set task.verifier = "reasoning_gym"'
        )
    prompts = [make_prompt(entry["question"], entry["answer"] or "", {"entry": entry}) for entry in entries]
    split = task.heldout_size
    return make_dataset(prompts[split:], prompts[:split], "" if has_answers else PRINTABLE_ASCII)


def generate_entries(request: GenerationRequest) -> list[dict[str, Any]]:
    """Distinct entries (question, answer, metadata) as JSON-able data, in the order of generation.

    Raises:
        ConfigError: the task or an option is wrong.
    """
    wanted = request.train_size + request.heldout_size
    size = 2 * wanted + _FRUITLESS_DRAWS
    source = _open(request.name, request.options, _derived_seed(request.name, request.seed), size)
    entries: dict[str, dict[str, Any]] = {}
    fruitless = 0
    for entry in _draw(source, request, size):
        fruitless += 1
        if entry["question"].strip() and entry["question"] not in entries:
            entries[entry["question"]] = {key: _encode(entry[key]) for key in ("question", "answer", "metadata")}
            fruitless = 0
        if len(entries) == wanted or fruitless == _FRUITLESS_DRAWS:
            break
    return list(entries.values())


def _draw(source: Any, request: GenerationRequest, size: int) -> Iterator[dict[str, Any]]:
    for index in range(size):
        try:
            yield source[index]
        except Exception as error:
            raise ConfigError(
                f"task.reasoning_gym_options: {request.name} failed to generate a question with "
                f"{_options_text(request.options)}: {_one_line(error)}"
            ) from error


def load_reasoning_gym_verifier(task: TaskConfig) -> Verifier:
    """The task's own scoring of an answer, 0..1 with its partial credit.

    Some scorers raise on an answer that they can't read. If they do accept the known answer, the response is wrong and
    scores 0; if not, the scorer is at fault and the exception passes.

    Raises:
        ConfigError: the task, an option or the package does not exist, or the scorer accepts every answer.
    """
    source = _open(task.reasoning_gym_task, task.reasoning_gym_options, 0, 1)
    if _accepts_nonsense(source):
        raise ConfigError(
            f"task.verifier = reasoning_gym: the scorer of {task.reasoning_gym_task} accepts every answer, "
            'so there is nothing to learn from it; set task.verifier = "exact"'
        )

    def reasoning_gym(prompt: Prompt, response: str) -> float:
        entry = _decode(prompt.meta["entry"])
        try:
            return float(source.score_answer(response, entry))
        except Exception:
            if not isinstance(entry["answer"], str) or source.score_answer(entry["answer"], entry) < _FULL_SCORE:
                raise
            return 0.0

    return reasoning_gym


def _accepts_nonsense(source: Any) -> bool:
    """Seen in reasoning-gym 0.1.25: game_of_life_halting compares the truth values of two strings."""
    entry = source[0]
    try:
        return bool(source.score_answer(_NONSENSE, entry) >= _FULL_SCORE)
    except Exception:
        return False  # it can't read nonsense, so it does not accept it


def _open(name: str, options: dict[str, Any], seed: int, size: int) -> Any:
    catalog = _catalog()
    if name not in catalog:
        near = difflib.get_close_matches(name, catalog, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(catalog))}"
        raise ConfigError(f'task.reasoning_gym_task = "{name}": reasoning-gym has no such task; {hint}')
    known = [field.name for field in fields(catalog[name][1]) if field.name not in _OURS]
    for option in options:
        if option not in known:
            raise ConfigError(f"task.reasoning_gym_options.{option}: {_unknown_option(name, option, known)}")
    try:
        return _factory().create_dataset(name, seed=seed, size=size, **_composite_specs(name, options))
    except Exception as error:
        given = _options_text(options)
        raise ConfigError(f"task.reasoning_gym_options: {name} refuses {given}: {_one_line(error)}") from error


def _composite_specs(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """`composite` takes its parts as objects; TOML has tables."""
    if name != "composite" or "datasets" not in options:
        return options
    spec: Callable[..., Any] = importlib.import_module("reasoning_gym.composite").DatasetSpec
    return {**options, "datasets": [spec(**{"weight": 1.0, "config": {}, **part}) for part in options["datasets"]]}


def _unknown_option(name: str, option: str, known: list[str]) -> str:
    if option in _OURS:
        return "set task.train_size, task.heldout_size and seed instead"
    near = difflib.get_close_matches(option, known, n=1, cutoff=0.4)
    return f"{name} has no such option; " + (f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}")


def _factory() -> Any:
    try:
        importlib.import_module("reasoning_gym")  # its package registers the tasks
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task.kind = reasoning_gym: {error.name} is not installed; install the extra `tasks`"
        ) from error
    return importlib.import_module("reasoning_gym.factory")


def _catalog() -> dict[str, tuple[type, type]]:
    catalog: dict[str, tuple[type, type]] = _factory().DATASETS
    return catalog


def _derived_seed(name: str, seed: int) -> int:
    """Entry i of seed s is entry i - 1 of seed s + 1 in reasoning-gym; a hash keeps neighbouring seeds apart."""
    return int.from_bytes(hashlib.sha256(f"{name}/{seed}".encode()).digest()[:4], "big") >> 1


def _encode(value: Any) -> Any:
    """Metadata as JSON: tuples and dictionaries with other keys than strings are tagged, numpy scalars are plain."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {str(key): _encode(item) for key, item in value.items()}
        return {_ITEMS: [[_encode(key), _encode(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [_encode(item) for item in value]}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    raise TypeError(f"reasoning-gym metadata of type {type(value).__name__} has no JSON form")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(_decode(item) for item in value[_TUPLE])
    if value.keys() == {_ITEMS}:
        return {_decode(key): _decode(item) for key, item in value[_ITEMS]}
    return {key: _decode(item) for key, item in value.items()}


def _options_text(options: dict[str, Any]) -> str:
    return json.dumps(options) if options else "its default options"


def _one_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _generate_in_child(request: GenerationRequest) -> list[dict[str, Any]]:
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    asked = json.dumps({field.name: getattr(request, field.name) for field in fields(request)})
    child = subprocess.run(
        [sys.executable, "-m", __name__], input=asked, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if child.returncode == ConfigError.exit_code:
        raise ConfigError(child.stdout.strip())
    child.check_returncode()
    entries: list[dict[str, Any]] = json.loads(child.stdout)
    return entries


def main() -> int:
    """Read a request from stdin, write the entries (exit 0) or the user's mistake (exit 78) to stdout."""
    request = GenerationRequest(**json.load(sys.stdin))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            entries = generate_entries(request)
    except ConfigError as error:
        print(error)
        return ConfigError.exit_code
    json.dump(entries, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
