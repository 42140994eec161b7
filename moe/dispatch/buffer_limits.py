"""What the libraries with a DeepEP v1 `Buffer` can carry: their limits as data, and which library it is.

Read from DeepEP v1.2.1 (csrc/deep_ep.cpp, csrc/kernels/*.cu, deep_ep/buffer.py), DeepEP 2.1.0 (csrc/legacy/buffer.hpp,
csrc/kernels/legacy/*) and UCCL da914a20 (ep/bench/buffer.py, ep/include/*, ep/src/*.cu). Nothing here needs a library
or an accelerator.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe.dispatch.base import ExpertGroup, ExpertShape
from moe.dispatch.limits import dtype_problem, expert_problems

MAX_LOCAL_EXPERTS = 1024
"""Counters of received rows that a rank has (csrc/kernels/configs.cuh)."""
MAX_BUFFER_BYTES = 2**31 - 1
"""Of either buffer across nodes: the libraries keep the sizes in 32-bit integers."""


@dataclass(frozen=True, kw_only=True)
class BufferLimits:
    """The compiled-in cases of one library; the defaults are those of DeepEP v1.2.1."""

    backend: str = "deepep"
    """Value of `moe.dispatcher` that this library is."""
    library: str = "DeepEP v1 (Buffer)"
    gpus_per_node: int = 8
    """Ranks that reach each other by NVLink; fixed when the library is compiled."""
    ranks: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 144, 160)
    """Group sizes with kernels (up to 8 within a node; 2, 4, 8, 16, 18, 20 nodes of 8) and a tuned configuration."""
    max_top_k: int = 32
    max_local_experts: int = 128
    """Threads of the kernel that sends the sizes within a node."""
    max_node_experts: int = 512
    """Threads of the kernel that sends the sizes between nodes."""
    hidden_multiple: int = 16
    """Hopper's bulk copies move half rows of whole 16-byte words."""
    max_hidden: int = 8176
    """Half a row and a barrier fit the 8192 bytes of shared memory that a warp has."""
    node_hidden_multiple: int = 256
    """Between nodes a warp reduces whole rows of 16-byte words."""
    max_node_row_bytes: int = 16384
    """Shared memory of a forwarding warp: row, routes and a barrier."""
    max_node_sms: int = 64
    """One warp a channel, two SMs a channel, 32 warps a block."""
    low_latency_hidden: tuple[int, ...] = (2048, 2560, 4096, 5120, 6144, 7168, 8192)
    low_latency_max_top_k: int = 11
    low_latency_max_tokens: int = 511
    """A queue of 1024 entries holds two messages for each token and one more."""
    low_latency_max_experts: int = 1848
    """14 groups of warps on the 132 SMs of a Hopper GPU, one expert each."""
    low_latency_max_ranks: int = 0
    """0: no limit."""


DEEPEP_V1 = BufferLimits()
DEEPEP_LEGACY = replace(
    DEEPEP_V1,
    library="DeepEP 2 (legacy Buffer)",
    ranks=(2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160),
    low_latency_hidden=(2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192),
)
UCCL = replace(
    DEEPEP_V1,
    backend="uccl_ep",
    library="UCCL-EP",
    ranks=(2, 4, 8, 16, 24, 32, 64),  # a message names its rank in 6 bits: no more than 64
    max_node_row_bytes=20480,
    low_latency_max_top_k=16,
    low_latency_max_tokens=128,  # the size that its authors have run over EFA; 4095 is what a message can name
    low_latency_max_experts=1024,  # a message names its expert in 10 bits
    low_latency_max_ranks=64,
)


def is_uccl(library: Any) -> bool:
    """Whether the module that was imported as `deep_ep` is UCCL's wrapper: its C++ types come from `uccl.ep`."""
    return str(getattr(library.Config, "__module__", "")).startswith("uccl") or hasattr(library, "initialize_uccl")


def buffer_limits(library: Any) -> BufferLimits:
    """The limits of the library that was imported as `deep_ep`; DeepEP 2 is known by its ElasticBuffer."""
    if is_uccl(library):
        return UCCL
    return DEEPEP_LEGACY if hasattr(library, "ElasticBuffer") else DEEPEP_V1


def require_usable(library: Any, group: ExpertGroup, requested: str) -> None:
    """Raise ValueError, one line, without torch.distributed and for a `Buffer` from before explicit destruction."""
    if group.process_group is None:
        raise ValueError(f"moe.dispatcher {requested} needs torch.distributed: start the ranks, or use local")
    if "explicitly_destroy" not in inspect.signature(library.Buffer).parameters:
        raise ValueError(
            f"moe.dispatcher {requested}: deep_ep of {getattr(library, '__file__', 'unknown file')} is older than 1.2: "
            "install DeepEP 1.2.1 or a later one from source"
        )


def check(problems: Iterator[str], limits: BufferLimits) -> None:
    """Raise ValueError with the first of `problems`, in the name of the library."""
    for problem in problems:
        raise ValueError(f"{limits.library} cannot run this model: {problem}")


def common_problems(shape: ExpertShape, backend: str, *, casts: bool) -> Iterator[str]:
    """Limits of both kernels: dtype (unless hidden states are cast for the wire), experts, top_k."""
    if shape.dtype != torch.bfloat16 and not casts:
        yield dtype_problem(backend, shape.dtype)
    yield from expert_problems(backend, shape, MAX_LOCAL_EXPERTS * shape.ep_size, MAX_LOCAL_EXPERTS)


