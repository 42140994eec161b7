"""Trainer state on disk: every rank's pieces in safetensors files, and a state.json, written last, that names them all.

    model-00000-of-00002.safetensors   optimizer-00000-of-00002.safetensors   state.json   (rank 0)
    model-00001-of-00002.safetensors   optimizer-00001-of-00002.safetensors                (rank 1)

A tensor that several ranks hold alike is written by one of them. A state can be read in any layout.
"""

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from moe.checkpoint_files import TensorSpec, WrittenFile, alignment_order, write_json, write_safetensors
from moe.checkpoint_index import STATE_FILE, StoredPiece, StoredTensor, TrainerState, read_state
from moe.checkpoint_reader import files_needed, read_pieces, verify_files
from moe.placement import Piece

MODEL_PREFIX = "model."


class Loadable(Protocol):
    """What takes over a state, or a part of it: `moe.update.PolicyTrainer`, `moe.checkpoint_weights.ModelWeights`."""

    def prepare_load(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, Piece]:
        """The pieces to fill from a state that has tensors of these names and full shapes; may be called again."""

    def restore_progress(self, progress: Mapping[str, Any]) -> None:
        """Take over what `Checkpointed.progress` returned, after the pieces were filled."""


class Checkpointed(Protocol):
    """What has a state: `moe.update.PolicyTrainer`."""

    def state_pieces(self) -> dict[str, Piece]:
        """This rank's pieces, by tensor name; the tensors are the live ones."""

    def progress(self) -> dict[str, Any]:
        """The rest of the state, as JSON values; equal on all ranks."""


@dataclass(frozen=True)
class StatePart:
    """What one rank has written of a state: its files, and the pieces in them."""

    files: dict[str, WrittenFile]
    pieces: list[tuple[str, tuple[int, ...], torch.dtype, StoredPiece]]
    """(name, full shape, dtype, piece)"""


@dataclass(frozen=True)
class StateSnapshot:
    """This rank's share of a state at one moment: the pieces by the file that they belong to, and the progress."""

    files: dict[str, dict[str, Piece]]
    progress: dict[str, Any]

    def write(self, folder: Path) -> StatePart:
        """Write this rank's files into `folder`; no collectives, so that a thread may do it."""
        folder.mkdir(parents=True, exist_ok=True)
        part = StatePart({}, [])
        for file, pieces in self.files.items():
            specs = [TensorSpec(name, piece.tensor.dtype, tuple(piece.tensor.shape)) for name, piece in pieces.items()]
            specs.sort(key=alignment_order)
            tensors = (pieces[spec.name].tensor for spec in specs)
            part.files[file] = write_safetensors(folder / file, specs, tensors, metadata={})
            for spec in specs:
                piece = pieces[spec.name]
                stored = StoredPiece(file, piece.offset, spec.shape)
                part.pieces.append((spec.name, piece.full_shape, spec.dtype, stored))
        return part

    def write_index(self, folder: Path, parts: Sequence[StatePart]) -> Path:
        """Write the state.json that makes the files of all ranks a state; returns its path.

        Raises ValueError when the parts don't hold every element once.
        """
        files = {name: file for part in parts for name, file in part.files.items()}
        state = TrainerState(progress=self.progress, files=files, tensors=_index(parts))
        write_json(folder / STATE_FILE, state.to_json())
        return folder / STATE_FILE


def take_snapshot(trainer: Checkpointed, rank: int = 0, ranks: int = 1, *, copy: bool) -> StateSnapshot:
    """This rank's share of the state; with `copy` in the host's memory, so that training may go on meanwhile."""
    files: dict[str, dict[str, Piece]] = defaultdict(dict)
    for name, piece in trainer.state_pieces().items():
        is_empty = not piece.tensor.numel() and prod(piece.full_shape) > 0
        if not is_empty and _writer(name, piece.replicas) == piece.replica:
            kind = "model" if name.startswith(MODEL_PREFIX) else "optimizer"
            own = replace(piece, tensor=piece.tensor.detach().to("cpu", copy=True)) if copy else piece
            files[f"{kind}-{rank:05d}-of-{ranks:05d}.safetensors"][name] = own
    return StateSnapshot(dict(files), deepcopy(trainer.progress()))


def save_trainer_state(trainer: Checkpointed, folder: Path, rank: int = 0, ranks: int = 1) -> list[Path]:
    """Write this rank's files of the state into `folder`; returns them, on rank 0 with state.json as the last one.

    All ranks call it together; each may have a folder of its own. Give each state a new folder: files of the same
    names are replaced one by one. Equal states give equal bytes.
    """
    snapshot = take_snapshot(trainer, rank, ranks, copy=False)
    part = snapshot.write(folder)
    paths = [folder / name for name in sorted(part.files)]
    parts = [part]
    if ranks > 1:
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, part)
        parts = gathered
    return [*paths, snapshot.write_index(folder, parts)] if rank == 0 else paths


def load_trainer_state(trainer: Loadable, folder: Path) -> None:
    """Restore a state, written by any number of ranks in any layout, into this rank's part of `trainer`.

    `folder` needs state.json and the files that `required_files` names. Raises ValueError of one line naming the file
    that is missing or corrupt, or the tensor that does not fit; the trainer must then not be used.
    """
    state = read_state(folder)
    pieces = trainer.prepare_load(state.shapes)
    verify_files(folder, state, files_needed(state, pieces))
    read_pieces(folder, state, pieces)
    trainer.restore_progress(state.progress)


def required_files(trainer: Loadable, folder: Path) -> list[str]:
    """Names of the files besides state.json, the only one that must be in `folder`, that this rank has to load."""
    state = read_state(folder)
    return sorted(files_needed(state, trainer.prepare_load(state.shapes)))


def model_files(folder: Path) -> list[str]:
    """Names of the files besides state.json, the only one that must be in `folder`, that hold the model's weights."""
    return read_state(folder).files_of(MODEL_PREFIX)


def _writer(name: str, replicas: int) -> int:
    """Which of the replicas of a tensor writes it: spread evenly, and known to each without a word."""
    return zlib.crc32(name.encode()) % replicas


def _index(parts: Sequence[StatePart]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name, full_shape, dtype, piece in (entry for part in parts for entry in part.pieces):
        before = tensors.get(name, StoredTensor(full_shape, dtype, ()))
        tensors[name] = StoredTensor(full_shape, dtype, (*before.pieces, piece))
    for name, tensor in tensors.items():
        written, whole = sum(prod(piece.shape) for piece in tensor.pieces), prod(tensor.shape)
        if written != whole:
            raise ValueError(
                f"trainer state: the ranks hold {written} of {whole} elements of {name}; check its replicas"
            )
    return tensors
