"""Which failures are repeated, how often, and what a waiting step says and heeds."""

import threading
import time
from collections.abc import Iterator

import pytest

from steps.adapters import retries
from steps.adapters.retries import Outage, heed, retried
from steps.environment import read_environment
from steps.errors import ConfigError, DataError, Interrupted, ServiceUnavailable
from steps.interruption import Interruption


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(retries, "LONGEST_PAUSE_S", 0.002)
    monkeypatch.setattr(retries, "PAUSE_WHEN_INTERRUPTED_S", 0.01)
    monkeypatch.setattr(retries, "PATIENCE_WHEN_INTERRUPTED_S", 0.05)
    yield
    retries._Process.interruption = None


class Service:
    """Fails as it is told to, one failure a call, then answers."""

    def __init__(self, *failures: Exception, forever: Exception | None = None) -> None:
        self.failures, self.forever, self.calls = list(failures), forever, 0

    @retried
    def ask(self, question: str, *, times: int = 1) -> str:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        if self.forever is not None:
            raise self.forever
        return question * times


def test_a_call_is_repeated_until_the_service_answers() -> None:
    service = Service(Outage("down"), Outage("down"), Outage("starting up"))
    assert service.ask("a", times=2) == "aa"
    assert service.calls == 4


@pytest.mark.parametrize("error", [ServiceUnavailable("access denied"), DataError("broken"), ValueError("a bug")])
def test_what_is_final_is_raised_at_once(error: Exception) -> None:
    service = Service(error)
    with pytest.raises(type(error)) as caught:
        service.ask("a")
    assert caught.value is error and service.calls == 1


def test_the_deadline_ends_it_with_the_cause_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOERL_SERVICE_DEADLINE_S", "0.1")
    service = Service(forever=Outage("database x: connection refused"))
    with pytest.raises(ServiceUnavailable, match="database x: connection refused") as caught:
        service.ask("a")
    assert not isinstance(caught.value, Outage) and service.calls > 2


def test_a_deadline_of_zero_means_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOERL_SERVICE_DEADLINE_S", "0")
    service = Service(forever=Outage("down"))
    with pytest.raises(ServiceUnavailable):
        service.ask("a")
    assert service.calls == 1


def test_of_nested_calls_only_the_inner_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOERL_SERVICE_DEADLINE_S", "0.05")
    service, outer_calls = Service(forever=Outage("down")), []

    @retried
    def outer() -> str:
        outer_calls.append(1)
        return service.ask("a")

    with pytest.raises(ServiceUnavailable):
        outer()
    assert len(outer_calls) == 1


def test_a_few_tries_end_in_the_verdict_and_other_outages_are_not_counted() -> None:
    verdict = DataError("the object is corrupt")
    outages = [Outage("reset")] * 5
    service = Service(*outages, forever=Outage("wrong checksum", tries=3, verdict=verdict))
    with pytest.raises(DataError) as caught:
        service.ask("a")
    assert caught.value is verdict and service.calls == 5 + 3
    assert Service(*outages, Outage("wrong checksum", tries=3, verdict=verdict)).ask("a") == "a"


def test_a_stop_ends_the_wait_and_says_what_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOERL_SERVICE_DEADLINE_S", "600")
    monkeypatch.setattr(retries, "LONGEST_PAUSE_S", 600.0)
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 600.0)
    interruption = Interruption()
    heed(interruption, "rollout")
    threading.Timer(0.1, lambda: interruption.request("SIGTERM")).start()
    with pytest.raises(Interrupted, match="interrupted by SIGTERM while waiting: database x: down"):
        Service(forever=Outage("database x: down")).ask("a")


def test_a_step_that_was_told_to_stop_may_still_commit_through_a_short_outage() -> None:
    interruption = Interruption()
    interruption.request("SIGTERM")
    heed(interruption, "rollout")
    assert Service(Outage("reset"), Outage("reset")).ask("a") == "a"


def test_it_says_what_it_waits_for_once_in_a_while_and_that_it_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retries, "SILENT_S", 0.0)
    heed(Interruption(), "flush")
    Service(*[Outage("database x: down")] * 20).ask("a")
    first, last = capsys.readouterr().err.splitlines()  # SAY_EVERY_S has not passed between the others
    assert first.startswith("flush: trying again for ") and first.endswith(": database x: down")
    assert last.startswith("flush: it works again")


def test_what_passes_soon_is_not_worth_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Service(Outage("reset")).ask("a")
    assert capsys.readouterr() == ("", "")


def test_a_clock_that_is_set_neither_ends_nor_prolongs_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    days_s = 3 * 86400.0
    clock = iter([days_s, -days_s] * 1000)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(clock))
    assert Service(*[Outage("down")] * 10).ask("a") == "a"
    monkeypatch.setenv("MOERL_SERVICE_DEADLINE_S", "0.05")
    with pytest.raises(ServiceUnavailable):
        Service(forever=Outage("down")).ask("a")


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_a_deadline_that_is_no_duration_is_found_before_any_outage(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MOERL_STORE", "/nowhere")
    monkeypatch.setenv("MOERL_DATABASE_URL", "sqlite:////nowhere")
    monkeypatch.setenv("MOERL_SERVICE_DEADLINE_S", value)
    with pytest.raises(ConfigError, match=r"MOERL_SERVICE_DEADLINE_S = '.*': set it to seconds"):
        read_environment()
