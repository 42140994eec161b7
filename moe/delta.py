"""Overwrite deltas between two safetensors files of one layout: the new values of the changed elements, and where.

    magic, size of both files                                          (16 bytes)
    blocks: header, positions, values                                  (only blocks with a change)
    a block header of zeros                                            (the end: a truncated file lacks it)

A block is a run of at most BLOCK_BYTES of one element width. Positions are the gaps between changed elements, a byte
each (255: go on by 255); values lie byte plane by byte plane, so that the exponents meet. zstd compresses both. A block
in which most elements changed has no positions, but all values. Values replace what is there: a delta can be applied
again, also after it was half applied.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard
from numpy.typing import NDArray

BLOCK_BYTES = 8 << 20
_MAGIC = b"MOEDLT01"
_SIZE = struct.Struct("<Q")
_BLOCK = struct.Struct("<QIIII")
"""Offset in the file, bytes of the block, width of an element, bytes of the positions (0: all), bytes of the values."""
_LEVEL = 3
_ESCAPE = 255
_MAX_HEADER_BYTES = 100 << 20
_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
"""Bytes of an element by the format's dtype name; those of all others count as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaStats:
    """What a delta holds."""

    elements: int
    changed_elements: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring tensors of one width."""

    start: int
    end: int
    width: int


def comparable(old: Path, new: Path) -> bool:
    """Whether the files have the same tensors at the same places, so that a delta between them exists."""
    header = _read_header(new)
    return header is not None and header == _read_header(old) and old.stat().st_size == new.stat().st_size


def write_delta(old: Path, new: Path, delta: Path) -> DeltaStats:
    """Write to `delta` what turns `old` into `new`, in memory of a few blocks.

    Raises ValueError when the files aren't `comparable`, or no safetensors files.
    """
    header = _read_header(new)
    if header is None or not comparable(old, new):
        raise ValueError(f"{new}: other tensors than {old}; a delta needs equal names, dtypes, shapes and order")
    elements = changed_elements = 0
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    with open(old, "rb") as old_file, open(new, "rb") as new_file, open(delta, "wb") as out:
        out.write(_MAGIC + _SIZE.pack(new.stat().st_size))
        for run in _runs(header):
            for start in range(run.start, run.end, BLOCK_BYTES):
                size_bytes = min(BLOCK_BYTES, run.end - start)
                before, after = (_read_block(file, start, size_bytes, run.width) for file in (old_file, new_file))
                changed = np.flatnonzero(before != after)
                elements += after.size
                changed_elements += changed.size
                if changed.size:
                    positions, values = _encode(after, changed, compressor)
                    out.write(_BLOCK.pack(start, size_bytes, run.width, len(positions), len(values)))
                    out.write(positions)
                    out.write(values)
        out.write(bytes(_BLOCK.size))
    return DeltaStats(elements=elements, changed_elements=changed_elements, size_bytes=delta.stat().st_size)


def apply_delta(delta: Path, target: Path) -> None:
    """Overwrite in `target`, a copy of the old file, what `delta` says; harmless when it is applied already.

    Raises ValueError naming `delta` when it is malformed or for a file of another size; `target` must then not be used.
    """
    try:
        with open(delta, "rb") as source, open(target, "r+b") as file:
            size_bytes = target.stat().st_size
            if source.read(len(_MAGIC)) != _MAGIC or _SIZE.unpack(source.read(_SIZE.size))[0] != size_bytes:
                raise ValueError(f"it is none for a file of {size_bytes} bytes")
            decompressor = zstandard.ZstdDecompressor()
            while (header := _BLOCK.unpack(source.read(_BLOCK.size))) != (0, 0, 0, 0, 0):
                _overwrite(file, source, header, size_bytes, decompressor)
    except (ValueError, struct.error, zstandard.ZstdError) as error:
        raise ValueError(f"delta {delta}: {error}; the file is corrupt, publish the weights again") from error


def _overwrite(
    file: BinaryIO,
    source: BinaryIO,
    header: tuple[int, int, int, int, int],
    file_bytes: int,
    decompressor: zstandard.ZstdDecompressor,
) -> None:
    start, size_bytes, width, positions_bytes, values_bytes = header
    if not 0 < size_bytes <= BLOCK_BYTES or start + size_bytes > file_bytes:
        raise ValueError(f"a block of {size_bytes} bytes at {start} is outside of the file")
    if width not in (1, 2, 4, 8) or size_bytes % width:
        raise ValueError(f"a block of {size_bytes} bytes has no elements of {width}")
    packed_positions, packed_values = source.read(positions_bytes), source.read(values_bytes)
    block: NDArray[Any] | None = None
    count = size_bytes // width
    positions = None
    if positions_bytes:
        positions = _decode_positions(_decompress(packed_positions, 2 * count, decompressor), count)
        block = _read_block(file, start, size_bytes, width)
        count = positions.size
    planes = np.frombuffer(_decompress(packed_values, count * width, decompressor), np.uint8)
    if planes.size != count * width:
        raise ValueError(f"{planes.size} bytes are no {count} values of {width}")
    values = np.ascontiguousarray(planes.reshape(width, count).T).view(_unsigned(width)).reshape(-1)
    if block is not None and positions is not None:
        block[positions] = values
        values = block
    file.seek(start)
    file.write(values.data)


def _encode(
    block: NDArray[Any], changed: NDArray[np.intp], compressor: zstandard.ZstdCompressor
) -> tuple[bytes, bytes]:
    """(positions, values), compressed; no positions when it is smaller to send the block whole."""
    width = block.itemsize
    if changed.size * (width + 1) >= block.nbytes:
        return b"", compressor.compress(_planes(block))
    gaps = np.diff(changed, prepend=-1) - 1
    ends = np.cumsum(gaps // _ESCAPE + 1) - 1
    positions = np.full(int(ends[-1]) + 1, _ESCAPE, np.uint8)
    positions[ends] = gaps % _ESCAPE
    return compressor.compress(positions.data), compressor.compress(_planes(block[changed]))


def _planes(values: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T).data


def _decode_positions(data: bytes, count: int) -> NDArray[np.intp]:
    gaps = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(gaps != _ESCAPE)
    positions = np.cumsum(gaps, dtype=np.intp)[ends] + np.arange(ends.size)
    if not positions.size or positions[-1] >= count:
        raise ValueError(f"it names elements outside of a block of {count}")
    return positions


def _decompress(data: bytes, max_bytes: int, decompressor: zstandard.ZstdDecompressor) -> bytes:
    size_bytes = zstandard.frame_content_size(data)
    if not 0 <= size_bytes <= max_bytes:  # before anything of that size is allocated
        raise ValueError(f"a block of {size_bytes} bytes where {max_bytes} are the most")
    return decompressor.decompress(data)


def _read_block(file: BinaryIO, start: int, size_bytes: int, width: int) -> NDArray[Any]:
    buffer = bytearray(size_bytes)
    file.seek(start)
    if file.readinto(buffer) != size_bytes:  # type: ignore[attr-defined]
        raise ValueError(f"the file ends before byte {start + size_bytes}")
    return np.frombuffer(buffer, _unsigned(width))


def _unsigned(width: int) -> np.dtype[Any]:
    return np.dtype(f"<u{width}")


def _runs(header: bytes) -> Iterator[_Run]:
    """The tensors of a file in the order of their bytes, neighbours of one width together."""
    tensors = sorted(
        (tensor["data_offsets"][0], tensor["data_offsets"][1], _WIDTHS.get(tensor["dtype"], 1))
        for name, tensor in json.loads(header).items()
        if name != "__metadata__"
    )
    data_start = _SIZE.size + len(header)
    run: _Run | None = None
    for start, end, width in tensors:
        if run is not None and run.width == width and run.end == data_start + start:
            run = _Run(run.start, data_start + end, width)
            continue
        if run is not None:
            yield run
        run = _Run(data_start + start, data_start + end, width)
    if run is not None:
        yield run


def _read_header(path: Path) -> bytes | None:
    """The JSON text before the tensors (https://github.com/huggingface/safetensors, "Format"); None: another format."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(_SIZE.size), "little")
        header = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    return header if header.startswith(b"{") and len(header) == length else None
