"""Writes an immutable folder as a delta to a parent: only what has changed is stored."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moe.delta import comparable, write_delta
from steps.adapters.publications import (
    PARALLEL_FILES,
    describe_files,
    finish_folder,
    finish_manifest,
    new_upload_id,
    upload_files,
    upload_folder,
)
from steps.adapters.publications_manifest import (
    DELTA_SUFFIX,
    Delta,
    FileEntry,
    Manifest,
    manifest_key,
    read_manifest,
)
from steps.adapters.store import Store, require_sha256, sha256_of_file

_WORTHWHILE = 0.5
"""A delta of more than this part of a file isn't worth the reader's work."""


@dataclass(frozen=True, slots=True)
class Parent:
    """A stored folder and a local copy of it."""

    prefix: str
    folder: Path


def upload_delta(store: Store, folder: Path, prefix: str, extra: dict[str, Any], parent: Parent) -> Manifest:
    """As `upload_folder`, with the same manifest of files for readers, but stored as what differs from `parent`.

    The whole folder is stored when no file can be expressed as a smaller delta. Raises DataError when the local copy of
    the parent is not what the parent's manifest says.
    """
    files = describe_files(folder)
    if store.head(manifest_key(prefix)) is not None:
        return finish_folder(store, prefix, new_upload_id(), files, extra)
    parent_manifest = read_manifest(store, parent.prefix)
    parents = {entry.path: entry for entry in parent_manifest.files}
    inherited = tuple(entry.path for entry in files if parents.get(entry.path) == entry)
    changed = [entry for entry in files if entry.path not in inherited]
    with TemporaryDirectory() as temporary:
        with ThreadPoolExecutor(PARALLEL_FILES) as pool:
            jobs = [pool.submit(_prepare, folder, Path(temporary), entry, parent, parents) for entry in changed]
            with_delta = {entry.path for entry, job in zip(changed, jobs, strict=True) if job.result()}
        if not with_delta:
            return upload_folder(store, folder, prefix, extra)
        upload_id = new_upload_id()
        uploaded = {entry.path: entry for entry in upload_files(store, Path(temporary), prefix, upload_id)}
    overwrites = tuple(_renamed(uploaded[path + DELTA_SUFFIX], path) for path in sorted(with_delta))
    delta = Delta(
        parent=parent.prefix,
        parent_sha256=parent_manifest.sha256,
        depth=parent_manifest.depth + 1,
        overwrites=overwrites,
        inherited=inherited,
    )
    manifest = Manifest(files=tuple(files), extra=extra, upload_id=upload_id, delta=delta)
    return finish_manifest(store, prefix, manifest)


def _prepare(folder: Path, upload: Path, entry: FileEntry, parent: Parent, parents: dict[str, FileEntry]) -> bool:
    """Put into `upload` what is to be stored for one file; whether that is a delta."""
    new, old = folder / entry.path, parent.folder / entry.path
    delta = upload / (entry.path + DELTA_SUFFIX)
    delta.parent.mkdir(parents=True, exist_ok=True)
    if entry.path.endswith(".safetensors") and entry.path in parents and comparable(old, new):
        stats = write_delta(old, new, delta)
        if stats.size_bytes <= _WORTHWHILE * entry.size_bytes:
            # A delta to rotten bytes would rot every reader's copy.
            require_sha256(old.as_uri(), parents[entry.path].sha256, sha256_of_file(old))
            return True
        delta.unlink()
    (upload / entry.path).symlink_to(new.absolute())
    return False


def _renamed(entry: FileEntry, path: str) -> FileEntry:
    return FileEntry(path=path, size_bytes=entry.size_bytes, sha256=entry.sha256)