def normal_problems(shape: ExpertShape, limits: BufferLimits, num_sms: int) -> Iterator[str]:
    """Limits of the kernels for training, each as one line: the limit, the value, what to change."""
    if shape.ep_size not in limits.ranks:
        sizes = ", ".join(map(str, limits.ranks))
        yield f"{shape.ep_size} ranks, it has kernels for {sizes} only: set moe.expert_parallel_size to one of them"
    yield from _node_problems(shape, limits)
    if shape.top_k > limits.max_top_k:
        yield f"num_experts_per_token = {shape.top_k} exceeds {limits.max_top_k}: choose another moe.dispatcher"
    if num_sms % 2 or num_sms < 2:
        yield f"moe.num_sms = {num_sms}: two SMs make a channel, set an even number"
    if shape.hidden_size % limits.hidden_multiple:
        yield (
            f"hidden_size = {shape.hidden_size} is no multiple of {limits.hidden_multiple}: "
            "choose another model or moe.dispatcher"
        )
    if shape.ep_size > limits.gpus_per_node:
        yield from _internode_problems(shape, limits, num_sms)
    else:
        yield from _intranode_problems(shape, limits)


def low_latency_problems(shape: ExpertShape, limits: BufferLimits, max_tokens: int) -> Iterator[str]:
    """Limits of the kernels for few tokens; `max_tokens` is what every rank's buffer is made for."""
    per_node = limits.gpus_per_node
    if shape.ep_size > per_node and shape.ep_size % per_node:
        yield f"{shape.ep_size} ranks, it needs fewer than {per_node} or a multiple: set moe.expert_parallel_size"
    if 0 < limits.low_latency_max_ranks < shape.ep_size:
        yield f"{shape.ep_size} ranks exceed {limits.low_latency_max_ranks}: lower moe.expert_parallel_size"
    if shape.hidden_size not in limits.low_latency_hidden:
        sizes = ", ".join(map(str, limits.low_latency_hidden))
        yield f"hidden_size = {shape.hidden_size}, low-latency kernels know {sizes} only: set moe.low_latency = false"
    if shape.top_k > limits.low_latency_max_top_k:
        yield (
            f"num_experts_per_token = {shape.top_k} exceeds {limits.low_latency_max_top_k}, the most of its "
            "low-latency kernels: set moe.low_latency = false"
        )
    if shape.num_experts > limits.low_latency_max_experts:
        yield (
            f"num_experts = {shape.num_experts} exceeds {limits.low_latency_max_experts}, the most of its low-latency "
            "kernels: set moe.low_latency = false"
        )
    if max_tokens > limits.low_latency_max_tokens:
        yield (
            f"moe.max_tokens_per_rank = {max_tokens} exceeds {limits.low_latency_max_tokens}, the most of its "
            "low-latency kernels: lower it or set moe.low_latency = false"
        )
    if shape.tokens_per_rank > max_tokens:
        yield (
            f"{shape.tokens_per_rank} tokens a rank exceed moe.max_tokens_per_rank = {max_tokens}: raise it or set "
            "moe.low_latency = false"
        )
    if (max_tokens * shape.ep_size) % 4:
        yield (
            f"moe.max_tokens_per_rank = {max_tokens} times {shape.ep_size} ranks is no multiple of 4: "
            "set moe.max_tokens_per_rank to a multiple of 4"
        )


def _node_problems(shape: ExpertShape, limits: BufferLimits) -> Iterator[str]:
    per_node = limits.gpus_per_node
    if shape.ep_size <= per_node and shape.ep_size > shape.ranks_per_node:
        yield (
            f"{shape.ep_size} ranks of a group on nodes of {shape.ranks_per_node}, up to {per_node} ranks must share a "
            "node's NVLink: lower moe.expert_parallel_size or put them on one node"
        )
    if shape.ep_size > per_node and shape.ranks_per_node != per_node:
        yield (
            f"{shape.ranks_per_node} ranks of a group on a node, a group of several nodes needs {per_node}: run "
            f"{per_node} ranks on a node or lower moe.expert_parallel_size"
        )


def _intranode_problems(shape: ExpertShape, limits: BufferLimits) -> Iterator[str]:
    if shape.num_experts > limits.max_local_experts * shape.ep_size:
        yield (
            f"{shape.num_experts // shape.ep_size} experts on a rank exceed {limits.max_local_experts}: "
            "raise moe.expert_parallel_size"
        )
    if shape.hidden_size > limits.max_hidden:
        yield f"hidden_size = {shape.hidden_size} exceeds {limits.max_hidden}: choose another moe.dispatcher"


def _internode_problems(shape: ExpertShape, limits: BufferLimits, num_sms: int) -> Iterator[str]:
    if shape.hidden_size % limits.node_hidden_multiple:
        yield (
            f"hidden_size = {shape.hidden_size} is no multiple of {limits.node_hidden_multiple}, which the kernels "
            f"between nodes need: use at most {limits.gpus_per_node} ranks or another moe.dispatcher"
        )
    row_bytes = -(-(2 * shape.hidden_size + 8 * shape.top_k + 8) // 16) * 16 + 8
    if row_bytes > limits.max_node_row_bytes:
        yield (
            f"hidden_size = {shape.hidden_size} makes rows of {row_bytes} bytes between nodes, more than "
            f"{limits.max_node_row_bytes}: use at most {limits.gpus_per_node} ranks or another moe.dispatcher"
        )
    node_experts = shape.num_experts * limits.gpus_per_node // shape.ep_size
    if node_experts > limits.max_node_experts:
        yield f"{node_experts} experts on a node exceed {limits.max_node_experts}: raise moe.expert_parallel_size"
    if not 4 <= num_sms <= limits.max_node_sms:
        yield f"moe.num_sms = {num_sms}: between nodes set 4 to {limits.max_node_sms}"
