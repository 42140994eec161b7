"""Reading boxes of tensors out of a trainer state, whatever layout wrote it and whatever layout reads it."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe.checkpoint_index import StoredPiece, TrainerState
from moe.placement import Piece

_HASHING_THREADS = 4

Box = tuple[tuple[int, int], ...]
"""Half-open range of each dimension."""


def files_needed(state: TrainerState, pieces: Mapping[str, Piece]) -> set[str]:
    """The files of `state` that hold an element of `pieces`.

    Raises ValueError naming the tensor that is missing, of another shape or dtype, or incomplete.
    """
    _check(state, pieces)
    return set(_reads(state, pieces))


def verify_files(folder: Path, state: TrainerState, files: Iterable[str]) -> None:
    """Raise ValueError naming the first of `files` that is missing in `folder` or has another size or checksum."""

    def verify(name: str) -> str | None:
        path = folder / name
        if not path.is_file():
            return f"checkpoint {path}: the file is missing; restore it or go back to an older checkpoint"
        expected, size_bytes = state.files[name], path.stat().st_size
        if size_bytes != expected.size_bytes:
            return (
                f"checkpoint {path}: it has {size_bytes} bytes instead of {expected.size_bytes}; restore it or go back "
                "to an older checkpoint"
            )
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != expected.sha256:
            return f"checkpoint {path}: its checksum is wrong; restore it or go back to an older checkpoint"
        return None

    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        for problem in pool.map(verify, sorted(files)):
            if problem is not None:
                raise ValueError(problem)


def read_pieces(folder: Path, state: TrainerState, pieces: Mapping[str, Piece]) -> None:
    """Fill the tensor of every piece in place from the files of `folder`, which `verify_files` has passed.

    Only the elements asked for are read. Raises ValueError naming the tensor that is missing, of another shape or
    dtype, or incomplete.
    """
    _check(state, pieces)
    _fill(folder, state, pieces)


def read_whole(folder: Path, state: TrainerState, name: str, dtype: torch.dtype) -> Tensor:
    """One whole tensor of a verified state, on the CPU, converted to `dtype` while it is read."""
    shape = state.tensors[name].shape
    tensor = torch.empty(shape, dtype=dtype)
    _fill(folder, state, {name: Piece(shape, (0,) * len(shape), tensor)})
    return tensor


def _check(state: TrainerState, pieces: Mapping[str, Piece]) -> None:
    for name, piece in pieces.items():
        stored = state.tensors.get(name)
        if stored is None:
            raise ValueError(f"trainer state: tensor {name} is missing; the checkpoint is of another model")
        if (stored.shape, stored.dtype) != (piece.full_shape, piece.tensor.dtype):
            raise ValueError(
                f"trainer state: tensor {name} is {stored.dtype} {list(stored.shape)}, not {piece.tensor.dtype} "
                f"{list(piece.full_shape)}; the checkpoint is of another model"
            )


@torch.no_grad()
def _fill(folder: Path, state: TrainerState, pieces: Mapping[str, Piece]) -> None:
    for file, reads in sorted(_reads(state, pieces).items()):
        try:
            with safe_open(folder / file, "pt") as opened:
                for name, stored, box in reads:
                    source = opened.get_slice(name)[_slices(box, stored.offset)] if box else opened.get_tensor(name)
                    pieces[name].tensor[_slices(box, pieces[name].offset)].copy_(source)
        except (SafetensorError, FileNotFoundError) as error:
            raise ValueError(f"checkpoint {folder / file}: {error}; go back to an older checkpoint") from error


def _reads(state: TrainerState, pieces: Mapping[str, Piece]) -> dict[str, list[tuple[str, StoredPiece, Box]]]:
    """What to read from each file: a tensor's name, the stored piece, and the box of the whole tensor."""
    reads: dict[str, list[tuple[str, StoredPiece, Box]]] = defaultdict(list)
    for name, piece in pieces.items():
        num_elements = 0
        for stored in state.tensors[name].pieces:
            if (box := _overlap(piece, stored)) is not None:
                reads[stored.file].append((name, stored, box))
                num_elements += prod(stop - start for start, stop in box)
        if num_elements != piece.tensor.numel():
            raise ValueError(f"trainer state: tensor {name} is incomplete; go back to an older checkpoint")
    return reads


def _overlap(piece: Piece, stored: StoredPiece) -> Box | None:
    """What both boxes share; None when that is empty. A tensor without dimensions is always whole."""
    sizes = zip(piece.offset, piece.tensor.shape, stored.offset, stored.shape, strict=True)
    box = tuple(
        (max(offset, stored_offset), min(offset + size, stored_offset + stored_size))
        for offset, size, stored_offset, stored_size in sizes
    )
    return box if all(start < stop for start, stop in box) else None


def _slices(box: Box, offset: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start - begin, stop - begin) for (start, stop), begin in zip(box, offset, strict=True))
