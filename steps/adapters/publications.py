"""Immutable folders in the store (publications, checkpoints, batches), and the pointers that name one of them.

A folder exists once its `manifest.json` does; that is written last, and only once. Readers trust nothing else. Files
lie under their own names beside the manifest, so that a publication is loadable where it lies.
"""

import fcntl
import json
import shutil
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from steps.adapters.store import (
    AlreadyExists,
    Conflict,
    NotFound,
    Store,
    explained_os_errors,
    sha256_of_bytes,
    sha256_of_file,
    validate_key,
)
from steps.errors import DataError, ServiceUnavailable

MANIFEST_NAME = "manifest.json"
_FORMAT = 1
_PARALLEL_FILES = 4
_MAX_POINTER_TRIES = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a folder; `path` is relative, with `/`."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a folder holds; `extra` is what its writer says about it (versions, parent, provenance, ...)."""

    files: tuple[FileEntry, ...]
    extra: dict[str, Any]

    def to_bytes(self) -> bytes:
        """Canonical JSON: equal manifests have equal bytes."""
        return (json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n").encode()

    @property
    def sha256(self) -> str:
        return sha256_of_bytes(self.to_bytes())

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)


def upload_folder(store: Store, folder: Path, prefix: str, extra: dict[str, Any]) -> Manifest:
    """Write all files below `folder` under `prefix`, then the manifest; repeating it with equal content is harmless.

    Raises DataError when `prefix` already holds another content; an existing manifest is found before anything is
    written. Memory use is constant in the size of the files.
    """
    return finish_folder(store, prefix, upload_files(store, folder, prefix), extra)


def upload_files(store: Store, folder: Path, prefix: str) -> list[FileEntry]:
    """Write all files below `folder` under `prefix`, without a manifest; what was written, for `finish_folder`.

    Several processes may each write a part of one folder so. Below an existing manifest nothing is written.
    """
    paths = _relative_paths(folder)
    if store.head(f"{prefix}/{MANIFEST_NAME}") is not None:
        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            return list(pool.map(lambda path: _describe(folder, path), paths))
    # Two threads a file: hashing takes no time of its own while the network is the limit.
    with ThreadPoolExecutor(_PARALLEL_FILES) as hashing, ThreadPoolExecutor(_PARALLEL_FILES) as sending:
        described = [hashing.submit(_describe, folder, path) for path in paths]
        sent = [sending.submit(store.upload_file, folder / path, f"{prefix}/{path}") for path in paths]
        entries = [future.result() for future in described]
        stored_sizes = [future.result().size_bytes for future in sent]
    for entry, stored_bytes in zip(entries, stored_sizes, strict=True):
        if entry.size_bytes != stored_bytes:
            raise DataError(f"{folder / entry.path}: changed while it was uploaded; write the folder again")
    return entries


def finish_folder(store: Store, prefix: str, entries: Iterable[FileEntry], extra: dict[str, Any]) -> Manifest:
    """Write the manifest of files that lie under `prefix`; raises DataError when another one is there already."""
    manifest = Manifest(files=tuple(sorted(entries, key=lambda entry: entry.path)), extra=extra)
    try:
        store.put_bytes(f"{prefix}/{MANIFEST_NAME}", manifest.to_bytes(), if_none_match=True)
    except AlreadyExists:
        return _require_same(store, prefix, manifest)
    return manifest


def read_manifest(store: Store, prefix: str) -> Manifest:
    """Read the manifest of `prefix`; raises NotFound when nothing was published there, DataError when malformed."""
    key = f"{prefix}/{MANIFEST_NAME}"
    return _parse_manifest(store.get_bytes(key), store.uri_of(key))


def fetch_folder(store: Store, prefix: str, cache_dir: Path) -> Path:
    """Return a local copy of the folder at `prefix`, with its manifest: read-only by agreement, shared by processes.

    The copy's name is the manifest's SHA-256. One process of the machine downloads it while the others wait. Raises
    NotFound, or DataError naming the file, the expected and the found checksum.
    """
    return _fetch(store, prefix, cache_dir, None)


def fetch_files(store: Store, prefix: str, cache_dir: Path, paths: Collection[str]) -> Path:
    """As `fetch_folder`, but only these files of the folder are certain to be in the copy."""
    return _fetch(store, prefix, cache_dir, paths)


def move_pointer(store: Store, key: str, version: int, payload: dict[str, Any]) -> bool:
    """Make the pointer at `key` name `version`; return False, writing nothing, when it names that or a later one."""
    data = json.dumps({**payload, "version": version}, sort_keys=True).encode()
    for _ in range(_MAX_POINTER_TRIES):
        current = store.head(key)
        if current is not None and _parse_pointer(store.get_bytes(key), store.uri_of(key))["version"] >= version:
            return False
        try:
            store.compare_and_swap(key, data, current.etag if current else None)
        except Conflict:
            continue
        return True
    raise ServiceUnavailable(f"{store.uri_of(key)}: {_MAX_POINTER_TRIES} others moved it first; run again")


