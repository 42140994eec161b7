"""A proxy in front of a real S3 server that lets a share of the requests go wrong, each in one of the ways of S3.

What the client sees is what it would see of a failing server or network; the server behind is real, so a request that
was forwarded before its answer got lost has happened. Listings and error texts pass unchanged: their XML carries no
checksum, in AWS either.
"""

import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal[
    "slow_down",  # 503, not forwarded
    "internal_error",  # 500, not forwarded
    "error_after",  # forwarded, and 500 for an answer
    "hang",  # not forwarded, no answer
    "hang_after",  # forwarded, no answer
    "reset_before",  # the connection is reset before it is forwarded
    "reset_after",  # ... after it was forwarded
    "half_body",  # forwarded; the answer breaks off in its middle
    "flipped_answer",  # one byte of an object's content is changed on the way back
    "flipped_request",  # ... on the way there
    "expired_token",  # 400 ExpiredToken, not forwarded
]
FAULTS: tuple[Fault, ...] = Fault.__args__  # type: ignore[attr-defined]

CODES = {
    "slow_down": (503, "SlowDown"),
    "internal_error": (500, "InternalError"),
    "error_after": (500, "InternalError"),
    "expired_token": (400, "ExpiredToken"),
}
NOT_FORWARDED = {"slow_down", "internal_error", "hang", "reset_before", "expired_token"}
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}


class S3FaultProxy:
    """Runs in threads of this process until it is closed."""

    def __init__(self, upstream: str, rate: float, seed: int, faults: Sequence[Fault] = FAULTS, hang_s: float = 3.0):
        self.rate, self.hang_s = rate, hang_s
        self.counts: Counter[str] = Counter()
        """Requests by what happened to them; "none" when nothing did."""
        self.store_uri = ""
        """For its user: the store that is reached through it."""
        self.expired_keys: set[str] = set()
        """Access keys whose requests are all answered with ExpiredToken."""
        self._faults, self._random, self._lock = faults, random.Random(seed), threading.Lock()
        self.upstream = urlsplit(upstream)
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="s3-fault-proxy", daemon=True).start()

    def draw(self, authorization: str) -> Fault | None:
        with self._lock:
            if any(f"Credential={key}/" in authorization for key in self.expired_keys):
                return "expired_token"
            return self._random.choice(self._faults) if self._random.random() < self.rate else None

    def position(self, size: int) -> int:
        with self._lock:
            return self._random.randrange(size)

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    proxy: S3FaultProxy

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients go away, and the faults break connections: no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *args: object) -> None:
        pass

    def handle_one(self) -> None:
        proxy = self.server.proxy
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            self.send_error(411)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = proxy.draw(self.headers.get("Authorization", ""))
        if fault == "flipped_request":
            fault, body = (fault, self._flipped(body)) if body and self.command == "PUT" else (None, body)
        answer = None if fault in NOT_FORWARDED else self._forward(body)
        if answer is not None and fault in ("flipped_answer", "half_body"):
            is_content = (
                self.command == "GET" and len(answer[2]) > 1 and "xml" not in dict(answer[1]).get("content-type", "")
            )
            fault = fault if is_content else None
        proxy.count(fault or "none")
        self._answer(fault, answer)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = self.server.proxy.upstream
        connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=60)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in HOP_BY_HOP:
                connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        headers = [(name.lower(), value) for name, value in response.getheaders() if name.lower() not in HOP_BY_HOP]
        return response.status, headers, content

    def _answer(self, fault: Fault | None, answer: tuple[int, list[tuple[str, str]], bytes] | None) -> None:
        if fault in CODES:
            self._refuse(*CODES[fault])
        elif fault in ("hang", "hang_after"):
            time.sleep(self.server.proxy.hang_s)
            self.close_connection = True
        elif fault in ("reset_before", "reset_after"):
            self._reset()
        elif answer is not None:
            status, headers, content = answer
            if fault == "flipped_answer":
                content = self._flipped(content)
            self.send_response_only(status)
            for name, value in headers:
                if name != "content-length" or self.command == "HEAD":
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("content-length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if fault == "half_body" else content)
            self.close_connection = self.close_connection or fault == "half_body"

    def _refuse(self, status: int, code: str) -> None:
        text = (
            f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>fault</Message></Error>'.encode()
        )
        self.send_response_only(status)
        self.send_header("content-type", "application/xml")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _flipped(self, data: bytes) -> bytes:
        position = self.server.proxy.position(len(data))
        return data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]
