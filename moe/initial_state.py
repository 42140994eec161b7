"""The state of a trainer that has done nothing yet, with weights that are streamed: no moments, no whole model."""

from pathlib import Path

from moe.checkpoint import MODEL_PREFIX, Checkpointed
from moe.checkpoint_files import TensorSpec, WrittenFile, alignment_order, write_json, write_safetensors
from moe.checkpoint_index import STATE_FILE, StoredPiece, StoredTensor, TrainerState
from moe.publication_weights import MAX_SHARD_BYTES, Read, split_specs


def write_initial_state(
    trainer: Checkpointed, read: Read, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write the state of `trainer`, which may lie on the meta device, into `folder`, with the weights from `read`.

    It is the state that `moe.checkpoint.save_trainer_state` would write of a trainer with those weights, in files of at
    most `max_shard_bytes`. Memory holds what `read` holds.
    """
    pieces = trainer.state_pieces()
    specs = [TensorSpec(name, piece.tensor.dtype, piece.full_shape) for name, piece in pieces.items()]
    shards = split_specs(sorted(specs, key=alignment_order), max_shard_bytes)
    files: dict[str, WrittenFile] = {}
    tensors: dict[str, StoredTensor] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        values = (read(spec.name.removeprefix(MODEL_PREFIX), spec.dtype) for spec in shard)
        files[file] = write_safetensors(folder / file, shard, values, metadata={})
        for spec in shard:
            whole = StoredPiece(file, (0,) * len(spec.shape), spec.shape)
            tensors[spec.name] = StoredTensor(spec.shape, spec.dtype, (whole,))
    write_json(folder / STATE_FILE, TrainerState(trainer.progress(), files, tensors).to_json())
