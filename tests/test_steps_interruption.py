"""An interruption is remembered, ends waits and starts the drain budget; kinds of notices ask for different things."""

import os
import signal
import threading

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
    interruption.request("SIGTERM")
    assert interruption.reason == "notice"
    assert [notice.reason for notice in interruption.notices] == ["notice", "SIGTERM"]


def test_a_notice_that_comes_again_is_one_notice(interruption: Interruption) -> None:
    first = interruption.request("spot", time_left_s=120.0)
    assert interruption.request("spot", time_left_s=60.0) is None
    assert interruption.notices == [first]


def test_the_budget_ends_with_the_place(interruption: Interruption) -> None:
    interruption.request("spot", time_left_s=-1.0)
    assert interruption.budget_spent(3600)


def test_a_rebalance_lets_the_running_unit_end_and_begins_no_other(interruption: Interruption) -> None:
    interruption.check_begin(1.0)
    interruption.request("rebalance", "rebalance")
    interruption.check()
    assert interruption.leaving and not interruption.requested and not interruption.budget_spent(0.0)
    with pytest.raises(Interrupted, match="leaving before the next unit .rebalance."):
        interruption.check_begin(0.0)


def test_a_rebalance_that_was_known_before_the_step_began_stops_nothing(interruption: Interruption) -> None:
    interruption.request("rebalance", "rebalance", binding=False)
    interruption.check_begin(3600.0)
    assert not interruption.leaving


def test_before_a_scheduled_end_only_what_can_be_finished_is_begun(interruption: Interruption) -> None:
    assert interruption.can_finish(1e9) and interruption.time_left_s() is None
    interruption.request("capacity block", "scheduled", time_left_s=600.0)
    interruption.check_begin(60.0)
    assert interruption.can_finish(60.0) and not interruption.can_finish(700.0)
    with pytest.raises(Interrupted, match="capacity block"):
        interruption.check_begin(700.0)
    assert not interruption.leaving and not interruption.requested


def test_a_checkpoint_is_asked_for_once_a_notice_and_not_by_a_stop(interruption: Interruption) -> None:
    assert not interruption.checkpoint_requested()
    interruption.request("rebalance", "rebalance")
    assert interruption.checkpoint_requested()
    assert not interruption.checkpoint_requested()
    interruption.request("SIGTERM")
    assert not interruption.checkpoint_requested()
    interruption.request("capacity block", "scheduled", time_left_s=600.0)
    assert interruption.checkpoint_requested()
