"""A store in a directory, for one machine or a shared POSIX file system with hard links and fcntl locks.

Every object is written to a temporary file under `.moerl/tmp`, synced, and then linked or renamed into place, so a
reader never sees half of one, whatever is killed. Compare-and-swap holds a lock file under `.moerl/locks`.
"""

import fcntl
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from steps.adapters.store import (
    RESERVED_FOLDER,
    AlreadyExists,
    Conflict,
    NotFound,
    ObjectInfo,
    explained_os_errors,
    partial_file,
    require_sha256,
    sha256_of_bytes,
    sha256_of_file,
    validate_key,
)
from steps.errors import ConfigError, DataError

_HASHED_ETAG_BYTES = 1 << 20
"""Up to this size the etag is the content's SHA-256; hashing a larger file for each listing would be too slow."""
_STALE_TEMPORARY_S = 24 * 3600.0


class LocalStore:
    """See `steps.adapters.store.Store`."""

    def __init__(self, root: Path) -> None:
        with explained_os_errors(f"store {root}"):
            self._root = root.resolve()
            if self._root.exists() and not self._root.is_dir():
                raise ConfigError(f"store {root}: is a file; name a directory")
        self._temporaries = self._root / RESERVED_FOLDER / "tmp"
        self._locks = self._root / RESERVED_FOLDER / "locks"
        self._remove_stale_temporaries()

    @property
    def uri(self) -> str:
        return self._root.as_uri()

    def uri_of(self, key: str) -> str:
        return (self._root / validate_key(key)).as_uri()

    def put_bytes(self, key: str, data: bytes, *, if_none_match: bool = False) -> ObjectInfo:
        target = self._path(key)
        with self._explained(key):
            etag = self._write(target, data, _link_new if if_none_match else os.replace)
        return ObjectInfo(key=key, size_bytes=len(data), etag=etag)

    def get_bytes(self, key: str) -> bytes:
        with self._explained(key):
            return self._existing(key).read_bytes()

    def head(self, key: str) -> ObjectInfo | None:
        path = self._path(key)
        with self._explained(key):
            return _describe(key, path)

    def compare_and_swap(self, key: str, data: bytes, expected_etag: str | None) -> ObjectInfo:
        self._path(key)
        with self._explained(key), self._locked(key):
            current = self.head(key)
            if (current.etag if current else None) != expected_etag:
                raise Conflict(key)
            return self.put_bytes(key, data)

    def upload_file(self, path: Path, key: str) -> ObjectInfo:
        target = self._path(key)
        size_bytes = path.stat().st_size
        with self._explained(key), self._temporary() as temporary:
            shutil.copyfile(path, temporary)
            _sync(temporary)
            info = _describe(key, temporary)  # before it is in its place, as in `_write`
            if info is None or info.size_bytes != size_bytes:
                raise DataError(f"{self.uri_of(key)}: {path} changed while it was stored; write it again")
            self._place(temporary, target, os.replace)
        return info

    def download_file(self, key: str, path: Path, sha256: str | None = None) -> None:
        with self._explained(key):
            source = self._existing(key)
        with explained_os_errors(f"copying {source} to {path}"), partial_file(path) as temporary:
            found = _copy_with_sha256(source, temporary)
            if sha256 is not None:
                require_sha256(self.uri_of(key), sha256, found)

    def list(self, prefix: str) -> list[ObjectInfo]:
        folder = self._path(prefix.strip("/")) if prefix.strip("/") else self._root
        with self._explained(prefix):
            found = (self._describe_listed(path) for path in _files_below(folder, self._root / RESERVED_FOLDER))
            return sorted((info for info in found if info), key=lambda info: os.fsencode(info.key))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with self._explained(key):
                try:
                    self._path(key).unlink(missing_ok=True)
                except NotADirectoryError:
                    continue

    def _path(self, key: str) -> Path:
        path = self._root / validate_key(key)
        if not path.resolve().is_relative_to(self._root):
            raise DataError(f"{path}: a symbolic link leads out of the store {self._root}; remove it")
        return path

    def _existing(self, key: str) -> Path:
        path = self._path(key)
        if not path.is_file():
            raise NotFound(f"{path}: not found in the store")
        return path

    def _describe_listed(self, path: Path) -> ObjectInfo | None:
        return _describe(path.relative_to(self._root).as_posix(), path)

    def _write(self, target: Path, data: bytes, place: Callable[[Path, Path], None]) -> str:
        with self._temporary() as temporary:
            with open(temporary, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            etag = _etag_of_bytes(data, temporary)  # as it stays in its place, where others may delete it at once
            self._place(temporary, target, place)
        return etag

    def _place(self, temporary: Path, target: Path, place: Callable[[Path, Path], None]) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        place(temporary, target)
        _sync(target.parent)

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        self._temporaries.mkdir(parents=True, exist_ok=True)
        temporary = self._temporaries / uuid.uuid4().hex
        with open(temporary, "wb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # says that its writer lives
            try:
                yield temporary
            finally:
                temporary.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        # The lock file stays: removing it would let two writers lock two different files of the same name.
        self._locks.mkdir(parents=True, exist_ok=True)
        with open(self._locks / sha256_of_bytes(os.fsencode(key)), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _explained(self, key: str) -> AbstractContextManager[None]:
        return explained_os_errors(f"store {self._root}, key {key}")

    def _remove_stale_temporaries(self) -> None:
        """Remove what writers that were killed left behind. Old alone proves nothing: a clock may have been set."""
        if not self._temporaries.is_dir():
            return
        oldest = time.time() - _STALE_TEMPORARY_S
        with self._explained(RESERVED_FOLDER):
            for entry in os.scandir(self._temporaries):
                with suppress(FileNotFoundError):  # its writer has ended, or another process removes it
                    if entry.stat(follow_symlinks=False).st_mtime < oldest and not _is_locked(Path(entry)):
                        Path(entry).unlink()


def _is_locked(path: Path) -> bool:
    with open(path, "r+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _link_new(temporary: Path, target: Path) -> None:
    try:
        os.link(temporary, target)
    except FileExistsError as error:
        raise AlreadyExists(target.name) from error


def _describe(key: str, path: Path) -> ObjectInfo | None:
    try:
        status = path.stat(follow_symlinks=False)
        if not path.is_file():
            return None
        etag = sha256_of_file(path) if status.st_size <= _HASHED_ETAG_BYTES else _etag_of_status(status)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return ObjectInfo(key=key, size_bytes=status.st_size, etag=etag)


def _etag_of_status(status: os.stat_result) -> str:
    return f"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"


def _etag_of_bytes(data: bytes, path: Path) -> str:
    return sha256_of_bytes(data) if len(data) <= _HASHED_ETAG_BYTES else _etag_of_status(path.stat())


def _files_below(folder: Path, excluded: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for entry in os.scandir(folder):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            if path != excluded:
                yield from _files_below(path, excluded)
        elif entry.is_file(follow_symlinks=False):
            yield path


def _copy_with_sha256(source: Path, target: Path) -> str:
    digest = hashlib.sha256()
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while chunk := reader.read(1 << 20):
            digest.update(chunk)
            writer.write(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
