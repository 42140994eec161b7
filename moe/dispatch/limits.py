"""Limits that several backends share, one line of text each: the limit, the value, and what to change."""

from collections.abc import Iterator

import torch

from moe.config import MoeConfig
from moe.dispatch.base import ExpertShape


def dtype_problems(backend: str, shape: ExpertShape, moe: MoeConfig) -> Iterator[str]:
    """The line for hidden states that are not bfloat16, unless they are rounded for the wire."""
    if shape.dtype != torch.bfloat16 and moe.exchange_dtype != "bfloat16":
        yield dtype_problem(backend, shape.dtype)


def dtype_problem(backend: str, dtype: torch.dtype) -> str:
    """The message for hidden states that a backend of bfloat16 does not carry."""
    return (
        f"moe.dispatcher {backend} carries bfloat16 only, the hidden states are {str(dtype).removeprefix('torch.')}: "
        "set moe.exchange_dtype = bfloat16 (rounds them on the wire only) or update.compute_dtype = bfloat16"
    )


def token_problems(backend: str, shape: ExpertShape, moe: MoeConfig) -> Iterator[str]:
    """The line for more tokens than the buffers are for."""
    if shape.tokens_per_rank > moe.max_tokens_per_rank:
        yield capacity_problem(backend, shape.tokens_per_rank, moe)


def expert_problems(backend: str, shape: ExpertShape, most: int, most_local: int) -> Iterator[str]:
    """One line for each rule between the numbers of experts and of ranks that is broken."""
    experts, ranks = shape.num_experts, shape.ep_size
    if shape.top_k > experts:
        yield f"{backend}: num_experts_per_token {shape.top_k} exceeds num_experts {experts}: lower it"
    if experts % ranks:
        yield f"{backend}: num_experts {experts} is no multiple of the {ranks} ranks: change moe.expert_parallel_size"
    if experts > most:
        yield f"{backend}: num_experts {experts} is over {most}: use all_to_all"
    if experts // ranks > most_local:
        yield f"{backend}: {experts // ranks} experts of a rank are over {most_local}: raise moe.expert_parallel_size"


def capacity_problem(backend: str, tokens: int, moe: MoeConfig) -> str:
    return (
        f"{backend}: {tokens} tokens of one rank are over moe.max_tokens_per_rank = {moe.max_tokens_per_rank}: "
        "raise it, or lower update.micro_batch_tokens"
    )
