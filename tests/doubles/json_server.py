"""An HTTP server on a thread that answers JSON, as the doubles of inference servers need it."""

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Refused(Exception):
    """Answered with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


Answer = Callable[[str, str, dict[str, Any]], Any]
"""(method, path with query, body) -> what is answered as JSON; Refused."""


def make_server(answer: Answer, address: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer("GET", {})

        def do_POST(self) -> None:
            self._answer("POST", json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}"))

        def _answer(self, method: str, body: dict[str, Any]) -> None:
            status, content = 200, None
            try:
                content = answer(method, self.path, body)
            except Refused as refusal:
                status, content = refusal.status, {"error": {"message": str(refusal), "code": refusal.status}}
            data = b"" if content is None else json.dumps(content).encode()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer((address, port), Handler)
    server.daemon_threads = True
    return server


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """URL of a server that answers while the block runs."""
    server = make_server(answer)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
