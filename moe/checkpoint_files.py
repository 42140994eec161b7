"""Safetensors files written as a stream: one tensor in memory at a time, and the checksum taken on the way."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names (https://github.com/huggingface/safetensors, "Format") of the dtypes that models train in."""
_HEADER_ALIGNMENT_BYTES = 8


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a file, without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WrittenFile:
    """What a reader checks a file against."""

    sha256: str
    size_bytes: int


def alignment_order(spec: TensorSpec) -> tuple[int, str]:
    """Sort key of the tensors of a file: wide dtypes first, so that every tensor is aligned to its own width."""
    return -spec.dtype.itemsize, spec.name


def write_safetensors(
    path: Path, specs: Sequence[TensorSpec], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> WrittenFile:
    """Write `tensors`, which `specs` describe one by one in order, from any device; equal input gives equal bytes.

    The file appears under its name when it is complete. Raises ValueError when a tensor is not what its spec says.
    """
    digest, size_bytes = hashlib.sha256(), 0
    with _replacing(path) as file:
        for data in _stream(path, specs, tensors, metadata):
            file.write(data)
            digest.update(data)
            size_bytes += len(data)
    return WrittenFile(digest.hexdigest(), size_bytes)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The values of a tensor, row-major; shares the memory of a contiguous one on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_json(path: Path, content: object) -> None:
    """Write canonical JSON; a reader sees the old content of the file or the new, never a part."""
    with _replacing(path) as file:
        file.write((json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and leaves nothing behind otherwise."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _stream(
    path: Path, specs: Sequence[TensorSpec], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    yield _header(specs, metadata)
    for spec, tensor in zip(specs, tensors, strict=True):
        if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            raise ValueError(
                f"{path}: tensor {spec.name} is {tensor.dtype} {tuple(tensor.shape)}, not {spec.dtype} {spec.shape} "
                "as announced"
            )
        yield tensor_bytes(tensor)


def _header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset_bytes = 0
    for spec in specs:
        end_bytes = offset_bytes + spec.size_bytes
        entries[spec.name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": [offset_bytes, end_bytes],
        }
        offset_bytes = end_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
