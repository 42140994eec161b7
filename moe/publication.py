"""Writes a policy in Hugging Face layout, so that transformers, vLLM and SGLang load it as it is."""

import hashlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moe.checkpoint_files import tensor_bytes, write_json
from moe.model import empty_model
from moe.pretrained import reading
from moe.probe import write_probe
from moe.publication_weights import MAX_SHARD_BYTES, Read, write_weights

_PROCESS_KEYS = (
    "_experts_implementation",
    "experts_implementation",
    "_attn_implementation",
    "auto_map",
    "is_local",
    "local_files_only",
)
"""Settings of the process that wrote the folder, not of the model."""
_KEPT_FILES = (
    "LICENSE*",
    "added_tokens.json",
    "chat_template.*",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.*",
    "tokenizer_config.json",
    "vocab.*",
)
"""Of a folder that a model was loaded from: what its publications have byte by byte."""


def save_publication(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | Path, folder: Path, dtype: str | None = None
) -> None:
    """Write config.json, the tokenizer's files and safetensors under the hub's names of the family to `folder`.

    `moe.probe` is there, too. `tokenizer` may be the Hugging Face folder that the model came from: then its tokenizer,
    chat template and generation settings are copied. The weights are written in `dtype` ("float32", "bfloat16"; None:
    the model's own); the model stays as it is.

    Raises ValueError for a `dtype` that does not exist.
    """
    state = model.state_dict()
    write_publication(model, tokenizer, folder, dtype, lambda name, stored: state[name].to(stored), MAX_SHARD_BYTES)


def write_publication(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | Path,
    folder: Path,
    dtype: str | None,
    read: Read,
    max_shard_bytes: int,
) -> None:
    """`save_publication` with the weights from `read`; `model` may lie on the meta device.

    transformers 5 names the expert count `num_local_experts` and the dtype `dtype`, moves theta into `rope_parameters`
    and calls its fast tokenizer class `TokenizersBackend`; earlier releases know none of these, and fail or silently
    take a default. The files carry the earlier names too, which all releases read.
    """
    stored = model.dtype if dtype is None else getattr(torch, dtype, None)
    if not isinstance(stored, torch.dtype) or not stored.is_floating_point:
        raise ValueError(f"dtype {dtype!r} of a publication does not exist: use float32, bfloat16 or float16")
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(model, stored, read, folder, max_shard_bytes)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    _rewrite(folder / "config.json", partial(_portable_config, dtype=str(stored).removeprefix("torch.")))
    if isinstance(tokenizer, Path):
        for kept in sorted({path for pattern in _KEPT_FILES for path in tokenizer.glob(pattern) if path.is_file()}):
            shutil.copyfile(kept, folder / kept.name)
    else:
        tokenizer.save_pretrained(folder)
        _rewrite(folder / "tokenizer_config.json", _portable_tokenizer_config)
    if not (folder / "generation_config.json").exists():
        model.generation_config.save_pretrained(folder)
    write_probe(empty_model(folder), read, stored, folder)


def weights_sha256(folder: Path) -> str:
    """SHA-256 over the weights of a folder: each tensor's name, dtype, shape and bytes, in the order of the names.

    It does not depend on how the tensors are spread over files. One tensor is in memory at a time. Raises ValueError
    of one line when the folder has no safetensors, or a file that is none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"weights folder {folder} has no .safetensors file: give a Hugging Face checkpoint folder")
    file_of: dict[str, Path] = {}
    digest = hashlib.sha256()
    with reading("weights", folder):
        for file in files:
            with safe_open(file, "pt") as opened:
                file_of.update(dict.fromkeys(opened.keys(), file))
        for file, names in groupby(sorted(file_of), key=file_of.__getitem__):
            with safe_open(file, "pt") as opened:  # one mapping at a time: its pages count as this process's memory
                for name in names:
                    tensor = opened.get_tensor(name)
                    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                    digest.update(tensor_bytes(tensor))
                    del tensor
    return digest.hexdigest()


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
    for key in _PROCESS_KEYS:
        config.pop(key, None)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"


def _rewrite(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Apply `edit` to a JSON file; a reader sees the old content or the new, never a part."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    write_json(path, content)
