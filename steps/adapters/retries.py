"""The one policy by which calls of a service are repeated.

An adapter explains each failure in one line, and by the exception's class says what a repetition would be worth:

- `Outage`: the service is away, overloaded or was interrupted (S3: 5xx, SlowDown, timeouts, resets, half a body;
  database: connection lost, starting up, deadlock, locked). Repeated until $MOERL_SERVICE_DEADLINE_S have passed since
  the call's first failure, after pauses that grow and are drawn at random.
- `Outage` with `tries`: what a few repetitions mend or nothing does (an expired token, a lost race, a wrong checksum).
- Everything else is final and is raised at once.

Only whole functions are repeated, each of them one transaction or one request. An answer can be lost after the work was
done: such a function must know its own work again when it is called a second time.
"""

import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_random_exponential

from steps.environment import service_deadline_s
from steps.errors import Interrupted, ServiceUnavailable, StepError
from steps.interruption import Interruption

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
PATIENCE_WHEN_INTERRUPTED_S = 2.0
"""How long a call still waits for a service once the step was told to stop."""
PAUSE_WHEN_INTERRUPTED_S = 0.2
SILENT_S = 2.0
"""What passes sooner isn't worth a line."""
SAY_EVERY_S = 5.0
POLL_S = 0.02

P = ParamSpec("P")
R = TypeVar("R")


class Outage(ServiceUnavailable):
    """A failure that may pass by itself.

    Args:
        tries: calls after which it is final, the first one included; None: the deadline alone decides.
        verdict: what is raised when it is final; None: a ServiceUnavailable with the same message.
    """

    def __init__(self, message: str, *, tries: int | None = None, verdict: StepError | None = None) -> None:
        super().__init__(message)
        self.tries = tries
        self.verdict = verdict


class _Process:
    """Who waits; set once a process."""

    interruption: Interruption | None = None
    step: str = "waiting"


def heed(interruption: Interruption, step: str) -> None:
    """Let every wait of this process end soon after an interruption, and say in the step's name what it waits for."""
    _Process.interruption, _Process.step = interruption, step


def retried(function: Callable[P, R]) -> Callable[P, R]:
    """Repeat `function` while it raises Outage.

    Raises:
        ServiceUnavailable: the outage outlasted the deadline. Never an Outage: of nested functions only one waits.
        Interrupted: the step was told to stop meanwhile.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        wait = _Wait()
        retrying = Retrying(
            retry=retry_if_exception_type(Outage),
            stop=wait.is_over,
            wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            sleep=wait.pause,
            retry_error_callback=wait.end,
        )
        result = retrying(function, *args, **kwargs)
        wait.say_if_back()
        return result

    return call


class _Wait:
    """The repetitions of one call. Times are monotonic: a clock that is set doesn't end or prolong a wait."""

    def __init__(self) -> None:
        self._first_failure_s: float | None = None
        self._told_to_stop_s: float | None = None
        self._said_s: float | None = None
        self._deadline_s = 0.0
        self._limited_failures = 0

    def is_over(self, state: RetryCallState) -> bool:
        outage, now_s = _outage_of(state), time.monotonic()
        if self._first_failure_s is None:
            self._first_failure_s, self._deadline_s = now_s, service_deadline_s()
        if outage.tries is not None:
            self._limited_failures += 1
            if self._limited_failures >= outage.tries:
                return True
        if self._is_told_to_stop() and now_s - (self._told_to_stop_s or now_s) >= PATIENCE_WHEN_INTERRUPTED_S:
            return True
        self._say(outage)
        return self._waited_s() >= self._deadline_s

    def pause(self, seconds: float) -> None:
        """Sleep, at most until the deadline; a stop that was asked for, also meanwhile, makes it short."""
        end_s = time.monotonic() + min(seconds, self._deadline_s - self._waited_s())
        while (left_s := end_s - time.monotonic()) > 0:
            if self._is_told_to_stop() and left_s > PAUSE_WHEN_INTERRUPTED_S:
                end_s = time.monotonic() + PAUSE_WHEN_INTERRUPTED_S
            time.sleep(min(POLL_S, left_s))

    def end(self, state: RetryCallState) -> NoReturn:
        outage = _outage_of(state)
        if self._is_told_to_stop() and outage.verdict is None:
            reason = _Process.interruption.reason if _Process.interruption else ""
            raise Interrupted(f"interrupted by {reason} while waiting: {outage}; then run it again") from outage
        waited_s = self._waited_s()
        after = f" (tried {state.attempt_number} times in {waited_s:.0f} s)" if waited_s >= 1 else ""
        raise outage.verdict or ServiceUnavailable(f"{outage}{after}") from outage

    def say_if_back(self) -> None:
        if self._said_s is not None:
            _say(f"it works again, after {self._waited_s():.0f} s")

    def _say(self, outage: Outage) -> None:
        now_s = time.monotonic()
        if self._waited_s() >= SILENT_S and (self._said_s is None or now_s - self._said_s >= SAY_EVERY_S):
            self._said_s = now_s
            _say(f"trying again for {self._deadline_s - self._waited_s():.0f} s: {outage}")

    def _waited_s(self) -> float:
        return 0.0 if self._first_failure_s is None else time.monotonic() - self._first_failure_s

    def _is_told_to_stop(self) -> bool:
        interruption = _Process.interruption
        if interruption is None or not interruption.requested:
            return False
        if self._told_to_stop_s is None:
            self._told_to_stop_s = time.monotonic()
        return True


def _outage_of(state: RetryCallState) -> Outage:
    error = state.outcome.exception() if state.outcome else None
    if not isinstance(error, Outage):
        raise TypeError("only an Outage is waited for")
    return error


def _say(line: str) -> None:
    print(f"{_Process.step}: {line}", file=sys.stderr, flush=True)
