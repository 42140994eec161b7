"""Double of DeepEP v1, a stand-in for `import deep_ep`: the real calls, checks and handles, over any process group.

Written from DeepEP tag v1.2.1: deep_ep/buffer.py (class Buffer, signatures and defaults), csrc/deep_ep.cpp (host
assertions), csrc/kernels/layout.cu, intranode.cu and internode.cu (order and content of what arrives), README.md.
It moves bfloat16 rows for real. An asynchronous call returns garbage until its event is waited for. The ranks must
agree on every call and its constants. FP8, bias and num_worst_tokens are not doubled.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.doubles import deep_ep_v1_types as types
from tests.doubles.deep_ep_v1_low_latency import LowLatencyKernels
from tests.doubles.deep_ep_v1_types import CommStream, Config, EventHandle, EventOverlap, host_assert
from tests.doubles.deep_ep_v1_wire import Wire

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]

_DISPATCH = {
    2: (24, 256, 6, 128), 4: (6, 256, 6, 128), 8: (6, 256, 6, 128), 16: (36, 288, 20, 128), 24: (8, 288, 32, 128),
    32: (32, 288, 32, 128), 64: (20, 288, 28, 128), 128: (20, 560, 32, 128), 144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}  # fmt: skip
_COMBINE = {
    2: (10, 256, 6, 128), 4: (9, 256, 6, 128), 8: (4, 256, 6, 128), 16: (4, 288, 12, 128), 24: (1, 288, 8, 128),
    32: (1, 288, 8, 128), 64: (1, 288, 20, 128), 128: (1, 560, 12, 128), 144: (2, 720, 8, 128), 160: (2, 720, 8, 128),
}  # fmt: skip


class Buffer(LowLatencyKernels):
    """deep_ep/buffer.py: class Buffer."""

    num_sms: int = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        comm: Any = None,
    ) -> None:
        if group is None:
            raise ValueError("Either 'group' or 'comm' must be provided.")
        self._start(group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank, explicitly_destroy)

    def _start(
        self,
        group: dist.ProcessGroup,
        nvl_bytes: int,
        rdma_bytes: int,
        low_latency: bool,
        queue_pairs: int,
        explicit: bool,
    ) -> None:
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = nvl_bytes, rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency, explicit
        self.num_qps_per_rank = queue_pairs
        peers, ranks = self._nvl_peers(), self.group_size
        aligned = types.NUM_BUFFER_ALIGNMENT_BYTES
        host_assert(nvl_bytes % aligned == 0 and (nvl_bytes <= types.INT_MAX or rdma_bytes == 0), "num_nvl_bytes")
        host_assert(rdma_bytes % aligned == 0 and (low_latency or rdma_bytes <= types.INT_MAX), "num_rdma_bytes")
        host_assert(ranks <= peers * types.NUM_MAX_RDMA_PEERS or low_latency, "num_ranks <= 8 * 20")
        host_assert(ranks < peers or ranks % peers == 0, "num_ranks % NUM_MAX_NVL_PEERS == 0")
        host_assert(rdma_bytes == 0 or ranks > peers or low_latency, "num_ranks > NUM_MAX_NVL_PEERS")
        assert queue_pairs > 0
        self.num_nodes = max(1, ranks // peers)
        self.stream, self.wire = CommStream(), Wire(group)
        self.runtime: Any = self
        self.wire.agree("Buffer", nvl_bytes, rdma_bytes, low_latency, queue_pairs)

    def _nvl_peers(self) -> int:
        return types.NUM_MAX_NVL_PEERS

    def get_num_rdma_ranks(self) -> int:
        return self.num_nodes

    def destroy(self) -> None:
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        assert self.runtime is not None
        self.wire.agree("destroy")
        self.runtime = None

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in _DISPATCH, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, *_DISPATCH[num_ranks])

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in _COMBINE, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, *_COMBINE[num_ranks])

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        self._begin(previous_event, async_finish, allocate_on_comm_stream)
        host_assert(topk_idx.dim() == 2 and topk_idx.is_contiguous(), "topk_idx.is_contiguous()")
        host_assert(num_experts > 0, "num_experts > 0")
        _expect(topk_idx, torch.int64, "topk_idx")
        host_assert(_max(topk_idx) < num_experts, "topk_idx < num_experts")
        owner_TK = torch.where(topk_idx >= 0, topk_idx // (num_experts // self.group_size), self.group_size)
        in_rank_TR = (owner_TK.unsqueeze(2) == torch.arange(self.group_size)).any(1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        per_node = None
        if self.num_nodes > 1:
            per_node = in_rank_TR.view(len(topk_idx), self.num_nodes, -1).any(2).sum(0).int()
        outputs = [in_rank_TR.sum(0).int(), per_node, per_expert, in_rank_TR]
        visible, event = self._finish(outputs, async_finish)
        return *visible, event

    def dispatch(
        self,
        x: Any,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        config = self.get_dispatch_config(self.group_size) if config is None else config
        if isinstance(x, tuple) or num_worst_tokens:
            raise NotImplementedError("this double carries bfloat16 rows and exact counts only")
        self._begin(previous_event, async_finish, allocate_on_comm_stream)
        self._check_rows(x, config, 0 if topk_idx is None else topk_idx.size(1))
        x = self.stream.read(x)
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            in_rank_TR = self._handle(handle, config)["is_token_in_rank"]
            host_assert(in_rank_TR.size(0) == x.size(0), "is_token_in_rank.size(0) == x.size(0)")
            self.wire.agree("cached dispatch", x.size(1), config.num_sms)
            recv_x = torch.cat(self.wire.send([x[in_rank_TR[:, rank]] for rank in range(self.group_size)]))
            (visible,), event = self._finish([recv_x], async_finish)
            return visible, None, None, None, None, event
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        assert (num_tokens_per_rdma_rank is not None) == (self.num_nodes > 1)
        in_rank_TR = self._checked_layout(x, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
        host_assert((topk_idx is None) == (topk_weights is None), "topk_idx.has_value() == topk_weights.has_value()")
        assert topk_idx is not None and topk_weights is not None, "this double always carries the routes"
        return self._dispatch(
            x, in_rank_TR, num_tokens_per_expert.numel(), topk_idx, topk_weights, expert_alignment, config, async_finish
        )

    def _dispatch(
        self,
        x: Tensor,
        in_rank_TR: Tensor,
        num_experts: int,
        topk_idx: Tensor,
        topk_weights: Tensor,
        alignment: int,
        config: Config,
        async_finish: bool,
    ) -> Any:
        _expect(topk_idx, torch.int64, "topk_idx")
        host_assert(topk_weights.dtype == torch.float32, "topk_weights->scalar_type() == torch::kFloat32")
        host_assert(topk_idx.is_contiguous() and topk_weights.is_contiguous(), "topk_weights->is_contiguous()")
        host_assert(topk_idx.shape == topk_weights.shape and len(topk_idx) == len(x), "num_tokens == topk_idx->size(0)")
        self.wire.agree("dispatch", x.size(1), topk_idx.size(1), num_experts, alignment, config.num_sms)
        ranks = range(self.group_size)
        parts = self.wire.send([x[in_rank_TR[:, rank]] for rank in ranks])
        local = num_experts // self.group_size
        source = torch.arange(len(x), dtype=torch.int32)
        recv_src_idx = torch.cat(self.wire.send([source[in_rank_TR[:, rank]] for rank in ranks]))
        ids = torch.cat(self.wire.send([topk_idx[in_rank_TR[:, rank]] for rank in ranks])) - self.rank * local
        here = (ids >= 0) & (ids < local)
        weights = torch.cat(self.wire.send([self.stream.read(topk_weights)[in_rank_TR[:, rank]] for rank in ranks]))
        counts = torch.bincount(ids[here], minlength=local)
        aligned = (-(-counts // alignment) * alignment).tolist()
        handle = self._new_handle(in_rank_TR, [len(part) for part in parts], recv_src_idx, config)
        outputs = [torch.cat(parts), ids.masked_fill(~here, -1), weights.masked_fill(~here, 0.0)]
        (recv_x, recv_ids, recv_weights), event = self._finish(outputs, async_finish)
        return recv_x, recv_ids, recv_weights, aligned, handle, event

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        config = self.get_combine_config(self.group_size) if config is None else config
        if bias is not None:
            raise NotImplementedError("this double has no bias")
        self._begin(previous_event, async_finish, allocate_on_comm_stream)
        route = self._handle(handle, config)
        in_rank_TR, counts = route["is_token_in_rank"], route["counts"]
        self._check_rows(x, config, 0 if topk_weights is None else topk_weights.size(1))
        host_assert(x.size(0) == sum(counts), "src_idx.size(0) == num_tokens")
        if topk_weights is not None:
            host_assert(topk_weights.dim() == 2 and topk_weights.is_contiguous(), "topk_weights->is_contiguous()")
            host_assert(topk_weights.size(0) == x.size(0), "topk_weights->size(0) == num_tokens")
            host_assert(topk_weights.dtype == torch.float32, "topk_weights->scalar_type() == torch::kFloat32")
        self.wire.agree("combine", x.size(1), topk_weights is None, config.num_sms)
        combined = self._sum(self.wire.send(list(self.stream.read(x).split(counts))), in_rank_TR, x.size(1)).to(x.dtype)
        weights = None
        if topk_weights is not None:
            returned = self.wire.send(list(self.stream.read(topk_weights).split(counts)))
            weights = torch.zeros(len(in_rank_TR), topk_weights.size(1))
            for rank, part in enumerate(returned):
                weights[in_rank_TR[:, rank]] += part
        (recv_x, recv_weights), event = self._finish([combined, weights], async_finish)
        return recv_x, recv_weights, event

    def _sum(self, returned: list[Tensor], in_rank_TR: Tensor, hidden: int) -> Tensor:
        """Between nodes each node adds up its ranks' rows and rounds, before they cross."""
        total = torch.zeros(len(in_rank_TR), hidden)
        per_node = self.group_size // self.num_nodes
        for first in range(0, self.group_size, per_node):
            subtotal = torch.zeros_like(total)
            for rank in range(first, first + per_node):
                subtotal[in_rank_TR[:, rank]] += returned[rank].float()
            total += subtotal.bfloat16().float() if self.num_nodes > 1 else subtotal
        return total

    def _checked_layout(self, x: Tensor, per_rank: Tensor, in_rank: Tensor, per_expert: Tensor) -> Tensor:
        host_assert(in_rank.dtype == torch.bool, "is_token_in_rank.scalar_type() == torch::kBool")
        host_assert(per_rank.dtype == per_expert.dtype == torch.int32, "num_tokens_per_rank->scalar_type() == kInt32")
        host_assert(tuple(in_rank.shape) == (len(x), self.group_size), "is_token_in_rank.size(0) == x.size(0)")
        local, remainder = divmod(per_expert.numel(), self.group_size)
        host_assert(remainder == 0 and local <= types.NUM_MAX_LOCAL_EXPERTS, "num_experts % num_ranks == 0")
        host_assert(self.num_nodes > 1 or local <= 128, "num_experts / num_ranks <= kNumThreads")
        in_rank_TR = self.stream.read(in_rank)
        host_assert(torch.equal(in_rank_TR.sum(0).int(), self.stream.read(per_rank)), "the layout is of other tokens")
        return in_rank_TR

    def _check_rows(self, x: Tensor, config: Config, top_k: int) -> None:
        assert self.runtime is not None, "the buffer is destroyed"
        host_assert(not self.low_latency_mode, "a buffer in low-latency mode is for low_latency_dispatch")
        host_assert(x.dim() == 2 and x.is_contiguous(), "x.dim() == 2 and x.is_contiguous()")
        host_assert(x.dtype == torch.bfloat16, "Unsupported type")
        host_assert(x.size(1) * x.element_size() % 16 == 0, "(x.size(1) * x.element_size()) % sizeof(int4) == 0")
        host_assert(top_k <= 32, "num_topk <= 32")
        channels, ranks = config.num_channels, self.group_size
        if self.num_nodes == 1:
            host_assert(ranks in (2, 4, 8), "Unsupported ranks")
            host_assert(x.size(1) % 16 == 0, "hidden_int4 % 2 == 0")
            row = x.size(1) * 2 + 4 + top_k * (8 + 4)
            needed = ranks * ranks * 4 + channels * ranks * (16 + config.nvl_recv * row)
            host_assert(needed <= self.num_nvl_bytes, "... <= num_nvl_bytes")
        else:
            host_assert(self.num_nodes in (2, 4, 8, 16, 18, 20), "Unsupported RDMA ranks")
            host_assert(x.size(1) // 8 % 32 == 0, "hidden_int4 % 32 == 0")
            hint = config.get_rdma_buffer_size_hint(x.size(1) * 2, ranks)
            host_assert(hint <= self.num_rdma_bytes <= types.INT_MAX, "... <= num_rdma_bytes")
            queue_pairs = self.num_qps_per_rank
            host_assert(queue_pairs == channels or queue_pairs >= config.num_sms, "num_rc_per_pe >= num_sms")

    def _new_handle(
        self, in_rank_TR: Tensor, counts: list[int], recv_src_idx: Tensor, config: Config
    ) -> tuple[Any, ...]:
        """Six tensors within a node, ten between nodes, in the library's order."""
        ranks, channels, nodes = self.group_size, config.num_channels, self.num_nodes
        sent = in_rank_TR.sum(0)
        gathered = [torch.empty_like(sent) for _ in range(ranks)]
        dist.all_gather(gathered, sent, group=self.group)
        rank_prefix_matrix = torch.stack(gathered).cumsum(0).int()
        head = torch.where(in_rank_TR, in_rank_TR.cumsum(0) - 1, -1).int()

        def matrix(rows: int, columns: int = channels) -> Tensor:
            return torch.zeros(rows, columns, dtype=torch.int32)

        if nodes == 1:
            return (rank_prefix_matrix, matrix(ranks), matrix(ranks), recv_src_idx, in_rank_TR, head)
        prefix = torch.tensor(counts).cumsum(0).int()
        meta = torch.zeros(len(recv_src_idx), types.SOURCE_META_BYTES, dtype=torch.uint8)
        per_node = in_rank_TR.view(len(in_rank_TR), nodes, -1).any(2)
        forwarded = self.wire.send(self._to_gateways(per_node.sum(0).tolist()))
        over_rdma = sum(len(part) for part in forwarded)
        return (
            in_rank_TR, matrix(nodes), matrix(ranks), matrix(nodes), matrix(nodes, 1)[:, 0], matrix(ranks), prefix,
            meta, torch.where(per_node, 0, -1).int(), matrix(over_rdma, self._nvl_peers()),
        )  # fmt: skip

    def _to_gateways(self, per_node: list[int]) -> list[Tensor]:
        """A token goes once to each node, to the rank of the same index there."""
        peers = self.group_size // self.num_nodes
        counts = [
            per_node[rank // peers] if rank % peers == self.rank % peers else 0 for rank in range(self.group_size)
        ]
        return [torch.zeros(count, 1) for count in counts]

    def _handle(self, handle: tuple[Any, ...], config: Config) -> dict[str, Any]:
        """The route of a handle, with the checks that a kernel makes of one."""
        host_assert(isinstance(handle, tuple) and len(handle) == (6 if self.num_nodes == 1 else 10), "handle")
        if self.num_nodes == 1:
            prefix, _, channel_matrix, recv_src_idx, in_rank_TR, head = handle
            host_assert(tuple(prefix.shape) == (self.group_size, self.group_size), "rank_prefix_matrix.size(0)")
            counts = torch.diff(prefix[:, self.rank], prepend=prefix.new_zeros(1)).tolist()
            host_assert(len(recv_src_idx) == sum(counts), "src_idx.size(0) == num_tokens")
            host_assert(tuple(head.shape) == tuple(in_rank_TR.shape), "send_head.size(1) == num_ranks")
        else:
            in_rank_TR, channel_matrix, recv_prefix = handle[0], handle[2], handle[6]
            counts = torch.diff(recv_prefix, prepend=recv_prefix.new_zeros(1)).tolist()
        host_assert(channel_matrix.size(1) == config.num_channels, "channel_prefix_matrix.size(1) == num_channels")
        return {"is_token_in_rank": in_rank_TR, "counts": counts}

    def _begin(self, previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool) -> None:
        assert previous_event is None or previous_event.event is not None
        if allocate_on_comm_stream:
            host_assert(previous_event is not None and async_finish, "previous_event.has_value() and async")

    def _finish(self, outputs: list[Tensor | None], async_finish: bool) -> tuple[list[Any], EventOverlap]:
        if async_finish:
            visible, event = self.stream.issue(outputs)
            return visible, EventOverlap(event)
        self.stream.complete()
        return outputs, EventOverlap(None)


def _max(ids: Tensor) -> int:
    return int(ids.max()) if ids.numel() else -1


def _expect(tensor: Tensor, dtype: torch.dtype, name: str) -> None:
    """`tensor.data_ptr<T>()` of another dtype."""
    if tensor.dtype != dtype:
        raise RuntimeError(f"expected scalar type {dtype} of {name} but found {tensor.dtype}")