def read_pointer(store: Store, key: str) -> dict[str, Any] | None:
    """Return the pointer's payload with its `version`, or None when it was never moved."""
    try:
        data = store.get_bytes(key)
    except NotFound:
        return None
    return _parse_pointer(data, store.uri_of(key))


def _relative_paths(folder: Path) -> list[str]:
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    if MANIFEST_NAME in paths:
        raise ValueError(f"{folder}/{MANIFEST_NAME}: the store writes a file of this name; remove yours")
    return paths


def _describe(folder: Path, path: str) -> FileEntry:
    return FileEntry(path=path, size_bytes=(folder / path).stat().st_size, sha256=sha256_of_file(folder / path))


def _require_same(store: Store, prefix: str, manifest: Manifest) -> Manifest:
    found = read_manifest(store, prefix)
    if found.to_bytes() != manifest.to_bytes():
        raise DataError(
            f"{store.uri_of(prefix)}: holds another content already (manifest {found.sha256[:12]}, not"
            f" {manifest.sha256[:12]}); published folders never change: use a new run, or keep what is there"
        )
    return found


def _parse_manifest(data: bytes, uri: str) -> Manifest:
    try:
        raw = json.loads(data)
        if raw["format"] != _FORMAT:
            raise DataError(f"{uri}: format {raw['format']!r} is not {_FORMAT}; use the release that wrote it")
        files = tuple(FileEntry(**entry) for entry in raw["files"])
        for entry in files:
            validate_key(entry.path)
        return Manifest(files=files, extra=dict(raw["extra"]))
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{uri}: not a manifest ({error}); publish the folder again") from error


def _parse_pointer(data: bytes, uri: str) -> dict[str, Any]:
    try:
        pointer = json.loads(data)
        if not isinstance(pointer["version"], int):
            raise TypeError("version is not an integer")
        return dict(pointer)
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{uri}: not a pointer ({error}); delete it and publish again") from error


def _fetch(store: Store, prefix: str, cache_dir: Path, paths: Collection[str] | None) -> Path:
    manifest = read_manifest(store, prefix)
    wanted = {entry.path for entry in manifest.files} if paths is None else set(paths)
    if unknown := sorted(wanted - {entry.path for entry in manifest.files}):
        raise NotFound(f"{store.uri_of(prefix)}: its manifest names no file {unknown[0]}; write the folder again")
    target = cache_dir.absolute() / manifest.sha256
    with explained_os_errors(f"cache {cache_dir}"):
        if not _missing(target, wanted):
            return target
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _exclusive(cache_dir / f"{manifest.sha256}.lock"):
            if missing := _missing(target, wanted):
                _download(store, prefix, manifest, missing, target)
    return target


def _download(store: Store, prefix: str, manifest: Manifest, missing: set[str], target: Path) -> None:
    """Get the files, verify them all, and only then move them to their places."""
    with _partial_folder(target) as folder:
        entries = [entry for entry in manifest.files if entry.path in missing]
        for parent in {(folder / entry.path).parent for entry in entries}:
            parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            jobs = [
                pool.submit(store.download_file, f"{prefix}/{entry.path}", folder / entry.path, entry.sha256)
                for entry in entries
            ]
            for job in jobs:
                job.result()
        (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
        fetched = [*(entry.path for entry in entries), MANIFEST_NAME]
        stamps = _verified_stamps(target) | {path: _stamp(folder / path) for path in fetched}
        _stamps_file(target).write_text(json.dumps(stamps))
        for path in fetched:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).replace(target / path)


def _missing(target: Path, wanted: set[str]) -> set[str]:
    """Those of the files that are not in the cached copy as they were verified (hashing at each use is too slow)."""
    verified = _verified_stamps(target)
    return {
        path for path in {*wanted, MANIFEST_NAME} if path not in verified or verified[path] != _stamp(target / path)
    }


def _verified_stamps(target: Path) -> dict[str, list[int]]:
    try:
        stamps: dict[str, list[int]] = json.loads(_stamps_file(target).read_text())
    except (FileNotFoundError, ValueError):  # none yet, or another process is writing them: ask again under the lock
        return {}
    return stamps


def _stamps_file(target: Path) -> Path:
    return target.with_name(f"{target.name}.stamps.json")


def _stamp(path: Path) -> list[int] | None:
    """What changes when a file is written to; None when there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_mtime_ns]


@contextmanager
def _partial_folder(target: Path) -> Iterator[Path]:
    folder = target.with_name(f".partial-{target.name}")
    shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed: the caller holds the lock
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
