"""Numbers the durable writes of a step, and kills its pod by SIGKILL just before or after one of them.

A warm server preloads this module, which wraps the places where steps write: a store in a directory, the database's
commits, the node's cache. $COMMITS_FILE gets a line `rank number name` for each write that is done; what is tried in
vain has a number, too. $COMMITS_KILL is `rank number side`: the write and "before" or "after". Before: all is prepared,
the transaction written but not committed, the temporary file complete. All processes of the pod are killed at once.

Files are uploaded one at a time, and training waits for the state that is being saved: a step's writes then come in the
same order each time.
"""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.engine import Engine
from sqlalchemy.engine.default import DefaultDialect

from steps import train_checkpoints
from steps.adapters import publications, publications_cache, publications_delta
from steps.adapters.local_store import LocalStore

ADAPTERS = str(Path(publications.__file__).parent)
NOT_THE_WRITER = {"database", "retries"}
VERBS = {"compare_and_swap": "swap", "upload_file": "upload", "put_bytes": "put"}
_counter = threading.Lock()
_count = 0
_writing = threading.local()


@contextmanager
def write(name: str) -> Iterator[None]:
    """Around one durable write."""
    if "COMMITS_FILE" not in os.environ or ("RANK" in os.environ and name.startswith("cache ")):
        yield  # which of several ranks fills their cache is chance
        return
    global _count
    with _counter:
        number, _count = _count, _count + 1
    rank = os.environ.get("RANK", "0")
    _kill_if(f"{rank} {number} before")
    yield
    with open(os.environ["COMMITS_FILE"], "a") as file:
        file.write(f"{rank} {number} {name}\n")
    _kill_if(f"{rank} {number} after")


def _kill_if(moment: str) -> None:
    if os.environ.get("COMMITS_KILL") == moment:
        os.killpg(0, signal.SIGKILL)
        time.sleep(60)


def callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def commit_name() -> str:
    """The function of steps.adapters that holds the transaction."""
    for frame in callers():
        path = Path(frame.f_code.co_filename)
        if str(path.parent) == ADAPTERS and path.stem not in NOT_THE_WRITER:
            return f"commit {path.stem}.{frame.f_code.co_name.lstrip('_')}"
    return "commit database.migrate"


def object_name(key: str) -> str:
    """The key below the run's folder with `N` for numbers and `*/FILE` for the files of an upload."""
    key = re.sub(r"/[0-9a-f]{16}/.*", "/*/FILE", key.split("/", 2)[2])
    return re.sub(r"\d{5}", "N", key)


def place(self: LocalStore, temporary: Path, target: Path, how: Callable[[Path, Path], None]) -> None:
    functions = [frame.f_code.co_name for frame in callers()]
    verb = next(verb for function, verb in VERBS.items() if function in functions)
    if how is not os.replace:
        verb = "create"
    with write(f"{verb} {object_name(target.relative_to(self._root).as_posix())}"):
        PLACE(self, temporary, target, how)


def delete(self: LocalStore, keys: Iterable[str]) -> None:
    for key in list(keys):
        if self.head(key) is not None:
            with write(f"delete {object_name(key)}"):
                DELETE(self, [key])


def replace(self: Path, target: Path) -> Path:
    if not str(target).startswith(os.environ.get("MOERL_CACHE_DIR", "none")):
        return REPLACE(self, target)  # an output of the attempt
    with write("cache FILE"):
        return REPLACE(self, target)


def write_text(self: Path, text: str, *arguments: Any, **options: Any) -> int:
    if not self.name.endswith(".stamps.json"):
        return WRITE_TEXT(self, text, *arguments, **options)
    with write("cache stamps"):
        return WRITE_TEXT(self, text, *arguments, **options)


def note_kind(connection: Connection) -> None:
    """Called right before the dialect commits."""
    _writing.is_now = connection.get_execution_options().get("moerl_begin") is not None


def do_commit(self: DefaultDialect, connection: Any) -> None:
    is_write, _writing.is_now = getattr(_writing, "is_now", False), False
    if not is_write:
        return DO_COMMIT(self, connection)
    with write(commit_name()):
        DO_COMMIT(self, connection)


def between_steps(self: train_checkpoints.UpdateCheckpoints) -> bool:
    if self._underway is not None and self._underway.job is not None:
        self._underway.job.exception()
    return BETWEEN_STEPS(self)


PLACE, DELETE = LocalStore._place, LocalStore.delete
REPLACE, WRITE_TEXT = Path.replace, Path.write_text
DO_COMMIT = DefaultDialect.do_commit
BETWEEN_STEPS = train_checkpoints.UpdateCheckpoints.between_steps
LocalStore._place, LocalStore.delete = place, delete  # type: ignore[method-assign]
Path.replace, Path.write_text = replace, write_text  # type: ignore[method-assign,assignment]
DefaultDialect.do_commit = do_commit  # type: ignore[method-assign]
train_checkpoints.UpdateCheckpoints.between_steps = between_steps  # type: ignore[method-assign]
event.listen(Engine, "commit", note_kind)
publications.PARALLEL_FILES = publications_delta.PARALLEL_FILES = publications_cache._PARALLEL_FILES = 1
