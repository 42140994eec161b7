"""The manifest of an immutable folder in the store: what the folder holds, and where its bytes lie."""

import json
import re
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from steps.adapters.store import Store, sha256_of_bytes, validate_key
from steps.errors import DataError

MANIFEST_NAME = "manifest.json"
DELTA_SUFFIX = ".delta"
_FORMAT = 2
_UPLOAD_ID = re.compile(r"[0-9a-f]{16}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a folder; `path` is relative, with `/`."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """How a folder's files come from those of its parent; a file that is not mentioned is stored whole."""

    parent: str
    """Prefix of the parent."""
    parent_sha256: str
    depth: int
    """Folders in the chain of parents; the last of them is stored whole."""
    overwrites: tuple[FileEntry, ...]
    """Files to overwrite in part: path of the file, size and SHA-256 of the delta (`moe.delta`)."""
    inherited: tuple[str, ...]
    """Paths of the files that are those of the parent."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder holds; `extra` is what its writer says about it (versions, parent, provenance, ...)."""

    files: tuple[FileEntry, ...]
    extra: dict[str, Any]
    upload_id: str
    """Name of the sub-folder with the files: two writers never write into the same one."""
    delta: Delta | None = None
    """None: all files are stored whole."""

    def to_bytes(self) -> bytes:
        """Canonical JSON, as it is stored."""
        return (json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n").encode()

    @cached_property
    def sha256(self) -> str:
        """Identity of the content: SHA-256 of the canonical JSON of `files` and `extra`, wherever the bytes lie."""
        content = {"files": [asdict(entry) for entry in self.files], "extra": self.extra}
        return sha256_of_bytes(json.dumps(content, sort_keys=True).encode())

    @property
    def size_bytes(self) -> int:
        """Of the folder; what lies in the store may be less."""
        return sum(entry.size_bytes for entry in self.files)

    @property
    def depth(self) -> int:
        """Deltas that a reader applies who has nothing yet."""
        return self.delta.depth if self.delta else 0

    @property
    def stored(self) -> tuple[FileEntry, ...]:
        """The objects in the sub-folder."""
        if self.delta is None:
            return self.files
        derived = {*self.delta.inherited, *(entry.path for entry in self.delta.overwrites)}
        deltas = (replace(entry, path=entry.path + DELTA_SUFFIX) for entry in self.delta.overwrites)
        return (*(entry for entry in self.files if entry.path not in derived), *deltas)

    @property
    def stored_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.stored)

    def key_of(self, prefix: str, path: str) -> str:
        """Key in the store of one of the `stored` objects of the folder at `prefix`."""
        return file_key(prefix, self.upload_id, path)


def file_key(prefix: str, upload_id: str, path: str) -> str:
    return f"{prefix}/{upload_id}/{path}"


def manifest_key(prefix: str) -> str:
    return f"{prefix}/{MANIFEST_NAME}"


def read_manifest(store: Store, prefix: str) -> Manifest:
    """Read the manifest of `prefix`; raises NotFound when nothing was published there, DataError when malformed."""
    key = manifest_key(prefix)
    return parse_manifest(store.get_bytes(key), store.uri_of(key))


def parse_manifest(data: bytes, uri: str) -> Manifest:
    """Raises DataError naming `uri` when the bytes are no manifest, or one whose paths leave the folder."""
    try:
        raw = json.loads(data)
        if raw["format"] != _FORMAT:
            raise DataError(f"{uri}: format {raw['format']!r} is not {_FORMAT}; use the release that wrote it")
        if not _UPLOAD_ID.fullmatch(raw["upload_id"]):
            raise ValueError("upload_id is not 16 hexadecimal digits")
        manifest = Manifest(
            files=_parse_files(raw["files"]),
            extra=dict(raw["extra"]),
            upload_id=raw["upload_id"],
            delta=None if raw["delta"] is None else _parse_delta(raw["delta"]),
        )
        _check_stored(manifest)
        return manifest
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{uri}: not a manifest ({error}); publish the folder again") from error


def _parse_files(raw: list[dict[str, Any]]) -> tuple[FileEntry, ...]:
    files = tuple(FileEntry(**entry) for entry in raw)
    for entry in files:
        validate_key(entry.path)
        if type(entry.size_bytes) is not int or entry.size_bytes < 0 or not _SHA256.fullmatch(entry.sha256):
            raise ValueError(f"{entry.path} has no size or no SHA-256")
        if entry.path == MANIFEST_NAME:
            raise ValueError(f"it lists {MANIFEST_NAME}")
    if len({entry.path for entry in files}) != len(files):
        raise ValueError("it lists a file twice")
    return files


def _parse_delta(raw: dict[str, Any]) -> Delta:
    overwrites = _parse_files(raw["overwrites"])
    delta = Delta(**{**raw, "overwrites": overwrites, "inherited": tuple(raw["inherited"])})
    validate_key(delta.parent)
    if type(delta.depth) is not int or delta.depth < 1 or not _SHA256.fullmatch(delta.parent_sha256):
        raise ValueError("its delta has no depth or no SHA-256 of the parent")
    return delta


def _check_stored(manifest: Manifest) -> None:
    if manifest.delta is None:
        return
    derived = [*manifest.delta.inherited, *(entry.path for entry in manifest.delta.overwrites)]
    stored = [entry.path for entry in manifest.stored]
    if not {*derived} <= {entry.path for entry in manifest.files} or len({*derived}) != len(derived):
        raise ValueError("its delta names a file that is not in the folder, or one twice")
    if len({*stored}) != len(stored):
        raise ValueError("it stores two files under one name")
