"""An inference server as an engine: requests in flight are bounded, answers are checked, failures repeated elsewhere.

Each response is one request with its own seed. A response counts only when the server says that all of its tokens were
sampled from the weights that this worker asked for.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Protocol

from moe.config import SamplingConfig
from moe.sampler import SampledResponse, SamplingStopped
from moe.tokenizer import PromptContent, decode_response, load_tokenizer
from steps.adapters.engines.base import OnResponse
from steps.adapters.engines.http_client import JsonClient, ServerRefused, ServerUnreachable
from steps.adapters.engines.server_kind import ServedResponse, ServerKind
from steps.adapters.engines.tokens import encode
from steps.config import ServerConfig
from steps.errors import DataError, ServiceUnavailable

POLL_S = 0.05
_CLIENT_ERROR = range(400, 500)
_PASSING = {408, 409, 425, 429}
"""Of these, what says nothing about the request."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a host answers: where the server is, how it labels the weights, how often it was started, its report."""

    url: str
    label: str
    start: int
    report: dict[str, Any]


class Hosts(Protocol):
    """Whoever keeps the server."""

    def serve(self, version: int, failed_start: int, stop: Callable[[], bool]) -> Served:
        """The server, once it serves that policy version. `failed_start`: the start that was seen to fail, or 0.

        SamplingStopped as soon as `stop` says so.
        """
        ...

    def close(self) -> None:
        """The server is not used any more by this process."""
        ...


