"""Local copies of immutable folders of the store, shared by the processes of a node; `cache_eviction` ends them.

A copy is named by its manifest's SHA-256. One process downloads what is missing while the others wait; a file is in its
place only when its checksum was right. It counts while it is as it was then, by size, time of writing and time of
change: hashing at each use is too slow, and no program can write to a file and keep the last.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from steps.adapters.cache_eviction import hold, in_use, locked, make_room, stamps_file
from steps.adapters.publications_chain import fetch_file, read_chain
from steps.adapters.publications_manifest import MANIFEST_NAME, Manifest, read_manifest
from steps.adapters.store import NotFound, Store, explained_os_errors

_PARALLEL_FILES = 4


def fetch_folder(store: Store, prefix: str, cache_dir: Path) -> Path:
    """Return a local copy of the folder at `prefix`, with its manifest: read-only by agreement.

    It stays while this process lives. Raises NotFound, or DataError naming the file, the expected and the found
    checksum.
    """
    return _fetch(store, prefix, cache_dir, None)


def fetch_files(store: Store, prefix: str, cache_dir: Path, paths: Collection[str]) -> Path:
    """As `fetch_folder`, but only these files of the folder are certain to be in the copy."""
    return _fetch(store, prefix, cache_dir, paths)


def _fetch(store: Store, prefix: str, cache_dir: Path, paths: Collection[str] | None) -> Path:
    manifest = read_manifest(store, prefix)
    wanted = {entry.path for entry in manifest.files} if paths is None else set(paths)
    if unknown := sorted(wanted - {entry.path for entry in manifest.files}):
        raise NotFound(f"{store.uri_of(prefix)}: its manifest names no file {unknown[0]}; write the folder again")
    target = cache_dir.absolute() / manifest.sha256
    with explained_os_errors(f"cache {cache_dir}"):
        cache_dir.mkdir(parents=True, exist_ok=True)
        hold(target)
        if _missing(target, wanted):
            with locked(target):
                if missing := _missing(target, wanted):
                    make_room(
                        cache_dir.absolute(),
                        sum(entry.size_bytes for entry in manifest.files if entry.path in missing),
                    )
                    _download(store, prefix, manifest, missing, target)
    return target


def _download(store: Store, prefix: str, manifest: Manifest, missing: set[str], target: Path) -> None:
    """Get the files, verify them all, and only then move them to their places."""
    chain = read_chain(store, prefix, manifest)
    with _partial_folder(target) as folder:
        entries = [entry for entry in manifest.files if entry.path in missing]
        for parent in {(folder / entry.path).parent for entry in entries}:
            parent.mkdir(parents=True, exist_ok=True)
        find = partial(_find_copy, target.parent)
        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            jobs = [pool.submit(fetch_file, store, chain, entry, folder / entry.path, find) for entry in entries]
            for job in jobs:
                job.result()
        (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
        fetched = [*(entry.path for entry in entries), MANIFEST_NAME]
        verified = {path: stamp for path, stamp in _verified_stamps(target).items() if path not in fetched}
        for path in fetched:
            _remove_links(target, path)
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).replace(target / path)
        stamps = verified | {path: _stamp(target / path) for path in fetched}
        stamps_file(target).write_text(json.dumps(stamps))


def _remove_links(target: Path, path: str) -> None:
    """A link in the place of a folder would lead what is written out of the cache."""
    for folder in reversed(Path(path).parents):
        if folder.name and (target / folder).is_symlink():
            (target / folder).unlink()


@contextmanager
def _find_copy(cache_dir: Path, manifest: Manifest, path: str) -> Iterator[Path | None]:
    """The verified copy of a file of another folder, if there is one; it stays while the context is open."""
    copy = cache_dir / manifest.sha256
    with in_use(copy):
        yield None if _missing(copy, {path}) else copy / path


def _missing(target: Path, wanted: set[str]) -> set[str]:
    """Those of the files that are not in the copy as they were verified."""
    verified = _verified_stamps(target)
    return {
        path for path in {*wanted, MANIFEST_NAME} if path not in verified or verified[path] != _stamp(target / path)
    }


def _verified_stamps(target: Path) -> dict[str, list[int]]:
    try:
        stamps: dict[str, list[int]] = json.loads(stamps_file(target).read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}  # none yet, or another process is writing them: ask again under the lock
    return stamps if isinstance(stamps, dict) else {}


def _stamp(path: Path) -> list[int] | None:
    """What changes when a file is written to; None when there is no file."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


@contextmanager
def _partial_folder(target: Path) -> Iterator[Path]:
    folder = target.with_name(f".partial-{target.name}")
    shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed: the caller holds the lock
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
