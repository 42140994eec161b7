"""Immutable folders in the store (publications, checkpoints, batches), and the pointers that name one of them.

A folder exists once its `manifest.json` does; that is written last, and only once. Readers trust nothing else. The
files of each attempt to write a folder lie in a sub-folder of their own, which the manifest names: attempts never mix.
"""

import json
import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from steps.adapters.publications_manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    file_key,
    manifest_key,
    read_manifest,
)
from steps.adapters.store import AlreadyExists, Conflict, NotFound, Store, sha256_of_file
from steps.errors import DataError, ServiceUnavailable

PARALLEL_FILES = 4
_MAX_POINTER_TRIES = 50


class OtherContent(DataError):
    """A folder is there already, and holds something else: `found`."""

    def __init__(self, uri: str, found: Manifest, ours: Manifest) -> None:
        super().__init__(
            f"{uri}: holds another content already (manifest {found.sha256[:12]}, not {ours.sha256[:12]}); published"
            " folders never change: use a new run, or keep what is there"
        )
        self.found = found


def new_upload_id() -> str:
    """Name of one attempt to write a folder. Several processes that write parts of it share one."""
    return secrets.token_hex(8)


def upload_folder(store: Store, folder: Path, prefix: str, extra: dict[str, Any]) -> Manifest:
    """Write all files below `folder` under `prefix`, then the manifest; repeating it with equal content is harmless.

    Raises OtherContent when `prefix` already holds another content; an existing manifest is found before anything is
    written. Memory use is constant in the size of the files.
    """
    upload_id = new_upload_id()
    return finish_folder(store, prefix, upload_id, upload_files(store, folder, prefix, upload_id), extra)


def upload_files(store: Store, folder: Path, prefix: str, upload_id: str) -> list[FileEntry]:
    """Write all files below `folder` for the folder at `prefix`, no manifest; what was written, for `finish_folder`.

    Several processes may each write a part of one folder so, under one upload id. Below an existing manifest nothing
    is written.
    """
    paths = _relative_paths(folder)
    if store.head(manifest_key(prefix)) is not None:
        return describe_files(folder)
    # Two threads a file: hashing takes no time of its own while the network is the limit.
    with ThreadPoolExecutor(PARALLEL_FILES) as hashing, ThreadPoolExecutor(PARALLEL_FILES) as sending:
        described = [hashing.submit(_describe, folder, path) for path in paths]
        sent = [sending.submit(store.upload_file, folder / path, file_key(prefix, upload_id, path)) for path in paths]
        entries = [future.result() for future in described]
        stored_sizes = [future.result().size_bytes for future in sent]
    for entry, stored_bytes in zip(entries, stored_sizes, strict=True):
        if entry.size_bytes != stored_bytes:
            raise DataError(f"{folder / entry.path}: changed while it was uploaded; write the folder again")
    return entries


def describe_files(folder: Path) -> list[FileEntry]:
    """Path, size and SHA-256 of all files below `folder`, ordered by path."""
    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        return list(pool.map(lambda path: _describe(folder, path), _relative_paths(folder)))


def finish_folder(
    store: Store, prefix: str, upload_id: str, entries: Iterable[FileEntry], extra: dict[str, Any]
) -> Manifest:
    """Write the manifest of files that were uploaded for `prefix` under `upload_id`; returns the one that stands.

    Another attempt's manifest stands when it has equal content; the files of all other attempts are deleted. Raises
    OtherContent when it hasn't.
    """
    files = tuple(sorted(entries, key=lambda entry: entry.path))
    return finish_manifest(store, prefix, Manifest(files=files, extra=extra, upload_id=upload_id))


def finish_manifest(store: Store, prefix: str, manifest: Manifest) -> Manifest:
    """As `finish_folder`."""
    try:
        store.put_bytes(manifest_key(prefix), manifest.to_bytes(), if_none_match=True)
        standing = manifest
    except AlreadyExists:
        standing = read_manifest(store, prefix)
    kept = (manifest_key(prefix), file_key(prefix, standing.upload_id, ""))
    store.delete([info.key for info in store.list(prefix) if not info.key.startswith(kept)])
    if standing.sha256 != manifest.sha256:
        raise OtherContent(store.uri_of(prefix), standing, manifest)
    return standing


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


def _parse_pointer(data: bytes, uri: str) -> dict[str, Any]:
    try:
        pointer = json.loads(data)
        if type(pointer["version"]) is not int:
            raise TypeError("version is not an integer")
        return dict(pointer)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{uri}: not a pointer ({error}); delete it and publish again") from error
