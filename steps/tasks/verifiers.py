"""How a response is verified: each verifier takes the prompt and the response's text and returns 0..1."""

import functools
import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from steps.errors import ConfigError
from steps.records import Prompt

if TYPE_CHECKING:
    from steps.tasks.dataset import Verifier

NUMERIC_TOLERANCE = 1e-6
"""Largest difference that counts as equal, relative to the answer where it is above 1."""

_LONGEST_FORMULA = 200
_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_NUMBER = re.compile(rf"(?:(?<![\w.)])[-+\u2212])?{_UNSIGNED}(?:\s*/\s*{_UNSIGNED})?")


def exact(prompt: Prompt, response: str) -> float:
    """1 if the response is the answer, leading and trailing white space aside."""
    return float(response.strip() == prompt.answer.strip())


def per_position(prompt: Prompt, response: str) -> float:
    """Fraction of positions with the right character: matches / the longer of the two lengths."""
    given, wanted = response.strip(), prompt.answer.strip()
    longest = max(len(given), len(wanted))
    return sum(a == b for a, b in zip(given, wanted, strict=False)) / longest if longest else 1.0


def last_number(text: str) -> float | None:
    """The last number in a text: `-1,234.5`, `2e3`, `3/4`; None where there is none or it is not finite."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    terms = [float(term) for term in found[-1].replace("\u2212", "-").replace(",", "").split("/")]
    value = terms[0] if len(terms) == 1 else terms[0] / terms[1] if terms[1] else math.nan
    return value if math.isfinite(value) else None


def numeric(prompt: Prompt, response: str) -> float:
    """1 if the response's last number is the answer's last number, within NUMERIC_TOLERANCE."""
    wanted, given = last_number(prompt.answer), last_number(response)
    if wanted is None:
        raise ValueError(f"the answer {prompt.answer!r} holds no number")
    if given is None:
        return 0.0
    return float(abs(given - wanted) <= NUMERIC_TOLERANCE * max(1.0, abs(wanted)))


def regex(prompt: Prompt, response: str) -> float:
    """1 if the answer, a regular expression of Python's `re`, matches the whole stripped response."""
    return float(re.fullmatch(prompt.answer, response.strip()) is not None)


BY_NAME: "dict[str, Verifier]" = {"exact": exact, "numeric": numeric, "regex": regex, "per_position": per_position}
"""Those that need nothing but this module."""


def answer_problem(verifier: str, answer: str) -> str | None:
    """Why no response can ever satisfy this answer; None when all is well. Cheap enough for every row."""
    if verifier == "numeric" and last_number(answer) is None:
        return f"answer {answer[:40]!r} holds no number, which the numeric verifier compares"
    if verifier == "regex":
        try:
            re.compile(answer)
        except (re.error, OverflowError, RecursionError) as error:
            return f"answer {answer[:40]!r} is not a regular expression: {error}"
    return None


def load_math_verify() -> "Verifier":
    """The math_verify package's symbolic comparison of LaTeX and plain expressions.

    A short text without delimiters in which the package finds nothing by itself is read as one formula.

    Its own time limits use SIGALRM, which belongs to `scoring.score`; they are off.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task.verifier = math_verify: {error.name} is not installed; install the extra `tasks`"
        ) from error

    import logging

    # It warns, once a process, that its time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def parse_text(text: str) -> list[Any]:
        is_latex = "\\" in text and not any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
        parsed: list[Any] = [] if is_latex else parse(text, parsing_timeout=None)
        if not parsed and "$" not in text and len(text) <= _LONGEST_FORMULA:
            parsed = parse(f"${text}$", parsing_timeout=None)
        return parsed

    @functools.lru_cache(maxsize=4096)
    def parse_answer(answer: str) -> list[Any]:
        parsed = parse_text(answer)
        if not parsed:
            raise ValueError(f"the answer {answer!r} holds no mathematical expression")
        return parsed

    def math_verify(prompt: Prompt, response: str) -> float:
        wanted = parse_answer(prompt.answer)
        return float(verify(wanted, parse_text(response), timeout_seconds=None))

    return math_verify


def load_entry_point(spec: str) -> "Verifier":
    """A user's `package.module:function`, called with (prompt text, response, answer, meta).

    Raises:
        ConfigError: the module can't be imported, or the function is missing or takes other arguments.
    """
    where = f"task.verifier = {spec}"
    module_name, _, function_name = spec.partition(":")
    function = _import_attribute(module_name, function_name, where)
    if not callable(function):
        raise ConfigError(f"{where}: {function_name} is not a function")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{where}: {function_name} is async; write a plain function")
    if not _takes_four_arguments(function):
        raise ConfigError(f"{where}: {function_name} must take (prompt, response, answer, meta)")

    def entry_point(prompt: Prompt, response: str) -> float:
        result: float = function(prompt.text, response, prompt.answer, dict(prompt.meta))
        return result

    return entry_point


def _import_attribute(module_name: str, function_name: str, where: str) -> object:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{where}: there is no module {error.name} in the working directory, PYTHONPATH or the environment"
        ) from error
    except (Exception, SystemExit) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise ConfigError(f"{where}: importing {module_name} failed: {type(error).__name__}: {reason}") from error
    if not hasattr(module, function_name):
        raise ConfigError(f"{where}: module {module_name} has no function {function_name}")
    return getattr(module, function_name)


def _takes_four_arguments(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind("prompt", "response", "answer", {})
    except TypeError:
        return False
    except ValueError:
        return True  # a built-in without a signature: the first call tells
    return True
