"""Where notices of an interruption come from besides SIGTERM: a file, and AWS's instance metadata service (IMDSv2).

- $MOERL_NOTICE_FILE: whatever writes this file interrupts the step. A JSON object says more: `kind` (stop, rebalance,
  scheduled), `reason`, and `at`, the UTC epoch seconds when this place ends. Any other content is a plain stop.
- $MOERL_IMDS=on: spot/instance-action (two minutes' notice) is a stop, events/recommendations/rebalance a rebalance.
  A pod reaches the service only where the instance's hop limit is 2 or more. Paths, headers and answers are those of
  the EC2 user guide ("Spot Instance interruption notices", "rebalance recommendations", "Use IMDSv2"); tested against a
  double, not yet run on EC2.

Each source is polled by a thread of its own, so that one that hangs delays nobody.
"""

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from steps.environment import StepEnvironment
from steps.interruption import Interruption, Notice, NoticeKind

KINDS: tuple[NoticeKind, ...] = get_args(NoticeKind)
POLL_S = 0.5
TIMEOUT_S = 1.0
TOKEN_TTL_S = 21600
"""The longest that the service allows."""
UNAUTHORIZED, NOT_FOUND, OK = 401, 404, 200


@dataclass(frozen=True, slots=True)
class FoundNotice:
    """What a source says at this moment."""

    kind: NoticeKind
    reason: str
    ends_at: float | None = None
    """UTC epoch seconds."""


Source = Callable[[], list[FoundNotice]]


def watch_notices(
    interruption: Interruption,
    environment: StepEnvironment,
    say: Callable[[str], None],
    record: Callable[[Notice], None] = lambda notice: None,
) -> None:
    """Poll the sources that the environment names, in the background, until the process ends.

    `record` is called with each new notice, in a thread of its own: it may have to wait for the database.
    """
    sources: list[Source] = []
    if environment.notice_file is not None:
        sources.append(partial(read_notice_file, environment.notice_file))
    if environment.imds_url:
        sources.append(InstanceMetadata(environment.imds_url, say).read)
    for source in sources:
        watch = partial(_watch, source, interruption, say, record)
        threading.Thread(target=watch, name="notices", daemon=True).start()


def read_notice_file(path: Path) -> list[FoundNotice]:
    """Nothing while there is no such file. That there is one is the notice, also where this user may not read it."""
    try:
        content = path.read_bytes()
    except PermissionError:
        content = b""
    except OSError:
        return []
    fields = _json_object(content)
    reason = fields.get("reason")
    kind: NoticeKind = next((kind for kind in KINDS if kind == fields.get("kind")), "stop")
    return [FoundNotice(kind, reason if isinstance(reason, str) and reason else "notice", _epoch_s(fields.get("at")))]


class InstanceMetadata:
    """IMDSv2 at `url`: a session token is put in, every question carries it, 401 means that it has expired."""

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        self._address = urlsplit(url).netloc
        self._say = say
        self._token: str | None = None
        self._was_unreachable = False

    def read(self) -> list[FoundNotice]:
        """Nothing, said once, when the service can't be reached; it is asked again the next time."""
        try:
            action = self._get("/latest/meta-data/spot/instance-action")
            rebalance = self._get("/latest/meta-data/events/recommendations/rebalance")
        except (OSError, HTTPException, ValueError) as error:  # ValueError: a token that no header can carry
            if not self._was_unreachable:
                self._was_unreachable = True
                self._say(
                    f"IMDS {self._address} can't be reached ({error or type(error).__name__}); a pod needs a hop limit "
                    "of 2. SIGTERM still drains this step"
                )
            return []
        found = []
        if action is not None:
            found.append(FoundNotice("stop", "spot", _utc(_json_object(action).get("time"))))
        if rebalance is not None:
            found.append(FoundNotice("rebalance", "rebalance"))
        return found

    def _get(self, path: str) -> bytes | None:
        """None: the service has nothing to say there."""
        for _ in range(2):
            if self._token is None:
                self._token = self._new_token()
            status, body = self._ask("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if status == OK:
                return body
            if status == NOT_FOUND:
                return None
            self._token = None
        raise HTTPException(f"{path} is answered with {status}")

    def _new_token(self) -> str:
        status, body = self._ask("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)})
        if status != OK:
            raise HTTPException(f"no session token: {status}")
        return body.decode("ascii", "replace")

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = HTTPConnection(self._address, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def _watch(
    source: Source, interruption: Interruption, say: Callable[[str], None], record: Callable[[Notice], None]
) -> None:
    is_first = True
    while True:
        for found in source():
            left_s = None if found.ends_at is None else found.ends_at - time.time()
            # The successor of a worker that left may begin in the same place: leaving again would lead nowhere.
            binding = not (is_first and found.kind == "rebalance")
            notice = interruption.request(found.reason, found.kind, left_s, binding=binding)
            if notice is not None:
                until = "" if left_s is None else f", {left_s:.0f} s left"
                say(f"notice: {found.kind} ({found.reason}{until})")
                threading.Thread(target=record, args=(notice,), name="notice", daemon=True).start()
        is_first = False
        time.sleep(POLL_S)


def _json_object(content: bytes) -> dict[str, Any]:
    """Empty when it is something else."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _epoch_s(value: object) -> float | None:
    """A number that can be a time; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def _utc(value: object) -> float | None:
    """Epoch seconds of an ISO 8601 time; None when it is none."""
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return None
