"""One call of a verifier under a wall-clock limit: a value, or the reason why there is none."""

import math
import numbers
import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from steps.errors import Interrupted
from steps.records import Prompt, RewardStatus

if TYPE_CHECKING:
    from steps.tasks.dataset import Verifier

Outcome = tuple[RewardStatus, float | None, str]
"""(status, value in 0..1 or None, detail)."""

_DETAIL_CHARACTERS = 200
_SHORTEST_S = 1e-3
_LONGEST_S = 1e8


class _OutOfTime(BaseException):
    """Not an Exception, so that a verifier's `except Exception` lets it pass."""


@dataclass(slots=True)
class _Deadline:
    armed: bool = False
    passed: bool = False

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        self.passed = True
        if self.armed:
            raise _OutOfTime


def score(verifier: "Verifier", prompt: Prompt, response: str, timeout_s: float) -> Outcome:
    """Score one response: (status, value in 0..1 or None, detail).

    Whatever the verifier does is its status: a late answer is `timeout`, an exception, SystemExit, or a result that is
    not a number in 0..1 is `error`. KeyboardInterrupt and `Interrupted` pass. SIGALRM's handler and timer are given
    back as they were.

    Raises:
        RuntimeError: not called on the main thread, where alone a signal can stop a verifier.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("score() must run on the main thread: a verifier is stopped by a signal")
    deadline = _Deadline()
    started_s = time.monotonic()
    outer_timer = signal.setitimer(signal.ITIMER_REAL, 0.0)
    outer_handler = signal.signal(signal.SIGALRM, deadline)
    late: Outcome = "timeout", None, f"no result within {timeout_s:g} s"
    try:
        returned = _call(verifier, prompt, response, min(max(timeout_s, _SHORTEST_S), _LONGEST_S), deadline)
    except _OutOfTime:
        returned = late
    finally:
        deadline.armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, outer_handler)
        _resume_timer(outer_timer, time.monotonic() - started_s)
    # A verifier may have swallowed the alarm and returned something all the same.
    return late if deadline.passed else returned


def _call(verifier: "Verifier", prompt: Prompt, response: str, limit_s: float, deadline: _Deadline) -> Outcome:
    try:
        deadline.armed = True
        # The interval strikes again where a bare `except:` swallowed the first alarm.
        signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
        return _checked(verifier(prompt, response))
    except (_OutOfTime, KeyboardInterrupt, Interrupted):
        raise
    except BaseException as error:
        return "error", None, _describe(error)
    finally:
        deadline.armed = False


def _checked(result: object) -> Outcome:
    if not isinstance(result, numbers.Real):
        return "error", None, f"the verifier returned {type(result).__name__}, not a number"
    value = float(result)
    if math.isnan(value) or not 0.0 <= value <= 1.0:
        return "error", None, f"the verifier returned {value:g}, outside 0..1"
    return "ok", value, ""


def _describe(error: BaseException) -> str:
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = []  # the exception's own __str__ failed; its type still says what happened
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text[:_DETAIL_CHARACTERS]


def _resume_timer(timer: tuple[float, float], elapsed_s: float) -> None:
    delay_s, interval_s = timer
    if delay_s > 0.0:
        signal.setitimer(signal.ITIMER_REAL, max(delay_s - elapsed_s, _SHORTEST_S), interval_s)
