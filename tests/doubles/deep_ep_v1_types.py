"""Types of the double of DeepEP v1: sizes, configurations, events, and what a stream has not finished yet.

Written from DeepEP tag v1.2.1: csrc/config.hpp, csrc/event.hpp, csrc/kernels/configs.cuh, deep_ep/utils.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NUM_MAX_NVL_PEERS = 8
"""Compiled into the library. A test may lower it in its ranks, to have "nodes" of fewer ranks than eight."""
NUM_MAX_RDMA_PEERS = 20
NUM_MAX_LOCAL_EXPERTS = 1024
NUM_BUFFER_ALIGNMENT_BYTES = 128
SOURCE_META_BYTES = 8
MAX_TOP_K = MAX_SCALES = 128
INT_MAX = 2**31 - 1


class EPException(RuntimeError):
    """A failed EP_HOST_ASSERT; pybind11 makes a RuntimeError of it."""


def host_assert(condition: bool, text: str) -> None:
    """EP_HOST_ASSERT."""
    if not condition:
        raise EPException(f"Failed: Assertion error deep_ep.cpp: '{text}'")


class Config:
    """csrc/config.hpp: struct Config."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        self.num_sms = num_sms
        self.nvl_send, self.nvl_recv = num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens
        self.rdma_send = num_max_rdma_chunked_send_tokens
        self.rdma_recv = -(-num_max_rdma_chunked_recv_tokens // self.rdma_send) * self.rdma_send
        host_assert(0 < self.nvl_send < self.nvl_recv, "num_max_nvl_chunked_send_tokens < recv_tokens")
        host_assert(self.rdma_send <= self.rdma_recv // 2, "num_max_rdma_chunked_send_tokens <= recv_tokens / 2")

    @property
    def num_channels(self) -> int:
        host_assert(self.num_sms % 2 == 0, "config.num_sms % 2 == 0")
        return self.num_sms // 2

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        peers = NUM_MAX_NVL_PEERS
        host_assert(num_ranks < peers or num_ranks % peers == 0, "num_ranks % NUM_MAX_NVL_PEERS == 0")
        nodes, nvl_ranks = max(num_ranks // peers, 1), min(num_ranks, peers)
        channel_bytes = (2 * nodes + 3) * 4 + self.nvl_recv * self._row_bytes(hidden_bytes)
        return _aligned(self.num_sms // 2 * nvl_ranks * channel_bytes)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        peers = NUM_MAX_NVL_PEERS
        if num_ranks <= peers:
            return 0
        host_assert(num_ranks % peers == 0, "num_ranks % NUM_MAX_NVL_PEERS == 0")
        channel_bytes = (peers * 2 + 2) * 2 * 4 + self.rdma_recv * (self._row_bytes(hidden_bytes) + 16) * 2
        return _aligned(self.num_channels * (num_ranks // peers) * channel_bytes)

    def _row_bytes(self, hidden_bytes: int) -> int:
        return hidden_bytes + SOURCE_META_BYTES + MAX_TOP_K * (8 + 4) + MAX_SCALES * 4


def low_latency_bytes(num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> int:
    """csrc/config.hpp: LowLatencyLayout.total_bytes."""
    scales = hidden // 128
    dispatch_message = 16 + max(hidden * 2, hidden + scales * 4)
    combine_message = scales * 4 + hidden * 2
    tokens = num_max_dispatch_tokens_per_rank
    send = max(tokens * dispatch_message, num_experts * tokens * combine_message)
    receive = num_experts * tokens * max(dispatch_message, combine_message)
    return 2 * (send + receive + _aligned(num_experts * 4))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 128) * 128


class CommStream:
    """Work that the library's stream has been given: its outputs hold garbage until the event is waited for."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, Tensor, Tensor]] = []
        self._issued = 0

    def issue(self, outputs: list[Tensor | None]) -> tuple[list[Tensor | None], "EventHandle"]:
        """Garbage in place of `outputs`, and the event after which they are there."""
        self._issued += 1
        visible = []
        for output in outputs:
            garbage = None if output is None else torch.full_like(output, _garbage(output.dtype))
            if output is not None and garbage is not None:
                self._pending.append((self._issued, garbage, output))
            visible.append(garbage)
        return visible, EventHandle(self, self._issued)

    def complete(self, issued: int | None = None) -> None:
        """What was issued up to then is there for the compute stream."""
        until = self._issued if issued is None else issued
        for order, garbage, output in self._pending:
            if order <= until:
                garbage.copy_(output)
        self._pending = [entry for entry in self._pending if entry[0] > until]

    def read(self, tensor: Tensor) -> Tensor:
        """What work on this stream sees in `tensor`: its own earlier outputs are there."""
        for _, garbage, output in self._pending:
            if garbage is tensor:
                return output
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise EPException("an input is NaN: was it read before the event of its exchange was waited for?")
        return tensor


def _garbage(dtype: torch.dtype) -> Any:
    return float("nan") if dtype.is_floating_point else dtype == torch.bool or -(2**30)


class EventHandle:
    """csrc/event.hpp: a CUDA event."""

    def __init__(self, stream: CommStream | None = None, issued: int = 0) -> None:
        self._wait: Callable[[], None] = (lambda: stream.complete(issued)) if stream is not None else lambda: None

    def current_stream_wait(self) -> None:
        self._wait()


class EventOverlap:
    """deep_ep/utils.py: EventOverlap."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        assert self.event is not None
        self.event.current_stream_wait()
