"""Every outcome of a verifier is a status; signals and timers are given back."""

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
import pytest

from steps.config import TaskConfig
from steps.errors import Interrupted
from steps.records import Prompt
from steps.tasks.catalog import load_verifier
from steps.tasks.dataset import make_prompt
from steps.tasks.scoring import score

PROMPT = make_prompt("q", "a")


def outcome_of(function: Callable[[], object], timeout_s: float = 5.0) -> tuple[str, float | None, str]:
    def verifier(prompt: Prompt, response: str) -> float:
        return function()  # type: ignore[return-value]

    return score(verifier, PROMPT, "r", timeout_s)


def raise_(error: BaseException) -> Callable[[], float]:
    def function() -> float:
        raise error

    return function


@pytest.mark.parametrize("value", [0, 1, 0.25, True, np.float32(0.5), np.int64(1), Fraction(1, 2)])
def test_a_number_in_range_is_ok(value: float) -> None:
    outcome = outcome_of(lambda: value)
    assert outcome == ("ok", float(value), "")
    assert type(outcome[1]) is float


@pytest.mark.parametrize("value", [1.0001, -0.1, float("nan"), float("inf"), 10**400, None, "1", [1.0], 1j])
def test_anything_else_is_an_error_without_a_value(value: object) -> None:
    status, reward, detail = outcome_of(lambda: value)
    assert (status, reward) == ("error", None)
    assert detail


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class Custom(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError(), "ValueError"),
        (SystemExit(3), "SystemExit: 3"),
        (Custom("x"), "Custom: x"),
        (Unprintable(), "Unprintable"),
        (RecursionError("deep"), "RecursionError: deep"),
        (ValueError("x" * 1000), "ValueError: " + "x" * 188),
    ],
)
def test_an_exception_is_an_error_with_a_short_detail(error: BaseException, detail: str) -> None:
    assert outcome_of(raise_(error)) == ("error", None, detail)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("SIGTERM")])
def test_interruptions_pass(error: BaseException) -> None:
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(type(error)):
        outcome_of(raise_(error))
    assert signal.getsignal(signal.SIGALRM) is handler


def spin() -> float:
    while True:
        pass


def swallow_everything_once() -> float:
    try:
        spin()
    except BaseException:
        pass
    return 1.0


def swallow_and_go_on() -> float:
    try:
        spin()
    except BaseException:
        spin()
    return 1.0


@pytest.mark.parametrize("function", [spin, lambda: time.sleep(60), swallow_everything_once, swallow_and_go_on])
def test_a_verifier_that_is_late_is_a_timeout(function: Callable[[], float]) -> None:
    assert outcome_of(function, timeout_s=0.05) == ("timeout", None, "no result within 0.05 s")


def test_catastrophic_backtracking_is_a_timeout() -> None:
    prompt = make_prompt("q", "(a+)+b")
    assert score(load_verifier(TaskConfig(verifier="regex")), prompt, "a" * 60, 0.05)[0] == "timeout"
    assert re.fullmatch(prompt.answer, "ab")


@pytest.mark.parametrize("timeout_s", [1e-12, 1e300])
def test_extreme_limits_are_usable(timeout_s: float) -> None:
    assert outcome_of(lambda: 1.0, timeout_s)[0] in ("ok", "timeout")


@contextmanager
def alarm_of_the_caller(delay_s: float) -> Iterator[list[int]]:
    fired: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, frame: fired.append(number))
    timer = signal.setitimer(signal.ITIMER_REAL, delay_s)
    try:
        yield fired
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("function", [lambda: 1.0, raise_(ValueError()), spin])
def test_the_callers_alarm_is_given_back(function: Callable[[], float]) -> None:
    with alarm_of_the_caller(100.0) as fired:
        handler = signal.getsignal(signal.SIGALRM)
        outcome_of(function, timeout_s=0.05)
        assert signal.getsignal(signal.SIGALRM) is handler
        assert 0.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100.0
        assert fired == []


def test_a_callers_alarm_that_came_due_meanwhile_still_fires() -> None:
    with alarm_of_the_caller(0.01) as fired:
        outcome_of(spin, timeout_s=0.05)
        while not fired:
            time.sleep(0.001)


def test_no_alarm_is_left_behind() -> None:
    with alarm_of_the_caller(0.0):
        for function in (spin, lambda: 1.0):
            outcome_of(function, timeout_s=0.02)
            assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_another_thread_is_refused() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            outcome_of(lambda: 1.0)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
