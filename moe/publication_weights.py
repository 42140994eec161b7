"""Weights in the hub's layout as a stream: read, converted and written one layer at a time.

transformers fuses the experts of a layer when it loads a checkpoint; its own reverse conversion takes them apart again.
That works on any set of tensors that is closed under its rules, and those of one layer are.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from moe.checkpoint_files import TensorSpec, write_json, write_safetensors

MAX_SHARD_BYTES = 4 << 30
_LAYER = re.compile(r"^(.*\.layers\.\d+)\.")

Read = Callable[[str, torch.dtype], Tensor]
"""(name in the model's state dict, dtype) -> the whole tensor in that dtype."""


@dataclass(frozen=True)
class _Group:
    """Tensors that are converted together."""

    inputs: list[TensorSpec]
    outputs: list[TensorSpec]


def weight_specs(model: PreTrainedModel, dtype: torch.dtype) -> list[TensorSpec]:
    """What a publication of `model` in `dtype` is made from: its state dict, shared tensors (tied weights) once.

    Tensors that are not floating-point keep their dtype, and those that the model class always computes in float32
    (routing biases of DeepSeek-V3) stay in float32. The model may lie on the meta device.
    """
    in_float32 = [re.compile(rf"(^|\.){re.escape(name)}($|\.)") for name in model._keep_in_fp32_modules_strict or ()]

    def published(name: str, tensor: Tensor) -> torch.dtype:
        if not tensor.is_floating_point():
            return tensor.dtype
        return torch.float32 if any(pattern.search(name) for pattern in in_float32) else dtype

    state = remove_tied_weights_from_state_dict(model.state_dict(), model)
    return [TensorSpec(name, published(name, tensor), tuple(tensor.shape)) for name, tensor in state.items()]


def write_weights(model: PreTrainedModel, dtype: torch.dtype, read: Read, folder: Path, max_shard_bytes: int) -> None:
    """Write model.safetensors, or several files of at most `max_shard_bytes` and their index, under the hub's names.

    `read` gives the weights; of `model` only the classes, names and shapes matter. At most about two layers are in
    memory at a time.
    """
    groups = _plan(model, weight_specs(model, dtype))
    shards = split_specs([spec for group in groups for spec in group.outputs], max_shard_bytes)
    tensors = _converted(model, groups, read)
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, specs, islice(tensors, len(specs)), metadata={"format": "pt"})
        weight_map |= {spec.name: name for spec in specs}
    if len(shards) > 1:
        total_bytes = sum(spec.size_bytes for specs in shards for spec in specs)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def _plan(model: PreTrainedModel, specs: list[TensorSpec]) -> list[_Group]:
    """Groups of one layer and one width each, the wide ones first: in a file every tensor is aligned to its width."""
    by_key: dict[tuple[int, str], list[TensorSpec]] = defaultdict(list)
    for spec in specs:
        layer = _LAYER.match(spec.name)
        by_key[-spec.dtype.itemsize, layer[1] if layer else spec.name].append(spec)
    groups = []
    for _, inputs in sorted(by_key.items(), key=lambda entry: entry[0][0]):  # stable: layers stay in the model's order
        empty = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in inputs}
        outputs = revert_weight_conversion(model, empty)
        groups.append(_Group(inputs, [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in outputs.items()]))
    return groups


def split_specs(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Consecutive shards; a tensor of more than `max_bytes` gets one of its own."""
    shards: list[list[TensorSpec]] = [[]]
    size_bytes = 0
    for spec in specs:
        if shards[-1] and size_bytes + spec.size_bytes > max_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(spec)
        size_bytes += spec.size_bytes
    return shards


@torch.no_grad()
def _converted(model: PreTrainedModel, groups: list[_Group], read: Read) -> Iterator[Tensor]:
    for group in groups:
        outputs: Mapping[str, Tensor] = revert_weight_conversion(
            model, {spec.name: read(spec.name, spec.dtype) for spec in group.inputs}
        )
        remaining = dict(outputs)
        del outputs
        for spec in group.outputs:
            yield remaining.pop(spec.name)
