"""The object store behind one interface: `s3://bucket/prefix`, or a directory for everything else.

Objects appear whole or not at all. Keys are relative paths with `/`. Both kinds of store behave alike, except that a
directory can't hold an object at `a` and another at `a/b`.
"""

import errno
import hashlib
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from steps.errors import ConfigError, DataError, ServiceUnavailable

RESERVED_FOLDER = ".moerl"
"""First segment that no key may have: a directory store keeps its temporary files and locks there."""

_MAX_KEY_BYTES = 1024
_MAX_SEGMENT_BYTES = 255
_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space and run again",
    errno.EDQUOT: "the disk quota is used up; free some space and run again",
    errno.EACCES: "permission denied; give this user read and write access",
    errno.EPERM: "permission denied; give this user read and write access",
    errno.EROFS: "the file system is read-only; choose another directory",
    errno.ENOTDIR: "a part of the path is a file, not a directory",
    errno.EISDIR: "there is a directory where an object should be",
}
_FORBIDDEN_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\\]")
_USER_INFO = re.compile(r"://(?:[^/\s@:]*:\S*|[^/\s]*)@")  # a password may hold `/` and `@`


class NotFound(DataError):
    """The store has no object at this key."""


class AlreadyExists(Exception):
    """A conditional write found an object at its key."""


class Conflict(Exception):
    """A compare-and-swap found another content than the expected one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """One object as the store sees it."""

    key: str
    size_bytes: int
    etag: str
    """Changes with the content; opaque, and comparable only with other etags of the same key."""


class Store(Protocol):
    """Every method raises ServiceUnavailable or ConfigError, in one line, when the store refuses or can't be reached,
    and ValueError for a malformed key."""

    @property
    def uri(self) -> str:
        """Root of the store: `s3://bucket/prefix` or `file:///folder`."""

    def uri_of(self, key: str) -> str:
        """Absolute URI of a key or prefix."""

    def put_bytes(self, key: str, data: bytes, *, if_none_match: bool = False) -> ObjectInfo:
        """Write a small object; with `if_none_match` raise AlreadyExists, writing nothing, when there is one."""

    def get_bytes(self, key: str) -> bytes:
        """Read a small object, or raise NotFound."""

    def head(self, key: str) -> ObjectInfo | None:
        """Describe an object without reading it; None when there is none."""

    def compare_and_swap(self, key: str, data: bytes, expected_etag: str | None) -> ObjectInfo:
        """Replace an object only while it has `expected_etag` (None: only while there is none), or raise Conflict.

        Conflict may also follow a swap that was done: its answer was lost, and another swap came before the next try.
        Read the object again to know.
        """

    def upload_file(self, path: Path, key: str) -> ObjectInfo:
        """Store a file of any size in constant memory, replacing an object at `key`."""

    def download_file(self, key: str, path: Path, sha256: str | None = None) -> None:
        """Fetch an object of any size in constant memory; `path` appears whole.

        Raises NotFound, or DataError naming both checksums when the content's SHA-256 isn't `sha256`.
        """

    def list(self, prefix: str) -> "list[ObjectInfo]":
        """All objects in the folder `prefix` and below it ("" for the whole store), ordered by key."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; a key without one is no error."""


def open_store(uri: str) -> Store:
    """Return the store at `uri`: `s3://bucket[/prefix]`, `file:///folder`, or a directory path (created when needed).

    Raises ConfigError when `uri` is none of these.
    """
    if not uri:
        raise ConfigError("MOERL_STORE is empty: set it to s3://bucket/prefix or to a directory")
    if uri.startswith("s3://"):
        bucket, prefix = _split_s3(uri)
        from steps.adapters.s3_store import S3Store  # boto3 takes 0.3 s to import, which a directory store need not pay

        return S3Store(bucket, prefix)
    from steps.adapters.local_store import LocalStore

    return LocalStore(_folder(uri))


def read_uri(uri: str) -> bytes:
    """Read the small object at an absolute URI: `s3://bucket/key` or `file:///folder/name`.

    Raises ConfigError when `uri` names no object, and what `open_store` and `Store.get_bytes` raise.
    """
    prefix, _, name = uri.rpartition("/")
    if not name or prefix.endswith("/"):
        raise ConfigError(f"{masked(uri)!r} names no object; use s3://bucket/path/to/file")
    if uri.startswith("file:"):
        name = unquote(name)
    return open_store(prefix).get_bytes(_valid(name, uri))


def masked(text: str) -> str:
    """Hide the user and password of every URL in a text."""
    return _USER_INFO.sub("://***@", text)


def _split_s3(uri: str) -> tuple[str, str]:
    """(bucket, prefix or ""). Taken literally: a key may hold `?`, `#` and `%`."""
    bucket, _, path = uri.removeprefix("s3://").partition("/")
    if "@" in bucket or ":" in bucket:
        raise ConfigError(
            "store s3://***: credentials don't belong in the URI; use s3://bucket/prefix and set AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY"
        )
    prefix = path.strip("/")
    return bucket, _valid(prefix, uri) if prefix else ""


def _folder(uri: str) -> Path:
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise ConfigError(f"store {masked(uri)!r}: {error}; use s3://bucket/prefix or a directory path") from error
    path = uri
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        path = unquote(parts.path)
    elif "://" in uri or parts.scheme == "file":
        raise ConfigError(f"store {masked(uri)!r}: use s3://bucket/prefix, file:///folder or a directory path")
    if "\0" in path:
        raise ConfigError(f"store {uri!r}: remove the NUL character")
    return Path(path)


def _valid(key: str, uri: str) -> str:
    try:
        return validate_key(key)
    except ValueError as error:
        raise ConfigError(f"store {masked(uri)!r}: {error}") from error


def validate_key(key: str) -> str:
    """Return `key`, or raise ValueError: a key stays below the store's root, on every kind of store."""
    segments = key.split("/")
    if any(segment in ("", ".", "..") for segment in segments):
        raise ValueError(f"store key {key!r}: use a relative path without empty, '.' or '..' segments")
    if _FORBIDDEN_CHARACTERS.search(key):
        raise ValueError(f"store key {key!r}: remove control characters and backslashes")
    if segments[0] == RESERVED_FOLDER:
        raise ValueError(f"store key {key!r}: the folder {RESERVED_FOLDER} is reserved")
    encoded_sizes = [len(os.fsencode(segment)) for segment in segments]
    if sum(encoded_sizes) + len(segments) - 1 > _MAX_KEY_BYTES or max(encoded_sizes) > _MAX_SEGMENT_BYTES:
        raise ValueError(f"store key {key[:60]!r}...: at most {_MAX_KEY_BYTES} bytes, {_MAX_SEGMENT_BYTES} a segment")
    return key


@contextmanager
def explained_os_errors(where: str) -> Iterator[None]:
    """Turn the operating system's refusals (disk full, no permission, ...) into one line of ServiceUnavailable."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, error.strerror or str(error))
        raise ServiceUnavailable(f"{where}: {remedy}") from error


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` that becomes `path` when the block succeeds, and vanishes otherwise."""
    temporary = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sha256_of_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def require_sha256(uri: str, expected: str, found: str) -> None:
    """Raise DataError when an object's checksum is not the expected one."""
    if found != expected:
        raise DataError(f"{uri}: expected sha256 {expected}, found {found}: the file is corrupt, write it again")
