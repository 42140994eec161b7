"""DeepEP's one-buffer interface: `ElasticBuffer` of 2.0 and 2.1, and its successor `EPBuffer` of 2.5.

Written against DeepEP 2.1.0 (deep_ep/buffers/elastic.py) and 2.5.0 (deep_ep/buffers/ep.py); tested against a double,
not yet run on hardware. The received layout is the compact one, with the counts on the host: the expanding layout has
no backward. `num_sms` and `num_experts` are always passed, also to a cached dispatch: the library's own estimate of
them reads `ibstat`, and divides by zero where that knows no such network card (EFA).

Received tokens are put in the order of their source (`deterministic`): results repeat to the bit, and a recomputed
forward pass, whose tensors meet the routes of the first one, receives the same rows in the same places.
"""

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe.config import MoeConfig
from moe.dispatch import compact, limits
from moe.dispatch.base import DispatchedTokens, ExpertGroup, ExpertShape, TransportReport

HIDDEN_MULTIPLE = 256
MAX_TOP_K = 32
MAX_EXPERTS = 2048
MAX_LOCAL_EXPERTS = 256
MAX_NODES = 32
MAX_RANKS_PER_NODE = 64
MAX_SMS = 160
"""With several nodes (csrc/elastic/buffer.hpp: kNumMaxSMs)."""
MAX_COUNTERS_PER_NODE = 128
"""Ranks of a node plus experts of a rank, when there are several nodes (hybrid_dispatch.cuh: four warps count them)."""


class DeepEpElasticDispatcher:
    """Tokens by way of one communication buffer, dispatched once per rank, or per node where there are several."""

    def __init__(self, library: ModuleType, moe: MoeConfig, group: ExpertGroup, *, requested: str) -> None:
        if group.process_group is None:
            raise ValueError(f"moe.dispatcher {requested} needs torch.distributed: start the ranks, or use local")
        self._library = library
        self._moe = moe
        self._group = group
        self._requested = requested
        self._buffer_name = "ElasticBuffer" if hasattr(library, "ElasticBuffer") else "EPBuffer"
        self._buffers: dict[tuple[int, int], Any] = {}

    def validate(self, shape: ExpertShape) -> None:
        """Raise ValueError naming the limit of DeepEP 2 that `shape` breaks."""
        for problem in elastic_problems(shape, self._moe):
            raise ValueError(problem)

    def dispatch(
        self, hidden_TH: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, num_experts: int
    ) -> DispatchedTokens:
        """Send each token once to each rank that holds one of its experts; rows by expert of what came here.

        Raises ValueError for hidden states that are not bfloat16 (unless asked to round) and for more tokens than
        `moe.max_tokens_per_rank`.
        """
        compact.require_bfloat16(hidden_TH, self._moe)
        compact.require_capacity(hidden_TH, self._moe)
        buffer = self._open_buffer(hidden_TH.device, hidden_TH.shape[1], expert_ids_TK.shape[1])
        exchange = _ElasticExchange(buffer, num_experts, self._moe)
        # The handle refers to the ids until the backward pass: they must be nobody else's, to be changed in place.
        ids_TK = expert_ids_TK.to(self._library.topk_idx_t, copy=True, memory_format=torch.contiguous_format)
        passage = compact.Passage(exchange, self._group, self._group.monitor.layer, num_experts)
        return compact.dispatch(passage, hidden_TH, ids_TK, weights_TK)

    def combine(self, rows_SH: Tensor, dispatched: DispatchedTokens) -> Tensor:
        """Weighted sums of each token's rows, brought back: (T, hidden)."""
        return compact.combine(rows_SH, dispatched)

    def transport_report(self) -> TransportReport:
        """The library that carried the tokens, and the ranks that it reaches by NVLink and by RDMA."""
        details: dict[str, str | int | float] = {
            "flavour": self._buffer_name,
            **compact.library_details(self._library),
            "wire": "gin",
            "num_sms": self._moe.num_sms,
            "max_tokens_per_rank": self._moe.max_tokens_per_rank,
        }
        for buffer in self._buffers.values():
            details["rdma_ranks"], details["nvlink_ranks"] = buffer.num_rdma_ranks, buffer.num_nvlink_ranks
            details["buffer_bytes"] = buffer.num_bytes
        return TransportReport(requested=self._requested, observed="deepep", details=details)

    def close(self) -> None:
        """Release the buffers; all ranks of the group call it."""
        for buffer in self._buffers.values():
            buffer.destroy()
        self._buffers.clear()

    def _open_buffer(self, device: torch.device, hidden_size: int, top_k: int) -> Any:
        """The buffer for layers of this size, made by the first of them; a collective operation then."""
        key = (hidden_size, top_k)
        if key not in self._buffers:
            monitor = self._group.monitor
            with monitor.exchange("set-up of the buffer", monitor.layer):
                self._buffers[key] = self._make_buffer(device, hidden_size, top_k)
        return self._buffers[key]

    def _make_buffer(self, device: torch.device, hidden_size: int, top_k: int) -> Any:
        max_tokens, timeout_s = self._moe.max_tokens_per_rank, math.ceil(self._moe.exchange_timeout_s)
        constants = {
            "moe.max_tokens_per_rank": max_tokens,
            "moe.num_sms": self._moe.num_sms,
            "hidden_size": hidden_size,
            "num_experts_per_token": top_k,
        }
        compact.require_equal(self._group, constants)
        compact.warm_up(self._group, device)
        return getattr(self._library, self._buffer_name)(
            self._group.process_group,
            num_max_tokens_per_rank=max_tokens,
            hidden=hidden_size,
            num_topk=top_k,
            deterministic=True,
            num_cpu_timeout_secs=timeout_s,
            num_gpu_timeout_secs=timeout_s,
            explicitly_destroy=True,
        )


