"""An interruption is remembered, ends waits at once, and starts the drain budget."""

import os
import signal
import threading
import time

import pytest

from steps.errors import Interrupted
from steps.interruption import Interruption


@pytest.fixture
def interruption():
    before = signal.getsignal(signal.SIGTERM)
    installed = Interruption()
    installed.install()
    yield installed
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_caught_and_named(interruption: Interruption) -> None:
    assert not interruption.requested
    os.kill(os.getpid(), signal.SIGTERM)
    assert interruption.requested
    with pytest.raises(Interrupted, match="SIGTERM; run the same command again") as raised:
        interruption.check()
    assert raised.value.exit_code == 75


def test_waiting_ends_when_the_signal_arrives(interruption: Interruption) -> None:
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(Interrupted):
        interruption.wait(3600)
    timer.join()


def test_the_budget_counts_from_the_first_request(interruption: Interruption) -> None:
    assert not interruption.budget_spent(0.0)
    interruption.request("notice")
    assert interruption.budget_spent(0.0)
    assert not interruption.budget_spent(3600)
    first = interruption.requested_at_s
    time.sleep(0.01)
    interruption.request("SIGTERM")
    assert interruption.requested_at_s == first
    assert interruption.reason == "notice"
