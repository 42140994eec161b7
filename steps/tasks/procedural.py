"""Tasks that are generated from a seed: each has a finite space of problems, numbered from 0."""

import random
from collections.abc import Callable

from steps.config import TaskConfig
from steps.errors import ConfigError
from steps.tasks.dataset import Dataset, make_dataset, make_prompt

_ADDITION_SPACE = 100 * 100


def reverse_digits(problem: int, digits: int) -> tuple[str, str]:
    """`482913>` and its answer `319284`."""
    text = f"{problem:0{digits}d}"
    return f"{text}>", text[::-1]


def sort_digits(problem: int, digits: int) -> tuple[str, str]:
    """`482913>` and its answer `123489`."""
    text = f"{problem:0{digits}d}"
    return f"{text}>", "".join(sorted(text))


def two_digit_addition(problem: int, digits: int) -> tuple[str, str]:
    """`47+85=` and its answer `132`; both terms are written with two digits, 00 to 99."""
    left, right = divmod(problem, 100)
    return f"{left:02d}+{right:02d}=", str(left + right)


_PROBLEMS: dict[str, Callable[[int, int], tuple[str, str]]] = {
    "reverse_digits": reverse_digits,
    "sort_digits": sort_digits,
    "two_digit_addition": two_digit_addition,
}


def problem_count(task: TaskConfig) -> int | None:
    """Distinct problems of a procedural task; None for the other kinds."""
    if task.kind not in _PROBLEMS:
        return None
    return _ADDITION_SPACE if task.kind == "two_digit_addition" else int(10**task.digits)


def build_procedural(task: TaskConfig, seed: int) -> Dataset:
    """Distinct problems in a seeded order; training gets `train_size`, or what the held-out problems leave.

    Raises:
        ConfigError: the held-out problems leave none to train on.
    """
    space = problem_count(task)
    if space is None:
        raise ValueError(f"{task.kind} is not a procedural task")
    if task.heldout_size >= space:
        raise ConfigError(
            f"task.heldout_size = {task.heldout_size}: {task.kind} has only {space} distinct prompts; "
            f"set it below {space}" + ("" if task.kind == "two_digit_addition" else " or raise task.digits")
        )
    rng = random.Random(f"{task.kind}/{task.digits}/{seed}")
    heldout = rng.sample(range(space), task.heldout_size)
    taken = set(heldout)
    draws = rng.sample(range(space), min(space, task.train_size + task.heldout_size))
    train = [problem for problem in draws if problem not in taken][: task.train_size]
    make = _PROBLEMS[task.kind]
    return make_dataset(
        [make_prompt(*make(problem, task.digits)) for problem in train],
        [make_prompt(*make(problem, task.digits)) for problem in heldout],
    )
