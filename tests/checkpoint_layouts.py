"""Hugging Face checkpoints as they are found: many files, one tensor an expert or fused ones, settings of their own."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from moe.config import ModelConfig
from moe.model import build_model
from moe.tokenizer import build_char_tokenizer

ALPHABET = "0123456789>abcdefghijklmnopqrstuvwxyz|"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role + '|' + message.content + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant|{% endif %}"
)


def model_of(family: str, seed: int = 0, **sizes: int) -> PreTrainedModel:
    chosen = {"hidden_size": 32, "moe_intermediate_size": 32, "num_experts": 4, "num_layers": 2} | sizes
    tokenizer = build_char_tokenizer(ALPHABET)
    return build_model(ModelConfig(family=family, **chosen), len(tokenizer), seed)  # type: ignore[arg-type]


def write_checkpoint(
    model: PreTrainedModel, folder: Path, *, fused: bool = False, shard_bytes: int = 20_000, dtype: str = "bfloat16"
) -> Path:
    """`model` in `dtype` as files of about `shard_bytes` with an index, a tokenizer, a chat template and settings.

    The settings are written in a way that no library would write again.
    """
    model.to(getattr(torch, dtype))
    for buffer in model.buffers():
        buffer.data = buffer.data.float()  # the hub has DeepSeek's biases of the routers in float32
    model.save_pretrained(folder, max_shard_size=shard_bytes, save_original_format=not fused)
    model.float()
    tokenizer = build_char_tokenizer(ALPHABET)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    generation = {"eos_token_id": [2, 5], "temperature": 0.6, "top_k": 20, "transformers_version": "4.51.0"}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=7))
    (folder / "LICENSE").write_text("as it was\n")
    (folder / "README.md").write_text("not a part of the policy\n")
    return folder


def misshape(folder: Path, name: str) -> None:
    """Replace the tensor `name` by one of another shape, in its file."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"][name]
    tensors = load_file(path)
    tensors[name] = torch.zeros(3, 5)
    save_file(tensors, path, metadata={"format": "pt"})
