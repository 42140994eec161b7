"""A trainer's state without a trainer: named whole tensors, of which every rank of a layout holds its pieces."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moe.placement import Piece


@dataclass(frozen=True)
class Grid:
    """Ranks as (replica, shard, expert rank); experts are split over the last two, all else over `fsdp` ranks."""

    ranks: int = 1
    ep: int = 1
    fsdp: int = 1

    def pieces(self, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
        """Names with "experts" are split as experts, names with "step" not at all."""
        return {name: self._piece(rank, name, tensor) for name, tensor in tensors.items()}

    def _piece(self, rank: int, name: str, tensor: Tensor) -> Piece:
        is_expert = "experts" in name
        split = max(1, self.fsdp // self.ep) * self.ep if is_expert else self.fsdp
        if not tensor.dim() or split == 1:
            return Piece(tuple(tensor.shape), (0,) * tensor.dim(), tensor.clone(), rank, self.ranks)
        if is_expert:  # first the experts of the expert rank, then its shard of those
            own = len(tensor) // self.ep
            first, part, parts = (rank % self.ep) * own, rank // self.ep % (split // self.ep), split // self.ep
        else:
            own, first, part, parts = len(tensor), 0, rank % split, split
        step = -(-own // parts)  # as torch.chunk: the last shards may be shorter, or empty
        begin, end = min(part * step, own), min((part + 1) * step, own)
        offset = (first + begin, *(0,) * (tensor.dim() - 1))
        local = tensor[first + begin : first + end].clone()
        return Piece(tuple(tensor.shape), offset, local, rank // split, self.ranks // split)


@dataclass
class Holder:
    """`moe.checkpoint.Checkpointed` over the pieces of one rank."""

    pieces: dict[str, Piece]
    counters: dict[str, Any] = field(default_factory=lambda: {"global_step": 3})

    def state_pieces(self) -> dict[str, Piece]:
        return self.pieces

    def prepare_load(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, Piece]:
        return self.pieces

    def progress(self) -> dict[str, Any]:
        return self.counters

    def restore_progress(self, progress: Mapping[str, Any]) -> None:
        self.counters = dict(progress)


def zeros(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def tied_model() -> PreTrainedModel:
    """A tiny Qwen3-MoE whose output weights are its embeddings."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=16,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        tie_word_embeddings=True,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model
