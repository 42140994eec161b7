"""How workers and an engine host know each other, and the files by which those of one machine share one."""

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from steps.adapters.engines.http_client import JsonClient, ServerRefused, ServerUnreachable
from steps.config_loader import config_hash
from steps.entrypoint import RankContext

STATUS_TIMEOUT_S = 5.0
ENGINE_VARIABLES = ("MOERL_ENGINE_PYTHON", "MOERL_ENGINE_URL")
"""Which interpreter has the server's package, and where a fleet is: of a machine, not of a run."""


def run_identity(context: RankContext) -> str:
    """Name of what a host serves. An id alone is not enough: a run may be made anew, or in another store."""
    known_by = f"{context.store.uri}\n{config_hash(context.config)}"
    return f"{context.run_id}-{hashlib.sha256(known_by.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class HostFiles:
    """Below `folder`: host.json, host.log, server.log, a lock to start the host, and one that its users share."""

    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "host.log"

    def announce(self, url: str) -> None:
        """Written whole: a reader sees the old host or the new one."""
        partial = self.folder / ".host.json.partial"
        partial.write_text(json.dumps({"url": url}))
        partial.replace(self.folder / "host.json")

    def announced(self) -> str:
        """URL of the host that was started last, empty when there was none; it may be gone."""
        try:
            return str(json.loads((self.folder / "host.json").read_text())["url"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):  # none yet, or one whose machine lost its power
            return ""

    @contextmanager
    def starting(self) -> Iterator[None]:
        """One process at a time looks for the host and starts it."""
        with (self.folder / "start.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def use(self) -> IO[str]:
        """A file that marks this process as a user while it is open; the system closes it when we die."""
        mark = (self.folder / "users.lock").open("w")
        fcntl.flock(mark, fcntl.LOCK_SH)
        return mark

    def in_use(self) -> bool:
        try:
            with (self.folder / "users.lock").open("w") as mark:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:  # the cache was emptied: nobody comes to this host any more
            return False
        return False


def stop_hosts(cache_dir: Path) -> int:
    """End the hosts that workers have started below this cache, when nothing will sample any more; how many there were.

    For who drives a run on one machine; hosts that are missed end by themselves after `rollout.server.idle_s`.
    """
    stopped = 0
    for path in sorted(cache_dir.glob("engines/*/host.json")):
        client = JsonClient(HostFiles(path.parent).announced())
        try:
            client.post("/stop", {}, STATUS_TIMEOUT_S)
            stopped += 1
        except (ServerUnreachable, ServerRefused):
            continue
    return stopped
