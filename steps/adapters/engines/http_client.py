"""JSON over HTTP to an inference server or its host: bounded connections, and failures by what they mean."""

import contextlib
import json
import socket
import threading
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

import urllib3
from urllib3.connection import HTTPConnection

_CONNECT_TIMEOUT_S = 5.0
_SHOWN = 300


class ServerUnreachable(Exception):
    """No answer: nothing listens, the connection broke, or the time was over. The same call may work later."""


class ServerRefused(Exception):
    """The server answered with an error; `status` is its HTTP code, `data` what it said."""

    def __init__(self, status: int, message: str, data: bytes = b"") -> None:
        super().__init__(message)
        self.status, self.data = status, data


class JsonClient:
    """Calls one server; may be used by many threads at once."""

    def __init__(self, url: str, *, connections: int = 1) -> None:
        """`connections`: kept open at most; a further caller waits for one."""
        self.url = url.rstrip("/")
        self._prefix = urlsplit(self.url).path
        self._pool = urllib3.connection_from_url(self.url, maxsize=connections, block=True, retries=False)
        self._connections: WeakSet[HTTPConnection] = WeakSet()
        self._guard = threading.Lock()
        connect: Any = self._pool.ConnectionCls

        def register(**settings: Any) -> HTTPConnection:
            connection: HTTPConnection = connect(**settings)
            with self._guard:
                self._connections.add(connection)
            return connection

        self._pool.ConnectionCls = register  # type: ignore[assignment]

    def get(self, path: str, timeout_s: float) -> Any:
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: Any, timeout_s: float) -> Any:
        """The answer, parsed; None for an empty one. Raises ServerUnreachable or ServerRefused."""
        return self._call("POST", path, json.dumps(body).encode(), timeout_s)

    def close(self) -> None:
        """Break off what is in flight, which ends with ServerUnreachable: a server ends a request nobody waits for."""
        self._pool.close()
        with self._guard:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(AttributeError, OSError):  # not connected yet, or not any more
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _call(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Any:
        timeout = urllib3.Timeout(connect=min(_CONNECT_TIMEOUT_S, timeout_s), read=timeout_s)
        headers = {"content-type": "application/json"}
        try:
            answer = self._pool.request(method, self._prefix + path, body=body, headers=headers, timeout=timeout)
            data = answer.data
        except urllib3.exceptions.ReadTimeoutError as error:
            raise ServerUnreachable(f"{self.url}{path}: no answer for {timeout_s:.0f} s") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ServerUnreachable(f"{self.url}{path}: {type(error).__name__}") from error
        if answer.status >= 400:
            raise ServerRefused(answer.status, f"{path} answered {answer.status}: {_reason(data)}", data)
        try:
            return json.loads(data) if data else None
        except ValueError as error:
            raise ServerUnreachable(f"{self.url}{path}: an answer that is not JSON ({error})") from error


def require(answer: Any, *path: str | int) -> Any:
    """What lies at `path` in an answer; ServerRefused names what is missing: another release's format."""
    value = answer
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            shown = ".".join(map(str, path))
            raise ServerRefused(
                502, f"the answer has no {shown}: use a release of the server that is supported"
            ) from None
    return value


def _reason(data: bytes) -> str:
    """The server's own words, on one line."""
    return " ".join(data.decode("utf-8", "replace").split())[:_SHOWN]
