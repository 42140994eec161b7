"""The retry decision: argo.md's table of endings, limits, policies and backoff."""

import pytest

from steps.errors import ConfigError
from workflows.local.model import Backoff, RetryStrategy
from workflows.local.retry import backoff_s, decide, duration_s
from workflows.local.status import NodeStatus

SPOT = RetryStrategy(
    limit="6",
    policy="Always",
    backoff=Backoff(duration="15s", factor="2", cap="5m"),
    expression=(
        "lastRetry.status == 'Error' || asInt(lastRetry.exitCode) in [75, 143] || "
        "(asInt(lastRetry.exitCode) == 137 && !(lastRetry.message matches 'OOMKilled')) || "
        "lastRetry.message matches 'node shutdown|pod deleted|low on resource|Preempt|Evict'"
    ),
)


def ended(phase: str, message: str, exit_code: str, attempt: int = 0) -> NodeStatus:
    return NodeStatus(
        name="n", display_name="n", type="Pod", phase=phase, message=message, exit_code=exit_code, attempt=attempt
    )


@pytest.mark.parametrize(
    ("phase", "message", "exit_code", "again"),
    [
        ("Failed", "Pod was terminated in response to imminent node shutdown.", "-1", True),
        ("Failed", "The node was low on resource: memory.", "", True),
        ("Failed", "main: Error (exit code 143)", "143", True),
        ("Failed", "main: Error (exit code 75)", "75", True),
        ("Failed", "main: Error (exit code 137)", "137", True),
        ("Error", "pod deleted", "-1", True),
        ("Error", "wait: Error (exit code 64)", "0", True),
        ("Failed", "main: OOMKilled (exit code 137)", "137", False),
        ("Failed", "main: Error (exit code 65)", "65", False),
        ("Failed", "main: Error (exit code 78)", "78", False),
        ("Failed", "main: Error (exit code 1)", "1", False),
    ],
)
def test_each_ending_of_a_pod_is_retried_or_not(phase: str, message: str, exit_code: str, again: bool) -> None:
    assert decide(SPOT, ended(phase, message, exit_code), 1).again is again


def test_limit_counts_extra_attempts() -> None:
    last = ended("Failed", "main: Error (exit code 75)", "75")
    assert [decide(SPOT, last, attempts).again for attempts in (1, 6, 7)] == [True, True, False]
    assert decide(SPOT, last, 7).message == "No more retries left"


@pytest.mark.parametrize(
    ("policy", "expression", "phase", "again"),
    [
        (None, "", "Failed", True),
        (None, "", "Error", False),
        (None, "true", "Error", True),
        ("OnFailure", "true", "Error", False),
        ("OnError", "", "Error", True),
        ("OnError", "", "Failed", False),
        ("Always", "", "Error", True),
        ("Always", "false", "Failed", False),
    ],
)
def test_policy_and_expression_must_both_hold(policy: str | None, expression: str, phase: str, again: bool) -> None:
    strategy = RetryStrategy(limit="3", policy=policy, expression=expression)  # type: ignore[arg-type]
    assert decide(strategy, ended(phase, "m", "1"), 1).again is again


def test_retries_and_last_retry_are_strings() -> None:
    strategy = RetryStrategy(limit="9", expression="retries == '2' && asFloat(lastRetry.duration) >= 0.0")
    assert decide(strategy, ended("Failed", "m", "1", attempt=2), 1).again


def test_comparing_an_exit_code_with_a_number_is_refused_not_false() -> None:
    with pytest.raises(ConfigError, match="use asInt"):
        decide(RetryStrategy(limit="1", expression="lastRetry.exitCode == 75"), ended("Failed", "m", "75"), 1)


def test_backoff_grows_by_factor_up_to_cap() -> None:
    backoff = Backoff(duration="15s", factor="2", cap="1m")
    assert [backoff_s(backoff, attempts) for attempts in (1, 2, 3, 4)] == [15.0, 30.0, 60.0, 60.0]


def test_backoff_waits_only_where_limit_is_set() -> None:
    unlimited = RetryStrategy(policy="Always", backoff=Backoff(duration="15s"))
    assert decide(unlimited, ended("Failed", "m", "1"), 1).wait_s == 0.0
    assert decide(SPOT, ended("Failed", "m", "75"), 2).wait_s == 30.0


@pytest.mark.parametrize(("text", "seconds"), [("20", 20.0), ("15s", 15.0), ("1m30s", 90.0), ("1h", 3600.0)])
def test_durations_are_go_durations_or_seconds(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5 m", "5x", "1m!"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a duration"):
        duration_s(text)
