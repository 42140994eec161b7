"""MLflow as a mirror: events go to the spool in the store first, and from there to the server when it answers.

No problem of tracking fails a step, and a forward never waits longer than its budget. The work is done by a daemon
thread that is left behind when the time is up; its own requests end within seconds (MLFLOW_HTTP_REQUEST_*), and it
stops before the next spool object. Whatever it didn't mark as sent is sent again by the next forward, with the original
timestamps, which MLflow stores only once.

With a SQLite file there is no server to wait for: loading MLflow (1 to 2 s) and creating the file (2 s, once) then have
up to SQLITE_PREPARATION_S before the budget's clock starts.
"""

import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from steps.adapters.spool import Event, Metric, Spool
from steps.adapters.store import Store, masked
from steps.errors import StepError
from steps.paths import spool_prefix

if TYPE_CHECKING:
    from steps.adapters.mlflow_run import MlflowRun

SQLITE_PREPARATION_S = 15.0
"""Longest time for loading MLflow and creating a SQLite file, beyond the budget."""

_CONNECT_TIMEOUT_S = 1.0
_SQLITE_PREFIX = "sqlite:///"
_MLFLOW_LIMITS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class TrackingOutage(Exception):
    """The tracking server is down, too slow or refuses us; the message is one line without credentials."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardResult:
    """What became of the spool objects: `sent` now, `pending` for a later forward, and why if any are."""

    sent: int
    pending: int
    reason: str
    """Empty when everything was sent and taken."""
    run_url: str | None
    """Page of the run in MLflow's UI, when the server was reached."""


class Tracker:
    """The tracking of one training run: one MLflow run, found by its tag `moerl.run_id` and resumed."""

    def __init__(self, store: Store, run_id: str, experiment: str, budget_s: float, tracking_uri: str | None) -> None:
        self._spool = Spool(store, spool_prefix(run_id))
        self._run_id = run_id
        self._experiment = experiment
        self._budget_s = budget_s
        self._tracking_uri = tracking_uri or ""

    def record(self, name: str, events: Sequence[Event]) -> None:
        """Write the events of one step, durably; `name` orders and identifies them (e.g. `00003-5-train`).

        The first record of a name stays. Raises ServiceUnavailable when the store can't take it.
        """
        self._spool.write(name, events)

    def forward(self) -> ForwardResult:
        """Send what is pending, in order, within the budget. Whatever goes wrong with tracking is the result's reason.

        Raises the store's errors when the spool can't be listed.
        """
        names = self._spool.pending()
        if not self._tracking_uri:
            return ForwardResult(sent=0, pending=len(names), reason="MLFLOW_TRACKING_URI is not set", run_url=None)
        if not names:
            return ForwardResult(sent=0, pending=0, reason="", run_url=None)
        for variable, value in _MLFLOW_LIMITS.items():
            os.environ.setdefault(variable, value)
        replay = _Replay(self._spool, self._run_id, self._experiment, self._tracking_uri, names)
        return replay.run_within(self._budget_s)


class _Replay(threading.Thread):
    """One forward on a thread of its own."""

    def __init__(self, spool: Spool, run_id: str, experiment: str, tracking_uri: str, names: Sequence[str]) -> None:
        super().__init__(name="tracking-forward", daemon=True)
        self._spool = spool
        self._run_id = run_id
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._names = names
        self._sent = 0
        self._refused: list[str] = []
        self._outage = ""
        self._run_url: str | None = None
        self._prepared = threading.Event()
        self._abandoned = threading.Event()

    def run_within(self, budget_s: float) -> ForwardResult:
        self.start()
        outage = ""
        if self._tracking_uri.startswith(_SQLITE_PREFIX) and not self._prepared.wait(SQLITE_PREPARATION_S):
            outage = f"MLflow was not ready within {SQLITE_PREPARATION_S:g} s"
        else:
            self.join(budget_s)
            if self.is_alive():
                outage = f"no answer within {budget_s:g} s"
        if outage:
            self._abandoned.set()
            outage = f"{masked(self._tracking_uri)}: {outage}; the rest is sent later"
        sent = self._sent
        reason = "; ".join(filter(None, [outage or self._outage, *self._refused]))
        return ForwardResult(sent=sent, pending=len(self._names) - sent, reason=reason, run_url=self._run_url)

    def run(self) -> None:
        try:
            if self._tracking_uri.startswith(_SQLITE_PREFIX):
                _load_mlflow_and_create(self._tracking_uri)
                self._prepared.set()
            self._send_all()
        except (TrackingOutage, StepError) as error:
            self._outage = str(error)
        except BaseException as error:  # whatever MLflow does, tracking must not fail the step: the reason tells
            text = " ".join(str(error).split())[:300]
            self._outage = masked(f"{self._tracking_uri}: {type(error).__name__}: {text}; sent later")
        finally:
            self._prepared.set()

    def _send_all(self) -> None:
        _require_listening(self._tracking_uri)
        run: MlflowRun | None = None
        for name in self._names:
            if self._abandoned.is_set():
                return
            events = self._spool.read(name)
            if run is None:
                run = _open_run(self._tracking_uri, self._experiment, self._run_id, events)
                self._run_url = run.url
            refused = run.send(events)
            self._spool.mark_sent(name, run.id, refused)
            self._refused.extend(refused)
            self._sent += 1


def _open_run(tracking_uri: str, experiment: str, run_id: str, events: Sequence[Event]) -> "MlflowRun":
    from steps.adapters.mlflow_run import open_run  # 1 to 2 s, which a dead server must not cost

    first_ms = min((event.timestamp_ms for event in events if isinstance(event, Metric)), default=None)
    return open_run(tracking_uri, experiment, run_id, start_ms=first_ms or int(time.time() * 1000))


def _require_listening(tracking_uri: str) -> None:
    """Find a dead server out before MLflow is loaded and starts to retry."""
    if tracking_uri.startswith(_SQLITE_PREFIX):
        return
    try:
        parts = urlsplit(tracking_uri)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return  # a database or a plug-in: MLflow knows it, and the budget holds all the same
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), timeout=_CONNECT_TIMEOUT_S).close()
    except ValueError:  # its text may hold a part of a password
        raise TrackingOutage(
            f"{masked(tracking_uri)}: no valid host and port; use http://host:port in MLFLOW_TRACKING_URI; sent later"
        ) from None
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise TrackingOutage(f"{masked(tracking_uri)}: can't be reached ({reason}); sent later") from error


def _load_mlflow_and_create(tracking_uri: str) -> None:
    path = Path(tracking_uri.removeprefix(_SQLITE_PREFIX))
    if not path.is_absolute():
        raise TrackingOutage(f"MLFLOW_TRACKING_URI {tracking_uri!r}: use four slashes and an absolute path; sent later")
    from steps.adapters.mlflow_run import create_sqlite_file

    create_sqlite_file(path)