class _ElasticExchange:
    """One pass through a buffer; the handle of its dispatch serves the combine and both backward exchanges."""

    def __init__(self, buffer: Any, num_experts: int, moe: MoeConfig) -> None:
        self.rows_per_expert: list[int] = []
        self._buffer = buffer
        self._num_experts = num_experts
        self._moe = moe
        self._handle: Any = None

    def dispatch(self, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        received_RH, local_ids_RK, weights_RK, self._handle, event = self._buffer.dispatch(
            hidden_TH,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            num_experts=self._num_experts,
            num_max_tokens_per_rank=self._moe.max_tokens_per_rank,
            expert_alignment=1,
            num_sms=self._moe.num_sms,
            async_with_compute_stream=True,
            do_handle_copy=False,
            do_cpu_sync=True,
        )
        event.current_stream_wait()
        self.rows_per_expert = list(self._handle.num_recv_tokens_per_expert_list)
        return received_RH, local_ids_RK.long(), weights_RK

    def combine(self, rows_RH: Tensor) -> Tensor:
        return self._combine(rows_RH, None)[0]

    def dispatch_gradient(self, grad_RH: Tensor, grad_weights_RK: Tensor) -> tuple[Tensor, Tensor]:
        return self._combine(grad_RH, grad_weights_RK)

    def combine_gradient(self, grad_TH: Tensor) -> Tensor:
        grad_RH, _, _, _, event = self._buffer.dispatch(
            grad_TH,
            num_experts=self._num_experts,
            num_sms=self._moe.num_sms,
            async_with_compute_stream=True,
            handle=self._handle,
            do_handle_copy=False,
            do_cpu_sync=False,
        )
        event.current_stream_wait()
        rows_RH: Tensor = grad_RH
        return rows_RH

    def _combine(self, rows_RH: Tensor, weights_RK: Tensor | None) -> tuple[Tensor, Tensor]:
        sums_TH, weights_TK, event = self._buffer.combine(
            rows_RH,
            handle=self._handle,
            topk_weights=weights_RK,
            num_sms=self._moe.num_sms,
            async_with_compute_stream=True,
        )
        event.current_stream_wait()
        return sums_TH, weights_TK


def elastic_problems(shape: ExpertShape, moe: MoeConfig) -> Iterator[str]:
    """One line for each limit of DeepEP 2 (csrc/elastic, deep_ep/include of 2.1.0) that is broken; needs no library."""
    yield from limits.dtype_problems("deepep", shape, moe)
    if shape.hidden_size % HIDDEN_MULTIPLE:
        yield f"deepep: hidden_size {shape.hidden_size} is no multiple of {HIDDEN_MULTIPLE} (combine): use all_to_all"
    if shape.top_k > MAX_TOP_K:
        yield f"deepep: num_experts_per_token {shape.top_k} is over {MAX_TOP_K} (dispatch.cuh): use all_to_all"
    yield from limits.expert_problems("deepep", shape, MAX_EXPERTS, MAX_LOCAL_EXPERTS)
    yield from limits.token_problems("deepep", shape, moe)
    yield from _node_problems(shape, moe)


def _node_problems(shape: ExpertShape, moe: MoeConfig) -> Iterator[str]:
    if shape.ep_size <= shape.ranks_per_node:
        ranks, nodes = shape.ep_size, 1
    else:
        ranks, nodes = shape.ranks_per_node, -(-shape.ep_size // shape.ranks_per_node)
    advice = "lower moe.expert_parallel_size"
    if ranks * nodes != shape.ep_size:
        yield f"deepep: {shape.ep_size} ranks do not fill nodes of {ranks}: change moe.expert_parallel_size"
    if nodes > MAX_NODES:
        yield f"deepep: {nodes} nodes are over {MAX_NODES} (hybrid_dispatch.cuh): {advice} to {MAX_NODES * ranks}"
    if ranks > MAX_RANKS_PER_NODE:
        yield f"deepep: {ranks} ranks of one NVLink domain are over {MAX_RANKS_PER_NODE} (hybrid_combine.cuh): {advice}"
    if nodes > 1 and moe.num_sms > MAX_SMS:
        yield f"deepep: moe.num_sms = {moe.num_sms} is over {MAX_SMS} (buffer.hpp): lower it"
    counters = ranks + shape.num_experts // shape.ep_size
    if nodes > 1 and counters > MAX_COUNTERS_PER_NODE:
        yield (
            f"deepep: {ranks} ranks of a node and {shape.num_experts // shape.ep_size} experts of a rank are over "
            f"{MAX_COUNTERS_PER_NODE} together (hybrid_dispatch.cuh): raise moe.expert_parallel_size"
        )
