"""Double of DeepEP v1's low-latency kernels; without FP8, receive hooks, LogFMT and zero copy.

Written from DeepEP tag v1.2.1: deep_ep/buffer.py, csrc/deep_ep.cpp (low_latency_dispatch, low_latency_combine),
csrc/kernels/internode_ll.cu. Slots of the result that hold no token are garbage, as on hardware.
"""

from typing import Any

import torch
from torch import Tensor

from tests.doubles import deep_ep_v1_types as types
from tests.doubles.deep_ep_v1_types import CommStream, EventOverlap, host_assert
from tests.doubles.deep_ep_v1_wire import Wire

_LIVE_RESULTS = 2
"""There are two buffers: a result is gone when the second call after it is made."""


class LowLatencyKernels:
    """The part of `Buffer` for few tokens."""

    hidden_sizes: tuple[int, ...] = (2048, 2560, 4096, 5120, 6144, 7168, 8192)
    max_top_k = 11
    rank: int
    group_size: int
    num_rdma_bytes: int
    num_qps_per_rank: int
    low_latency_mode: bool
    wire: Wire
    stream: CommStream
    runtime: Any

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        total_bytes, unit = types.low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_experts), 128
        return (total_bytes + unit) // unit * unit

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> Any:
        if use_fp8 or return_recv_hook:
            raise NotImplementedError("this double has no FP8 and no receive hooks")
        tokens = num_max_dispatch_tokens_per_rank
        self._check_low_latency(x.size(1), topk_idx, tokens, num_experts)
        host_assert(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16, "x.scalar_type() == kBFloat16")
        host_assert(
            x.size(0) == topk_idx.size(0) and x.size(0) <= tokens, "x.size(0) <= num_max_dispatch_tokens_per_rank"
        )
        self.wire.agree("low_latency_dispatch", x.size(1), topk_idx.size(1), tokens, num_experts)
        local = num_experts // self.group_size
        token_S, slot_S = (topk_idx >= 0).nonzero(as_tuple=True)
        expert_S = topk_idx[token_S, slot_S]
        received = self._to_owners([self.stream.read(x)[token_S], expert_S % local, token_S], expert_S // local)
        recv_x = torch.full((local, self.group_size * tokens, x.size(1)), float("nan"), dtype=torch.bfloat16)
        src_info = torch.full(recv_x.shape[:2], -1, dtype=torch.int32)
        layout_range = torch.zeros(local, self.group_size, dtype=torch.int64)
        count = torch.zeros(local, dtype=torch.int32)
        for step in range(self.group_size):  # in whichever order they arrive: the next rank's first, one's own last
            source = (self.rank + 1 + step) % self.group_size
            rows, experts, tokens_S = (parts[source] for parts in received)
            for expert in range(local):
                mine, begin = experts == expert, int(count[expert])
                end = begin + int(mine.sum())
                recv_x[expert, begin:end], src_info[expert, begin:end] = rows[mine], tokens_S[mine].int()
                layout_range[expert, source] = (begin << 32) | (end - begin)
                count[expert] = end
        handle = (src_info, layout_range, tokens, x.size(1), num_experts)
        self._live = [*getattr(self, "_live", []), src_info][-_LIVE_RESULTS:]
        (visible_x, visible_count), event = self._ll_finish([recv_x, count], async_finish)
        return visible_x, visible_count, handle, event, None

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> Any:
        if use_logfmt or zero_copy or return_recv_hook or out is not None:
            raise NotImplementedError("this double has the plain combine only")
        src_info, layout_range, tokens, hidden, num_experts = handle
        local = num_experts // self.group_size
        self._check_low_latency(hidden, topk_idx, tokens, num_experts)
        shape = (local, self.group_size * tokens, hidden)
        host_assert(
            tuple(x.shape) == shape and x.is_contiguous() and x.dtype == torch.bfloat16, "x.size(0) == num_experts"
        )
        host_assert(topk_weights.dtype == torch.float32, "topk_weights.scalar_type() == torch::kFloat32")
        host_assert(
            topk_weights.is_contiguous() and topk_weights.shape == topk_idx.shape, "topk_weights.is_contiguous()"
        )
        live = any(src_info is other for other in getattr(self, "_live", []))
        host_assert(live, "a result of the last two calls")
        self.wire.agree("low_latency_combine", hidden, topk_idx.size(1), tokens, num_experts)
        rows, experts, tokens_S, sources = self._occupied(x, src_info, layout_range)
        returned = self._to_owners([rows, experts + self.rank * local, tokens_S], sources)
        combined = torch.zeros(len(topk_idx), hidden)
        for arrived, experts_S, token_S in zip(*returned, strict=True):
            route_SK = topk_idx[token_S] == experts_S.unsqueeze(1)
            weight_S = (self.stream.read(topk_weights)[token_S] * route_SK).sum(1)
            combined.index_add_(0, token_S, arrived.float() * weight_S.unsqueeze(1))
        (visible,), event = self._ll_finish([combined.bfloat16()], async_finish)
        return visible, event, None

    def _occupied(self, x: Tensor, src_info: Tensor, layout_range: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows of `x` that hold a token, with their local expert, token at the source, and source rank."""
        rows, experts, tokens, sources = [x[0, :0]], [], [], []
        for expert in range(layout_range.size(0)):
            for source in range(self.group_size):
                begin, count = divmod(int(layout_range[expert, source]), 1 << 32)
                rows.append(self.stream.read(x[expert, begin : begin + count]))
                tokens.append(src_info[expert, begin : begin + count].long())
                experts.append(torch.full((count,), expert))
                sources.append(torch.full((count,), source))
        return torch.cat(rows), torch.cat(experts), torch.cat(tokens), torch.cat(sources)

    def _to_owners(self, columns: list[Tensor], owner_S: Tensor) -> list[list[Tensor]]:
        ranks = range(self.group_size)
        return [self.wire.send([column[owner_S == rank] for rank in ranks]) for column in columns]

    def _check_low_latency(self, hidden: int, topk_idx: Tensor, tokens: int, num_experts: int) -> None:
        assert self.runtime is not None, "the buffer is destroyed"
        host_assert(self.low_latency_mode, "low_latency_mode")
        host_assert(hidden in self.hidden_sizes, "Unsupported hidden")
        host_assert(topk_idx.dim() == 2 and topk_idx.is_contiguous(), "topk_idx.is_contiguous()")
        host_assert(topk_idx.dtype == torch.int64, "topk_idx.scalar_type() == torch::kInt64")
        host_assert(topk_idx.size(1) <= self.max_top_k, "num_topk <= kNumMaxTopK")
        host_assert(num_experts % self.group_size == 0, "num_experts % num_ranks == 0")
        host_assert(self.group_size * tokens % 4 == 0, "TMA requires the number of tokens to be multiple of 4")
        host_assert(types.low_latency_bytes(tokens, hidden, num_experts) <= self.num_rdma_bytes, "layout.total_bytes")
        host_assert(self.num_qps_per_rank >= num_experts // self.group_size, "num_rc_per_pe >= num_local_experts")

    def _ll_finish(self, outputs: list[Any], async_finish: bool) -> tuple[list[Any], EventOverlap]:
        if async_finish:
            visible, event = self.stream.issue(outputs)
            return visible, EventOverlap(event)
        self.stream.complete()
        return outputs, EventOverlap(None)
