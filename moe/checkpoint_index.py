"""The state.json of a trainer state: which box of which tensor lies in which file, and what each file's checksum is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moe.checkpoint_files import WrittenFile

STATE_FILE = "state.json"
FORMAT = 2


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor, stored under the tensor's name in `file`."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor; its pieces don't overlap and cover it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class TrainerState:
    """What `state.json` says."""

    progress: Mapping[str, Any]
    files: Mapping[str, WrittenFile]
    tensors: Mapping[str, StoredTensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of each tensor, by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def files_of(self, prefix: str) -> list[str]:
        """The files that hold the tensors whose names begin with `prefix`, sorted."""
        tensors = (tensor for name, tensor in self.tensors.items() if name.startswith(prefix))
        return sorted({piece.file for tensor in tensors for piece in tensor.pieces})

    def to_json(self) -> dict[str, Any]:
        """The JSON content of the file."""
        return {
            "format": FORMAT,
            "progress": self.progress,
            "files": {name: asdict(file) for name, file in self.files.items()},
            "tensors": {
                name: {
                    "shape": tensor.shape,
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "pieces": [[piece.file, piece.offset, piece.shape] for piece in tensor.pieces],
                }
                for name, tensor in self.tensors.items()
            },
        }


def read_state(folder: Path) -> TrainerState:
    """Parse the state.json of `folder`; raises ValueError of one line when it is missing or not one of this format."""
    path = folder / STATE_FILE
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"checkpoint {path}: the file is missing; the checkpoint was never finished") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"checkpoint {path}: not JSON ({error}); go back to an older checkpoint") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path}: not a trainer state of format {FORMAT}; write it anew")
    try:
        return _parse(content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"checkpoint {path}: malformed ({reason}); go back to an older checkpoint") from error


def _parse(content: Mapping[str, Any]) -> TrainerState:
    files = {_plain_name(name): WrittenFile(**entry) for name, entry in content["files"].items()}
    tensors = {name: _parse_tensor(entry) for name, entry in content["tensors"].items()}
    if unknown := {piece.file for tensor in tensors.values() for piece in tensor.pieces} - files.keys():
        raise ValueError(f"file {min(unknown)} has no checksum")
    return TrainerState(dict(content["progress"]), files, tensors)


def _parse_tensor(entry: Mapping[str, Any]) -> StoredTensor:
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{entry['dtype']} is no dtype")
    shape = _sizes(entry["shape"])
    pieces = tuple(StoredPiece(file, _sizes(offset), _sizes(sizes)) for file, offset, sizes in entry["pieces"])
    for piece in pieces:
        ranges = zip(piece.offset, piece.shape, shape, strict=True)
        if not all(0 <= offset <= offset + size <= whole for offset, size, whole in ranges):
            raise ValueError(f"a piece in {piece.file} sticks out of its tensor")
    return StoredTensor(shape, dtype, pieces)


def _sizes(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _plain_name(name: str) -> str:
    """A file of the folder itself, never one that a crafted state.json names elsewhere."""
    if Path(name).name != name:
        raise ValueError(f"file name {name!r} leaves the folder")
    return name
