"""Writes a policy in Hugging Face layout, so that transformers, vLLM and SGLang load it as it is."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PROCESS_KEYS = ("_experts_implementation", "experts_implementation", "_attn_implementation", "auto_map")
"""Settings of the process that wrote the folder, not of the model."""


def save_publication(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: str | None = None
) -> None:
    """Write config.json, the tokenizer's files and safetensors with one tensor an expert (the hub's names) to `folder`.

    The weights are written in `dtype` ("float32", "bfloat16"; None: the model's own); the model stays as it is.
    transformers 5 names the expert count `num_local_experts` and the dtype `dtype`, moves theta into `rope_parameters`
    and calls its fast tokenizer class `TokenizersBackend`; earlier releases know none of these, and fail or silently
    take a default. The files carry the earlier names too, which all releases read.

    Raises ValueError for a `dtype` that does not exist.
    """
    stored = model.dtype if dtype is None else getattr(torch, dtype, None)
    if not isinstance(stored, torch.dtype) or not stored.is_floating_point:
        raise ValueError(f"dtype {dtype!r} of a publication does not exist: use float32, bfloat16 or float16")
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, state_dict=_cast(model.state_dict(), stored))
    tokenizer.save_pretrained(folder)
    _rewrite(folder / "config.json", partial(_portable_config, dtype=str(stored).removeprefix("torch.")))
    _rewrite(folder / "tokenizer_config.json", _portable_tokenizer_config)


def weights_sha256(folder: Path) -> str:
    """SHA-256 over the weights of a folder: each tensor's name, dtype, shape and bytes, in the order of the names.

    It does not depend on how the tensors are spread over files. Raises ValueError when the folder has no safetensors.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"weights folder {folder} has no .safetensors file: give a Hugging Face checkpoint folder")
    tensors: dict[str, Any] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys()})
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def _cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The floating-point tensors of a state dict in `dtype`; shared ones (tied weights) stay shared."""
    cast: dict[int, Tensor] = {}
    for tensor in state.values():
        if tensor.data_ptr() not in cast:
            cast[tensor.data_ptr()] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return {name: cast[tensor.data_ptr()] for name, tensor in state.items()}


def _portable_config(config: dict[str, Any], dtype: str) -> None:
    config["dtype"] = config["torch_dtype"] = dtype
    for key in _PROCESS_KEYS:
        config.pop(key, None)
    if "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    if theta is not None:
        config.setdefault("rope_theta", theta)


def _portable_tokenizer_config(config: dict[str, Any]) -> None:
    config.pop("auto_map", None)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"


def _rewrite(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Apply `edit` to a JSON file; a reader sees the old content or the new, never a part."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
