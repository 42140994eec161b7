"""Locks between processes on this machine: one executor a workflow, and Argo's mutexes."""

import asyncio
import contextlib
import fcntl
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from steps.errors import ServiceUnavailable

_POLL_S = 0.1  # only while another process holds the lock


def _try_lock(path: Path) -> IO[str] | None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = path.open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle


@contextlib.contextmanager
def hold_workflow(folder: Path) -> Iterator[None]:
    """ServiceUnavailable when another executor runs this workflow. The kernel frees the lock however we end."""
    handle = _try_lock(folder / "lock")
    if handle is None:
        raise ServiceUnavailable(f"{folder.name} is being run by another process; wait for it or stop it")
    with handle:
        yield


class Mutexes:
    """Argo's synchronization.mutexes, by name; held by a workflow or a node of any process that shares `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.asynccontextmanager
    async def hold(self, names: Sequence[str], give_up: Callable[[], bool]) -> AsyncIterator[None]:
        """Waits for all of `names` (in one order, so that two holders can't block each other) or until give_up()."""
        with contextlib.ExitStack() as held:
            for name in sorted(set(names)):
                path = self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"
                while (handle := _try_lock(path)) is None and not give_up():
                    await asyncio.sleep(_POLL_S)
                if handle is not None:
                    held.enter_context(handle)
            yield
