"""Weights of a Hugging Face checkpoint, however its files and keys are cut, without the whole model in memory.

transformers' own conversion makes a layer's fused experts of one tensor an expert, or takes them as they are; it is
given the tensors of one decoder layer at a time.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from moe.model import empty_model, missing_weight, place_tensor
from moe.pretrained import reading, require_safetensors
from moe.publication_weights import weight_specs

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class PretrainedWeights:
    """The weights of `folder` under the names of transformers' model, in any floating-point dtype."""

    def __init__(self, folder: Path) -> None:
        """Reads headers only. Raises ValueError of one line as `moe.model.load_model` does, also for a file of the
        index that is missing, and for a weight that is missing or misshapen."""
        self._folder, self._model = folder, empty_model(folder)
        require_safetensors(folder)
        self._specs = {spec.name: spec for spec in weight_specs(self._model, torch.float32)}
        self._names: dict[str, list[str]] = defaultdict(list)
        self._file_of: dict[str, Path] = {}
        self._layer, self._loaded = "", dict[str, Tensor]()
        self._check(self._read_headers())

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The whole tensor `name` in `dtype`, on the CPU; its layer stays in memory until a weight of another is read.

        The weights outside of layers count as one. Raises ValueError for a file that can't be read.
        """
        layer = _layer_of(name)
        if name not in self._loaded or layer != self._layer:
            self._loaded = {}  # before the next layer is read
            self._loaded = self._load(layer)
            self._layer = layer
        return self._loaded[name].to(dtype)

    def _read_headers(self) -> dict[str, Tensor]:
        """Tensors without values, by their names in the checkpoint."""
        empty: dict[str, Tensor] = {}
        for file in sorted(self._folder.glob("*.safetensors")):
            with reading("weights", self._folder), safe_open(file, "pt") as opened:
                for name in opened.keys():
                    empty[name] = torch.empty(opened.get_slice(name).get_shape(), device="meta")
                    self._file_of[name] = file
                    self._names[_layer_of(name)].append(name)
        return empty

    def _check(self, empty: Mapping[str, Tensor]) -> None:
        with reading("weights", self._folder):
            wrong = self._specs.keys() - self._convert(empty, "meta")
        if wrong:
            raise ValueError(missing_weight(self._folder, min(wrong)))

    def _load(self, layer: str) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        with reading("weights", self._folder):
            for file, names in groupby(sorted(self._names[layer], key=self._place_of), key=self._file_of.__getitem__):
                with safe_open(file, "pt") as opened:
                    tensors |= {name: opened.get_tensor(name) for name in names}
            self._convert(tensors, "cpu")
        return self._take()

    def _place_of(self, name: str) -> tuple[Path, str]:
        return self._file_of[name], name

    def _convert(self, tensors: Mapping[str, Tensor], device: str) -> set[str]:
        """Put a checkpoint's tensors into the model, which serves as a vessel; returns the names of what it got."""
        mapping = get_model_conversion_mapping(self._model)
        settings = LoadStateDictConfig(dtype=torch.float32, device_map={"": device}, weight_mapping=mapping)
        info, _ = convert_and_load_state_dict_in_model(self._model, dict(tensors), settings)
        unread = {*info.missing_keys, *(name for name, *_ in info.mismatched_keys)}
        return {name for name in self._specs if name not in unread}

    def _take(self) -> dict[str, Tensor]:
        """What the model holds; it is empty again after."""
        taken = {name: tensor for name, tensor in self._model.state_dict().items() if not tensor.is_meta}
        for name, tensor in taken.items():
            place_tensor(self._model, name, torch.empty_like(tensor, device="meta"))
        return taken


def _layer_of(name: str) -> str:
    """Number of a tensor's decoder layer; empty outside of layers."""
    found = _LAYER.search(name)
    return found[1] if found else ""
