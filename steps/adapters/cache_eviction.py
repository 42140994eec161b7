"""Which local copies of folders stay: those in use, and the last used ones as far as MOERL_CACHE_BYTES reaches.

Beside the copy `NAME` lie `NAME.use`, locked (shared) by every process that uses the copy and touched at each use, and
`NAME.lock`, locked by the one that fills it. The kernel frees both when a process ends, however it ends. These files
are never deleted: another process might be waiting for the lock on the deleted one.
"""

import fcntl
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from steps.environment import read_cache_bytes

_NAME = re.compile(r"[0-9a-f]{64}")
_PARTIAL = ".partial-"
_EVICTED = ".evicted-"
_held: dict[Path, int] = {}
"""Open lock files of this process, by copy."""
_held_guard = threading.Lock()


def hold(copy: Path) -> None:
    """Keep a copy from eviction while this process lives, and note that it is used now."""
    with _held_guard:
        if copy in _held and os.fstat(_held[copy]).st_nlink == 0:  # somebody has emptied the cache's folder
            os.close(_held.pop(copy))
        if copy not in _held:
            _held[copy] = _lock_shared(copy)
        os.utime(_held[copy])


def release(copy: Path) -> None:
    """This process does not use the copy any more."""
    with _held_guard:
        if copy in _held:
            os.close(_held.pop(copy))


@contextmanager
def in_use(copy: Path) -> Iterator[None]:
    """Keep a copy from eviction while the context is open."""
    descriptor = _lock_shared(copy)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def locked(copy: Path) -> Iterator[None]:
    """Be the only one that writes to a copy."""
    with open(copy.with_name(f"{copy.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_room(cache_dir: Path, size_bytes: int) -> None:
    """Delete copies that nobody uses, the longest unused first, until `size_bytes` more are within the limit.

    Copies in use are never deleted: when they alone exceed the limit, so does the cache. What killed processes left is
    deleted as well.
    """
    with _if_free(cache_dir / "evict.lock") as is_free:
        if not is_free:
            return  # another process is at it
        _remove_remains(cache_dir)
        sizes = {
            Path(entry): _size_bytes(Path(entry)) for entry in os.scandir(cache_dir) if _NAME.fullmatch(entry.name)
        }
        excess_bytes = sum(sizes.values()) + size_bytes - read_cache_bytes(cache_dir)
        for copy in sorted(sizes, key=_last_use_s):
            if excess_bytes <= 0:
                return
            if _evict(copy):
                excess_bytes -= sizes[copy]


def stamps_file(copy: Path) -> Path:
    """Where it is noted how the files of a copy looked when they were verified."""
    return copy.with_name(f"{copy.name}.stamps.json")


def _use_file(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.use")


def _last_use_s(copy: Path) -> float:
    use = _use_file(copy)
    return use.stat().st_mtime if use.exists() else 0.0


def _lock_shared(copy: Path) -> int:
    """Waits while the copy is being deleted."""
    descriptor = os.open(_use_file(copy), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


@contextmanager
def _if_free(path: Path) -> Iterator[bool]:
    """Whether nobody else has locked `path`; it is locked meanwhile."""
    with open(path, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _evict(copy: Path) -> bool:
    with _if_free(_use_file(copy)) as is_free:
        if is_free:
            # First the stamps: half a copy without them counts as none.
            stamps_file(copy).unlink(missing_ok=True)
            remains = copy.with_name(f"{_EVICTED}{copy.name}-{secrets.token_hex(4)}")
            copy.rename(remains)
            shutil.rmtree(remains)
        return is_free


def _remove_remains(cache_dir: Path) -> None:
    for entry in list(os.scandir(cache_dir)):
        if entry.name.startswith(_EVICTED):
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name.startswith(_PARTIAL):
            with _if_free(cache_dir / f"{entry.name.removeprefix(_PARTIAL)}.lock") as is_free:
                if is_free:
                    shutil.rmtree(entry, ignore_errors=True)


def _size_bytes(folder: Path) -> int:
    total_bytes = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total_bytes += path.stat().st_size
    return total_bytes
