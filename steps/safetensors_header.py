"""Tensors of a safetensors file as bytes, without torch.

Format: https://github.com/huggingface/safetensors, "Format": a little-endian uint64 with the header's size, the header
(JSON: name -> dtype, shape, data_offsets), the data.
"""

import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steps.errors import DataError

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor's place in a file. `dtype` is the format's name, as in F32."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte in the file."""
    end: int


def read_header(name: str, data: bytes | mmap.mmap) -> dict[str, RawTensor]:
    """The tensors of a file of which `data` are the bytes; DataError when it is not such a file."""
    try:
        header_bytes = int.from_bytes(bytes(data[:_LENGTH_BYTES]), "little")
        start = _LENGTH_BYTES + header_bytes
        if start > len(data):
            raise ValueError("it is cut short")
        header: dict[str, Any] = json.loads(bytes(data[_LENGTH_BYTES:start]))
        header.pop("__metadata__", None)
        tensors = {key: _tensor(entry, start) for key, entry in header.items()}
        if any(not start <= tensor.begin <= tensor.end <= len(data) for tensor in tensors.values()):
            raise ValueError("a tensor lies outside the file")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{name}: not a safetensors file ({error})") from None
    return tensors


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """The bytes of a file, without reading it into memory."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _tensor(entry: dict[str, Any], start: int) -> RawTensor:
    begin, end = entry["data_offsets"]
    return RawTensor(str(entry["dtype"]), tuple(int(size) for size in entry["shape"]), start + begin, start + end)