class ServerEngine:
    """Samples through a server that a host keeps on the version that is asked for."""

    can_record_routing: ClassVar[bool] = True
    streams_responses: ClassVar[bool] = True

    def __init__(
        self, kind: ServerKind, hosts: Hosts, settings: ServerConfig, *, folder: Path, version: int, top_k: int = 0
    ) -> None:
        """`folder`: the publication's settings and tokenizer. `top_k`: experts a token, where they are recorded.

        `refresh` is to be called before anything is sampled, too: this only reads the tokenizer.
        """
        self.policy_version = version
        self._kind, self._hosts, self._settings, self._top_k = kind, hosts, settings, top_k
        self._tokenizer = load_tokenizer(folder)
        self._served: Served | None = None
        self._client: JsonClient | None = None
        self._recoveries = 0

    def encode(self, content: PromptContent) -> list[int]:
        return encode(self._tokenizer, content)

    def decode(self, response_ids: Sequence[int]) -> str:
        return decode_response(self._tokenizer, list(response_ids))

    def refresh(self, folder: Path, policy_version: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until the server serves the version and its probe was confirmed; SamplingStopped when `stop` says so."""
        self._tokenizer = load_tokenizer(folder)
        self.policy_version = policy_version
        self._connect(0, stop)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: SamplingConfig,
        *,
        greedy: bool = False,
        stop: Callable[[], bool] | None = None,
        on_response: OnResponse | None = None,
    ) -> list[SampledResponse]:
        """As the protocol says; a greedy response's log-probabilities are the server's own, at no temperature.

        Raises ServiceUnavailable when the server is still failing after `rollout.server.max_restarts` recoveries.
        """
        stop = stop or (lambda: False)
        responses: dict[int, SampledResponse] = {}

        def take(row: int, response: SampledResponse) -> None:
            responses[row] = response
            if on_response is not None:
                on_response(row, response)

        while missing := [row for row in range(len(prompts)) if row not in responses]:
            served, client = self._connection(stop)

            def ask(row: int, client: JsonClient = client) -> ServedResponse:
                return self._kind.generate(
                    client,
                    prompts[row],
                    seeds[row],
                    self._tokenizer.eos_token_id,
                    sampling,
                    greedy=greedy,
                    top_k=self._top_k,
                    timeout_s=self._settings.request_timeout_s,
                )

            try:
                failure = self._round(missing, ask, served.label, take, stop)
            except BaseException:
                self._disconnect()  # nobody waits for the requests in flight: the server shall not work on them
                raise
            if failure:
                self._recover(served, failure, stop)
        return [responses[row] for row in range(len(prompts))]

    def report(self) -> dict[str, Any]:
        """The host's, of the last server that it gave us, and how often one failed."""
        served = {} if self._served is None else self._served.report
        return {"engine": self._kind.name, **served, "recoveries": self._recoveries}

    def close(self) -> None:
        self._disconnect()
        self._hosts.close()

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def _connection(self, stop: Callable[[], bool]) -> tuple[Served, JsonClient]:
        if self._client is None:
            self._connect(0, stop)
        assert self._served is not None and self._client is not None
        return self._served, self._client

    def _connect(self, failed_start: int, stop: Callable[[], bool]) -> None:
        self._disconnect()
        self._served = self._hosts.serve(self.policy_version, failed_start, stop)
        self._client = JsonClient(self._served.url, connections=self._settings.max_running_requests)

    def _round(
        self,
        rows: Sequence[int],
        ask: Callable[[int], ServedResponse],
        label: str,
        take: OnResponse,
        stop: Callable[[], bool],
    ) -> str:
        """Ask for rows, at most so many at a time; why it was left early, empty when all were taken."""
        waiting: SimpleQueue[int] = SimpleQueue()
        results: SimpleQueue[tuple[int, ServedResponse | Exception]] = SimpleQueue()
        over = threading.Event()
        for row in rows:
            waiting.put(row)

        def work() -> None:
            while not over.is_set():
                try:
                    row = waiting.get_nowait()
                except Empty:
                    return
                try:
                    results.put((row, ask(row)))
                except Exception as error:  # raised again by the thread that waits
                    results.put((row, error))

        for number in range(min(len(rows), self._settings.max_running_requests)):
            threading.Thread(target=work, name=f"request-{number}", daemon=True).start()
        try:
            for _ in rows:
                row, result = _next(results, stop)
                if isinstance(result, (ServerUnreachable, ServerRefused)):
                    return _explained(result)
                if isinstance(result, Exception):
                    raise result
                if result.weight_labels != {label}:
                    return f"weights {', '.join(sorted(result.weight_labels))} instead of {label}"
                if problem := _problem(result.response):
                    return problem
                take(row, result.response)
            return ""
        finally:
            over.set()

    def _recover(self, served: Served, failure: str, stop: Callable[[], bool]) -> None:
        """Have the host look at the server, which starts it again when it is dead or hung."""
        self._recoveries += 1
        if self._recoveries > self._settings.max_restarts:
            raise ServiceUnavailable(
                f"{self._kind.name} at {served.url} failed {self._recoveries} times, at last: {failure}; run again, "
                "see the engine host's log, or raise rollout.server.request_timeout_s if responses take longer"
            )
        self._connect(served.start, stop)


def _next(
    results: "SimpleQueue[tuple[int, ServedResponse | Exception]]", stop: Callable[[], bool]
) -> tuple[int, ServedResponse | Exception]:
    while True:
        if stop():
            raise SamplingStopped("sampling stopped")
        try:
            return results.get(timeout=POLL_S)
        except Empty:
            continue


def _explained(failure: ServerUnreachable | ServerRefused) -> str:
    """Its words; DataError when the request itself was wrong, which no other server would take either."""
    if isinstance(failure, ServerRefused) and failure.status in _CLIENT_ERROR and failure.status not in _PASSING:
        raise DataError(f"the inference server refused a prompt: {failure}") from None
    return str(failure)


def _problem(response: SampledResponse) -> str:
    """What makes a response unfit to be trained on; empty: nothing."""
    if len(response.logprobs) != len(response.response_ids) or not response.response_ids:
        return f"{len(response.logprobs)} log-probabilities for {len(response.response_ids)} tokens"
    if not all(map(math.isfinite, response.logprobs)):
        return "a log-probability that is not finite"
    return ""
