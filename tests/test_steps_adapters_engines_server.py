"""The server engine: bounded requests, responses that count, failures that are repeated, restarts that are bounded."""

import math
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moe.config import ModelConfig, SamplingConfig
from moe.model import build_model
from moe.publication import save_publication
from moe.sampler import SampledResponse, SamplingStopped
from moe.tokenizer import build_char_tokenizer
from steps.adapters.engines.http_client import JsonClient, ServerRefused, ServerUnreachable
from steps.adapters.engines.server_engine import Served, ServerEngine
from steps.adapters.engines.server_kind import ServedResponse
from steps.config import ServerConfig
from steps.errors import DataError, ServiceUnavailable

SAMPLING = SamplingConfig()


class FakeHosts:
    """Always has a server; counts who asks for what."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def serve(self, version: int, failed_start: int, stop: Callable[[], bool]) -> Served:
        self.asked.append((version, failed_start))
        start = len(self.asked)
        return Served(f"http://127.0.0.1:{start}", f"{version}-label", start, {"engine": "fake", "start": start})

    def close(self) -> None:
        self.asked.append((-1, -1))


class FakeKind:
    """Answers each prompt with its own tokens; `behave` may do something else first."""

    name = "fake"

    def __init__(self, behave: Callable[[Sequence[int], int], None] = lambda prompt, seed: None) -> None:
        self.behave = behave
        self.label = ""
        self.logprobs: list[float] | None = None
        self.calls = 0

    def generate(self, client: JsonClient, prompt: Sequence[int], seed: int, stop_id: int, *_: Any, **__: Any) -> Any:
        self.calls += 1
        self.behave(prompt, seed)
        logprobs = [0.0] * (len(prompt) + 1) if self.logprobs is None else self.logprobs
        response = SampledResponse([*prompt, stop_id], logprobs, "stop")
        return ServedResponse(response, frozenset([self.label or "4-label"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("publication")
    model = build_model(ModelConfig(hidden_size=32, moe_intermediate_size=32, num_experts=4), vocab_size=5, seed=0)
    save_publication(model, build_char_tokenizer("ab"), made)
    return made


def make(folder: Path, kind: Any, hosts: FakeHosts | None = None, **settings: Any) -> ServerEngine:
    return ServerEngine(kind, hosts or FakeHosts(), ServerConfig(**settings), folder=folder, version=4)


def test_responses_come_in_the_order_of_the_prompts_and_are_told_once_each(folder: Path) -> None:
    engine, heard = make(folder, FakeKind()), []
    prompts = [[1, n] for n in range(40)]
    responses = engine.sample(
        prompts, range(40), SAMPLING, on_response=lambda row, response: heard.append((row, response.response_ids))
    )
    assert [response.response_ids[:2] for response in responses] == prompts
    assert sorted(heard) == [(row, [1, row, 2]) for row in range(40)]


def test_requests_in_flight_are_bounded(folder: Path) -> None:
    flying, most, lock = 0, 0, threading.Lock()
    full = threading.Barrier(3, timeout=10)

    def behave(prompt: Sequence[int], seed: int) -> None:
        nonlocal flying, most
        with lock:
            flying += 1
            most = max(most, flying)
        full.wait()
        with lock:
            flying -= 1

    make(folder, FakeKind(behave), max_running_requests=3).sample([[1]] * 9, range(9), SAMPLING)
    assert most == 3


def test_only_what_is_missing_is_asked_again_after_a_failure_and_the_host_hears_which_start_failed(
    folder: Path,
) -> None:
    failures = [ServerUnreachable("gone")]

    def behave(prompt: Sequence[int], seed: int) -> None:
        if seed == 3 and failures:
            raise failures.pop()

    hosts, kind, heard = FakeHosts(), FakeKind(behave), []
    engine = make(folder, kind, hosts, max_running_requests=1)
    responses = engine.sample([[1]] * 6, range(6), SAMPLING, on_response=lambda row, response: heard.append(row))
    assert len(responses) == 6
    assert heard == [0, 1, 2, 3, 4, 5]
    assert hosts.asked == [(4, 0), (4, 1)]


def test_tokens_of_other_weights_never_count(folder: Path) -> None:
    kind, hosts, heard = FakeKind(), FakeHosts(), []
    kind.label = "5-another"
    engine = make(folder, kind, hosts, max_restarts=2)
    with pytest.raises(ServiceUnavailable, match=r"fake at .* failed 3 times, at last: weights 5-another instead of 4"):
        engine.sample([[1]], [0], SAMPLING, on_response=lambda row, response: heard.append(row))
    assert heard == []
    assert len(hosts.asked) == 3


@pytest.mark.parametrize("logprobs", [[], [0.0], [0.0, math.nan], [-math.inf, 0.0]])
def test_a_response_whose_log_probabilities_are_unfit_never_counts(folder: Path, logprobs: list[float]) -> None:
    kind, heard = FakeKind(), []
    kind.logprobs = logprobs
    with pytest.raises(ServiceUnavailable, match=r"failed 1 times, at last: .*log-probabilit"):
        make(folder, kind, max_restarts=0).sample([[1]], [0], SAMPLING, on_response=lambda row, _: heard.append(row))
    assert heard == []


def test_a_server_that_has_too_much_to_do_is_asked_again(folder: Path) -> None:
    refusals = [ServerRefused(429, "too many requests")]

    def behave(prompt: Sequence[int], seed: int) -> None:
        if refusals:
            raise refusals.pop()

    assert len(make(folder, FakeKind(behave)).sample([[1]], [0], SAMPLING)) == 1


def test_requests_that_nobody_waits_for_any_more_are_broken_off(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        taken: list[socket.socket] = []

        class Silent(FakeHosts):
            def serve(self, version: int, failed_start: int, stop: Callable[[], bool]) -> Served:
                return Served(url, "4-label", 1, {})

        class Posting(FakeKind):
            def generate(self, client: JsonClient, *_: Any, **__: Any) -> Any:
                return client.post("/generate", {}, 60.0)

        def stop() -> bool:
            if not taken:
                taken.append(server.accept()[0])
                taken[0].recv(65536)
            return True

        with pytest.raises(SamplingStopped):
            make(folder, Posting(), Silent()).sample([[1]], [0], SAMPLING, stop=stop)
        taken[0].settimeout(30.0)
        while taken[0].recv(65536):  # what is left of the request, then the end of the connection
            pass
        taken[0].close()


def test_a_prompt_that_the_server_refuses_is_a_data_error_at_once(folder: Path) -> None:
    def behave(prompt: Sequence[int], seed: int) -> None:
        raise ServerRefused(400, "Token id 99 is out of vocabulary")

    hosts = FakeHosts()
    with pytest.raises(DataError, match="refused a prompt: Token id 99"):
        make(folder, FakeKind(behave), hosts).sample([[99]], [0], SAMPLING)
    assert hosts.asked == [(4, 0)]


def test_a_stop_is_heard_while_requests_hang(folder: Path) -> None:
    hang = threading.Event()
    engine = make(folder, FakeKind(lambda prompt, seed: hang.wait(30) and None))
    with pytest.raises(SamplingStopped):
        engine.sample([[1]], [0], SAMPLING, stop=lambda: True)
    hang.set()


def test_a_bug_in_a_request_is_raised_as_it_is(folder: Path) -> None:
    def behave(prompt: Sequence[int], seed: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make(folder, FakeKind(behave)).sample([[1]], [0], SAMPLING)


def test_a_refresh_samples_from_the_new_version(folder: Path) -> None:
    hosts, kind = FakeHosts(), FakeKind()
    engine = make(folder, kind, hosts)
    engine.refresh(folder, 5)
    kind.label = "5-label"
    engine.sample([[1]], [0], SAMPLING)
    assert engine.policy_version == 5
    assert hosts.asked == [(5, 0)]
    assert engine.report() == {"engine": "fake", "start": 1, "recoveries": 0}
    engine.close()
    assert hosts.asked[-1] == (-1, -1)


def test_text_is_encoded_by_the_publications_own_tokenizer(folder: Path) -> None:
    engine = make(folder, FakeKind())
    assert engine.decode(engine.encode("ab")[1:]) == "ab"
    with pytest.raises(DataError, match="'z'"):
        engine.encode("z")
