"""From a trainer state of any layout to a full Hugging Face publication, without the whole model in memory."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.checkpoint import MODEL_PREFIX
from moe.checkpoint_index import TrainerState, read_state
from moe.checkpoint_reader import read_whole, verify_files
from moe.model import empty_model
from moe.publication import write_publication
from moe.publication_weights import MAX_SHARD_BYTES, weight_specs


def consolidate(
    checkpoint: Path, parent: Path, folder: Path, dtype: str, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write the publication of the weights in the trainer state `checkpoint` to `folder`, in `dtype`.

    `parent` is a publication of the same model: its config.json is taken over, its generation settings and tokenizer
    byte by byte, its weights are not read. `checkpoint` needs state.json and the files that
    `moe.checkpoint.model_files` names; they are verified first. Equal weights give the bytes that
    `moe.publication.save_publication` writes. Peak memory is about two layers in `dtype`. Raises ValueError of one line
    for a file that is missing or corrupt, and for another model.
    """
    state, model = read_state(checkpoint), empty_model(parent)
    _check(state, model, checkpoint, parent)
    verify_files(checkpoint, state, state.files_of(MODEL_PREFIX))

    def read(name: str, stored: torch.dtype) -> Tensor:
        return read_whole(checkpoint, state, MODEL_PREFIX + name, stored)

    write_publication(model, parent, folder, dtype, read, max_shard_bytes)


def _check(state: TrainerState, model: PreTrainedModel, checkpoint: Path, parent: Path) -> None:
    shapes = state.shapes
    given = {name.removeprefix(MODEL_PREFIX): shapes[name] for name in shapes if name.startswith(MODEL_PREFIX)}
    wanted = {spec.name: spec.shape for spec in weight_specs(model, model.dtype)}
    for name in sorted(given.keys() | wanted.keys()):
        if given.get(name) != wanted.get(name):
            raise ValueError(
                f"checkpoint {checkpoint}: weight {name} is {given.get(name)}, but {wanted.get(name)} in the model of "
                f"{parent}; give the publication that the training started from"
            )
