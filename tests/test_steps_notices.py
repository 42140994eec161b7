"""Notices reach the interruption: from a file, and from AWS's instance metadata service (a double)."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steps.environment import read_environment
from steps.errors import ConfigError
from steps.interruption import Interruption, Notice
from steps.notices import FoundNotice, InstanceMetadata, read_notice_file, watch_notices
from tests.doubles.imds import ACTION, REBALANCE, InstanceMetadataDouble, running_imds

LONG_S = 30.0


@pytest.fixture
def imds() -> Iterator[InstanceMetadataDouble]:
    with running_imds() as double:
        yield double


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("MOERL_STORE", str(tmp_path))
    monkeypatch.setenv("MOERL_DATABASE_URL", "sqlite:////nowhere.db")
    yield monkeypatch


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def silent(line: str) -> None:
    raise AssertionError(line)


def test_without_a_notice_file_there_is_no_notice(tmp_path: Path) -> None:
    assert read_notice_file(tmp_path / "notice") == []


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{"kind": "rebalance", "reason": "spot risk"}', FoundNotice("rebalance", "spot risk")),
        ('{"kind": "scheduled", "at": 1800000000}', FoundNotice("scheduled", "notice", 1800000000)),
        ('{"kind": "stop", "reason": "chaos", "at": 1.5}', FoundNotice("stop", "chaos", 1.5)),
        ('{"kind": "other"}', FoundNotice("stop", "notice")),
        ('{"at": "tomorrow", "reason": 7}', FoundNotice("stop", "notice")),
        ('{"at": NaN}', FoundNotice("stop", "notice")),
        ("", FoundNotice("stop", "notice")),
        ("[1]", FoundNotice("stop", "notice")),
        ("go away", FoundNotice("stop", "notice")),
    ],
)
def test_a_notice_file_says_what_it_can(tmp_path: Path, content: str, found: FoundNotice) -> None:
    path = tmp_path / "notice"
    path.write_text(content)
    assert read_notice_file(path) == [found]


@given(content=st.binary(max_size=40) | st.from_type(dict).map(lambda value: json.dumps(str(value)).encode()))
def test_any_content_of_a_notice_file_is_a_notice(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any-notice"
    path.write_bytes(content)
    assert len(read_notice_file(path)) == 1


@pytest.mark.parametrize("content", [f'{{"at": {10**400}}}', '{"kind":' * 100_000, '{"at": true}'])
def test_a_notice_that_says_nonsense_is_a_stop_without_a_time(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notice"
    path.write_text(content)
    assert read_notice_file(path) == [FoundNotice("stop", "notice")]


def test_a_notice_file_that_may_not_be_read_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert read_notice_file(tmp_path / "notice") == [FoundNotice("stop", "notice")]


def test_metadata_without_a_notice_is_silent(imds: InstanceMetadataDouble) -> None:
    assert InstanceMetadata(imds.url, silent).read() == []
    assert imds.refused == 0, "the token comes first"


def test_a_spot_interruption_is_a_stop_with_its_time(imds: InstanceMetadataDouble) -> None:
    imds.say(ACTION, {"action": "terminate", "time": "2027-01-15T08:00:00Z"})
    assert InstanceMetadata(imds.url, silent).read() == [FoundNotice("stop", "spot", 1800000000.0)]


def test_an_action_without_a_time_that_can_be_read_is_still_a_stop(imds: InstanceMetadataDouble) -> None:
    imds.answers[ACTION] = b"\xff not JSON"
    assert InstanceMetadata(imds.url, silent).read() == [FoundNotice("stop", "spot")]


def test_a_rebalance_recommendation_is_a_rebalance(imds: InstanceMetadataDouble) -> None:
    imds.say(REBALANCE, {"noticeTime": "2027-01-15T08:00:00Z"})
    assert InstanceMetadata(imds.url, silent).read() == [FoundNotice("rebalance", "rebalance")]


def test_an_expired_token_is_replaced(imds: InstanceMetadataDouble) -> None:
    source = InstanceMetadata(imds.url, silent)
    source.read()
    imds.forget_tokens()
    imds.say(ACTION, {"action": "stop", "time": "2027-01-15T08:00:00Z"})
    assert source.read() == [FoundNotice("stop", "spot", 1800000000.0)]
    assert imds.refused == 1


def test_a_service_that_cannot_be_reached_is_said_once() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        lines: list[str] = []
        source = InstanceMetadata(url, lines.append)
        assert [source.read(), source.read()] == [[], []]
    assert len(lines) == 1
    assert "can't be reached" in lines[0] and "hop limit of 2" in lines[0] and "\n" not in lines[0]


def test_notices_are_taken_in_recorded_and_never_twice(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "notice"
    environment.setenv("MOERL_NOTICE_FILE", str(path))
    interruption, lines, recorded = Interruption(), list[str](), list[Notice]()
    watch_notices(interruption, read_environment(), lines.append, recorded.append)
    time.sleep(0.05)
    assert not interruption.notices
    path.write_text('{"kind": "scheduled", "reason": "block", "at": 4102444800}')
    wait_until(lambda: len(recorded) == 1)
    path.write_text("now")
    wait_until(lambda: len(recorded) == 2)
    assert [(notice.kind, notice.reason) for notice in recorded] == [("scheduled", "block"), ("stop", "notice")]
    assert interruption.requested and interruption.reason == "notice"
    assert len(lines) == 2 and "notice: scheduled (block, " in lines[0]


def test_a_rebalance_that_is_there_from_the_start_is_recorded_and_drains_nothing(
    environment: pytest.MonkeyPatch, imds: InstanceMetadataDouble
) -> None:
    imds.say(REBALANCE, {"noticeTime": "2027-01-15T08:00:00Z"})
    environment.setenv("MOERL_IMDS", "on")
    environment.setenv("MOERL_IMDS_URL", imds.url)
    interruption, recorded = Interruption(), list[Notice]()
    watch_notices(interruption, read_environment(), lambda line: None, recorded.append)
    wait_until(lambda: len(recorded) == 1)
    assert not interruption.leaving
    imds.say(ACTION, {"action": "terminate", "time": "2100-01-01T00:00:00Z"})
    wait_until(lambda: interruption.requested)
    assert interruption.reason == "spot"


def test_nothing_is_asked_unless_the_environment_says_so(
    environment: pytest.MonkeyPatch, imds: InstanceMetadataDouble
) -> None:
    environment.setenv("MOERL_IMDS_URL", imds.url)
    assert read_environment().imds_url == ""
    environment.setenv("MOERL_IMDS", "on")
    assert read_environment().imds_url == imds.url
    environment.delenv("MOERL_IMDS_URL")
    assert read_environment().imds_url == "http://169.254.169.254"


@pytest.mark.parametrize(("name", "value"), [("MOERL_IMDS", "yes"), ("MOERL_IMDS_URL", "169.254.169.254")])
def test_a_wrong_setting_is_one_line(environment: pytest.MonkeyPatch, name: str, value: str) -> None:
    environment.setenv(name, value)
    with pytest.raises(ConfigError, match=f"environment variable {name} = '{value}': set it to "):
        read_environment()
