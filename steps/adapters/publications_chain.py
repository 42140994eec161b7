"""Files of a folder that is stored as a delta: from the nearest parent at hand, and the deltas after it."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from moe.delta import apply_delta
from steps.adapters.publications_manifest import DELTA_SUFFIX, FileEntry, Manifest, read_manifest
from steps.adapters.store import Store, require_sha256, sha256_of_file
from steps.errors import DataError

FindCopy = Callable[[Manifest, str], AbstractContextManager[Path | None]]
"""(manifest, path) -> a verified local copy of that file, which stays while the context is open, or None."""


@dataclass(frozen=True, slots=True)
class Link:
    """One folder of a chain of parents."""

    prefix: str
    manifest: Manifest

    def overwrite(self, path: str) -> FileEntry | None:
        delta = self.manifest.delta
        return next((entry for entry in delta.overwrites if entry.path == path), None) if delta else None


def read_chain(store: Store, prefix: str, manifest: Manifest) -> list[Link]:
    """The folder at `prefix`, its parent, and so on to the one that is stored whole.

    Raises NotFound when one is missing, DataError when one is not the parent that its child was made from.
    """
    chain = [Link(prefix, manifest)]
    while (delta := chain[-1].manifest.delta) is not None:
        parent = read_manifest(store, delta.parent)
        if parent.sha256 != delta.parent_sha256 or parent.depth != delta.depth - 1:
            raise DataError(
                f"{store.uri_of(chain[-1].prefix)}: is a delta to manifest {delta.parent_sha256[:12]}, but its parent"
                f" {delta.parent} has {parent.sha256[:12]}; restore the parent, or publish the version again"
            )
        chain.append(Link(delta.parent, parent))
    return chain


def fetch_file(store: Store, chain: list[Link], entry: FileEntry, target: Path, find_copy: FindCopy) -> None:
    """Write the file `entry` of the folder `chain[0]` to `target` and verify it, in constant memory.

    Raises NotFound when an object is missing, DataError naming it when it isn't what its manifest says.
    """
    if chain[0].manifest.delta is None:
        store.download_file(chain[0].manifest.key_of(chain[0].prefix, entry.path), target, entry.sha256)
        return
    for find in (find_copy, None):  # when a copy has rotted on the disk: once more, from the store alone
        is_from_copy = _assemble(store, chain, entry.path, target, find)
        found = sha256_of_file(target)
        if found == entry.sha256 or not is_from_copy:
            break
    require_sha256(f"{store.uri_of(chain[0].prefix)}/{entry.path}", entry.sha256, found)


def _assemble(store: Store, chain: list[Link], path: str, target: Path, find_copy: FindCopy | None) -> bool:
    """Write the file; whether a local copy of a parent was its base."""
    deltas: list[tuple[Link, FileEntry]] = []
    is_from_copy = False
    for link in chain:
        if find_copy and link is not chain[0]:
            with find_copy(link.manifest, path) as copy:
                if copy is not None:
                    shutil.copyfile(copy, target)
                    is_from_copy = True
                    break
        if overwrite := link.overwrite(path):
            deltas.append((link, overwrite))
        elif link.manifest.delta is None or path not in link.manifest.delta.inherited:
            store.download_file(link.manifest.key_of(link.prefix, path), target, _sha256_of(store, link, path))
            break
    for link, overwrite in reversed(deltas):
        _overwrite(store, link, overwrite, target)
    return is_from_copy


def _overwrite(store: Store, link: Link, overwrite: FileEntry, target: Path) -> None:
    name = overwrite.path + DELTA_SUFFIX
    delta = target.with_name(target.name + DELTA_SUFFIX)
    store.download_file(link.manifest.key_of(link.prefix, name), delta, overwrite.sha256)
    try:
        apply_delta(delta, target)
    except ValueError as error:
        raise DataError(f"{store.uri_of(link.prefix)}/{overwrite.path}: {error}") from error
    delta.unlink()


def _sha256_of(store: Store, link: Link, path: str) -> str:
    for entry in link.manifest.files:
        if entry.path == path:
            return entry.sha256
    raise DataError(f"{store.uri_of(link.prefix)}: has no file {path}, which a delta needs; publish the version again")
