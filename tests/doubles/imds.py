"""AWS's instance metadata service, version 2, as the EC2 user guide documents it for a Spot instance.

A question needs a token that this server has given out and not yet forgotten: 401 without. What does not exist is 404.
"""

import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
TOKEN = "/latest/api/token"
LONGEST_TTL_S = 21600


class InstanceMetadataDouble:
    """`say` makes a path answer; `forget_tokens` is what happens when they expire."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.tokens: set[str] = set()
        self.refused = 0
        """Questions without a good token."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
                if self.path != TOKEN or not ttl.isdecimal() or not 1 <= int(ttl) <= LONGEST_TTL_S:
                    return owner.answer(self, 400, b"")
                token = secrets.token_urlsafe(32)
                owner.tokens.add(token)
                owner.answer(self, 200, token.encode())

            def do_GET(self) -> None:
                if self.headers.get("X-aws-ec2-metadata-token") not in owner.tokens:
                    owner.refused += 1
                    return owner.answer(self, 401, b"")
                content = owner.answers.get(self.path)
                owner.answer(self, 404 if content is None else 200, content or b"")

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def say(self, path: str, answer: dict[str, str]) -> None:
        self.answers[path] = json.dumps(answer).encode()

    def forget_tokens(self) -> None:
        self.tokens.clear()

    @staticmethod
    def answer(handler: BaseHTTPRequestHandler, status: int, content: bytes) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)


@contextmanager
def running_imds() -> Iterator[InstanceMetadataDouble]:
    double = InstanceMetadataDouble()
    thread = threading.Thread(target=double.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield double
    finally:
        double.server.shutdown()
        double.server.server_close()
        thread.join()
