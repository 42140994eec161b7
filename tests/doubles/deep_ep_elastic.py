"""A double of DeepEP's `ElasticBuffer` (2.1.0) and `EPBuffer` (2.5.0), moving real data over gloo.

Written from deepseek-ai/DeepEP dd758ca (2.1.0): deep_ep/buffers/elastic.py, deep_ep/utils/{comm,event}.py,
csrc/elastic/buffer.hpp, deep_ep/include/deep_ep/impls/{combine,dispatch_copy_epilogue}.cuh; and from 2.5.0:
deep_ep/buffers/{ep,base}.py. Parameter names, their order and defaults are the library's (the unused ones of other
features included); what it asserts is asserted here, with its kernels' demands. Stricter than the library: results of
an asynchronous call are poison until its event is waited for, received tokens come in a shuffled order unless
`deterministic`, and all ranks must make the same call with the same constants.
"""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.doubles.deep_ep_events import EventHandle, EventOverlap, deliver
from tests.doubles.gloo_exchange import exchange_objects

ALIGNMENT_BYTES = 2 << 20


class EPHandle:
    """The attributes that a user reads, and what the double needs to find the way back."""

    def __init__(self, owner: "_Buffer", topk_idx: Tensor, constants: dict[str, Any], origin: Tensor) -> None:
        self.do_expand = False
        self.num_experts = constants["num_experts"]
        self.expert_alignment = constants["expert_alignment"]
        self.num_max_tokens_per_rank = constants["num_max_tokens_per_rank"]
        self.num_sms = constants["num_sms"]
        self.num_recv_tokens = len(origin)
        self.num_recv_tokens_per_expert_list: list[int] = []
        self.owner = owner
        self.origin = origin
        """(R, 2): rank and token that each received row is from."""
        self.local_ids: Tensor = topk_idx
        self._topk_idx = topk_idx
        self._topk_idx_version = topk_idx._version

    @property
    def topk_idx(self) -> Tensor:
        assert self._topk_idx._version == self._topk_idx_version, (
            "`topk_idx` must not be modified while the EP handle is in use"
        )
        return self._topk_idx


class _Buffer:
    """What both classes do; `do_handle_copy` and the parameter lists are theirs."""

    def _construct(self, group: dist.ProcessGroup, sizes: dict[str, int], options: dict[str, Any]) -> None:
        # `_comm_ptr()` of torch's communicator is null before a collective of that group (EP_REUSE_NCCL_COMM).
        assert group._get_sequence_number_for_group() > 0, "segmentation fault: the NCCL communicator is null"
        self.group = group
        self.rank_idx, self.num_ranks = group.rank(), group.size()
        self.num_max_tokens_per_rank = sizes["num_max_tokens_per_rank"]
        self.explicitly_destroy = options["explicitly_destroy"]
        self.deterministic = options["deterministic"]
        self.num_allocated_qps = options["num_allocated_qps"] or (129 if options["allow_hybrid_mode"] else 17)
        if options["num_bytes"] is None:
            assert sizes["num_max_tokens_per_rank"] > 0 and sizes["hidden"] > 0
            options["num_bytes"] = self._needed_bytes(**sizes)
        assert options["num_bytes"] % ALIGNMENT_BYTES == 0
        self.num_bytes = options["num_bytes"]
        self.num_rdma_ranks, self.num_nvlink_ranks = 1, self.num_ranks
        self.runtime: object | None = object()
        self.calls: list[str] = []
        self._exchange("construct", {**sizes, **options}, [None] * self.num_ranks)

    def _needed_bytes(self, num_max_tokens_per_rank: int, hidden: int, num_topk: int) -> int:
        return buffer_bytes(self.num_ranks, num_max_tokens_per_rank, hidden, num_topk)

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        raise ZeroDivisionError("float division by zero: get_rdma_gbs() found no rate of mlx5_0 in ibstat")

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        return min(num_sms * 16 + 1, self.num_allocated_qps)

    def destroy(self) -> None:
        assert self.explicitly_destroy
        self.runtime = None

    @staticmethod
    def capture() -> EventHandle:
        return EventHandle()

    def _exchange(self, call: str, constants: dict[str, Any], payloads: list[Any]) -> list[Any]:
        """What the others sent to this rank; all must make the same call, with equal constants."""
        assert self.runtime is not None, "the buffer is destroyed"
        self.calls.append(call)
        return exchange_objects(self.group, call, constants, payloads)

    def _dispatch(self, x: Tensor, a: dict[str, Any]) -> tuple[Any, ...]:
        handle: EPHandle | None = a["handle"]
        assert isinstance(x, Tensor), "the double has no FP8"
        assert not a["do_expand"] and not a["do_zero_padding"], "the expanding layout has no backward"
        if a["topk_idx"] is None:
            assert handle is not None, "topk_idx is missing"
            assert a["num_sms"] or a["num_experts"] is not None, "num_experts is None in get_theoretical_num_sms"
        num_sms = a["num_sms"] or self.get_theoretical_num_sms(a["num_experts"], 0)
        assert num_sms % 2 == 0
        num_qps = a["num_qps"] or self.get_theoretical_num_qps(num_sms)
        assert num_qps <= self.num_allocated_qps, "Allocated QPs are not enough"
        _check_stream(a)
        _check_rows(x)
        if handle is not None:
            return self._dispatch_cached(x, handle, a)
        constants = {
            "num_experts": a["num_experts"],
            "expert_alignment": a["expert_alignment"] or 1,
            "num_max_tokens_per_rank": a["num_max_tokens_per_rank"] or self.num_max_tokens_per_rank,
            "num_sms": num_sms,
            "num_topk": a["topk_idx"].shape[1],
            "with_weights": a["topk_weights"] is not None,
        }
        _check_routes(x, a["topk_idx"], a["topk_weights"], constants, self.num_ranks)
        needed = self._needed_bytes(constants["num_max_tokens_per_rank"], x.shape[1], constants["num_topk"])
        assert needed <= self.num_bytes, f"the buffer holds {self.num_bytes} bytes, {needed} are needed"
        ids = a["topk_idx"].clone() if a["do_handle_copy"] else a["topk_idx"]
        rows, local_ids, weights, origin = self._receive(x, ids, a["topk_weights"], constants)
        new = EPHandle(self, ids, constants, origin)
        new.local_ids = local_ids
        synchronised = a["do_cpu_sync"] is None or a["do_cpu_sync"]
        if synchronised:
            counts = torch.bincount(local_ids[local_ids >= 0], minlength=constants["num_experts"] // self.num_ranks)
            new.num_recv_tokens_per_expert_list = counts.tolist()
        assert synchronised, "without a CPU sync the received tensors have the worst case's size: not in the double"
        (rows, local_ids, weights), event = deliver((rows, local_ids, weights), a["async_with_compute_stream"])
        return rows, local_ids, weights, new, event

    def _receive(
        self, x: Tensor, ids: Tensor, weights: Tensor | None, constants: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        per_rank = constants["num_experts"] // self.num_ranks
        payloads = []
        for rank in range(self.num_ranks):
            token = ((ids >= rank * per_rank) & (ids < (rank + 1) * per_rank)).any(1).nonzero().squeeze(1)
            payloads.append((x[token], ids[token], weights[token] if weights is not None else None, token))
        received = self._exchange("dispatch", constants, payloads)
        origin = torch.cat([torch.stack([torch.full_like(t, r), t], 1) for r, (_, _, _, t) in enumerate(received)])
        generator = torch.Generator().manual_seed(len(self.calls))
        order = torch.randperm(len(origin), generator=generator)
        if self.deterministic:
            order = torch.arange(len(origin))
        local = torch.cat([ids for _, ids, _, _ in received])[order] - self.rank_idx * per_rank
        local = torch.where((local >= 0) & (local < per_rank), local, -1)
        # Weights of experts that are elsewhere arrive too, as they do in the library.
        theirs = torch.cat([w for _, _, w, _ in received])[order] if weights is not None else None
        return torch.cat([rows for rows, _, _, _ in received])[order], local, theirs, origin[order]

    def _dispatch_cached(self, x: Tensor, handle: EPHandle, a: dict[str, Any]) -> tuple[Any, ...]:
        assert handle.owner is self, "the handle is another buffer's"
        assert a["topk_idx"] is None and a["topk_weights"] is None
        assert not a["do_cpu_sync"], "Cannot do CPU sync with cached handle"
        assert a["cumulative_local_expert_recv_stats"] is None
        assert len(x) == len(handle.topk_idx), "a cached dispatch has the tokens of the first"
        for name in ("num_experts", "expert_alignment", "num_max_tokens_per_rank"):
            assert a[name] in (None, getattr(handle, name)), name
        sent = self._exchange("cached dispatch", {"hidden": x.shape[1]}, [x] * self.num_ranks)
        rows = torch.stack([sent[rank][token] for rank, token in handle.origin.tolist()] or [x.new_empty(x.shape[1])])
        rows = rows[: handle.num_recv_tokens].contiguous()
        (rows, local_ids), event = deliver((rows, handle.local_ids), a["async_with_compute_stream"])
        return rows, local_ids, None, handle, event

    def _combine(self, x: Tensor, handle: EPHandle, a: dict[str, Any]) -> tuple[Any, ...]:
        assert handle.owner is self, "the handle is another buffer's"
        num_qps = a["num_qps"] or self.get_theoretical_num_qps(a["num_sms"] or handle.num_sms)
        assert num_qps <= self.num_allocated_qps, "Allocated QPs are not enough"
        assert a["bias"] is None
        _check_stream(a)
        _check_rows(x)
        weights: Tensor | None = a["topk_weights"]
        ids = handle.topk_idx
        assert len(x) == handle.num_recv_tokens, "rows to combine are as many as were received"
        if weights is not None:
            assert weights.dtype == torch.float32 and weights.is_contiguous()
            assert weights.shape == (len(x), ids.shape[1])
        payloads = []
        for rank in range(self.num_ranks):
            mine = handle.origin[:, 0] == rank
            payloads.append((x[mine], weights[mine] if weights is not None else None, handle.origin[mine, 1]))
        received = self._exchange("combine", {"hidden": x.shape[1], "weights": weights is not None}, payloads)
        sums = torch.zeros(len(ids), x.shape[1])
        back = torch.zeros(len(ids), ids.shape[1]) if weights is not None else None
        per_rank = handle.num_experts // self.num_ranks
        for rank, (rows, theirs, token) in enumerate(received):
            sums.index_add_(0, token, rows.float())
            if back is not None:
                here = (ids[token] // per_rank == rank) & (ids[token] >= 0)
                back[token] = torch.where(here, theirs, back[token])
        (combined, back), event = deliver((sums.to(x.dtype), back), a["async_with_compute_stream"])
        return combined, back, event


def buffer_bytes(num_ranks: int, num_max_tokens_per_rank: int, hidden: int, num_topk: int) -> int:
    """Receive buffers of a direct dispatch, aligned as the library's are (its token layout, in round numbers)."""
    token_bytes = hidden * 2 + (num_topk or 32) * 8 + 32
    return -(-num_ranks * num_max_tokens_per_rank * token_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _check_stream(a: dict[str, Any]) -> None:
    assert a["previous_event"] is None or a["allocate_on_comm_stream"], "previous_event needs allocate_on_comm_stream"


def _check_rows(x: Tensor) -> None:
    assert x.dim() == 2 and x.is_contiguous()
    assert x.dtype == torch.bfloat16, f"rows are {x.dtype}"
    assert x.shape[1] % 256 == 0, "Invalid hidden"


def _check_routes(x: Tensor, ids: Tensor, weights: Tensor | None, constants: dict[str, Any], num_ranks: int) -> None:
    assert len(x) <= constants["num_max_tokens_per_rank"], "more tokens than num_max_tokens_per_rank"
    assert ids.dtype == torch.int64, f"topk_idx is {ids.dtype}"
    assert ids.dim() == 2 and ids.is_contiguous() and len(ids) == len(x)
    assert ids.shape[1] <= 32, "Too many top-k selections"
    assert int(ids.max()) < constants["num_experts"] if ids.numel() else True
    for row in ids.tolist():
        chosen = [expert for expert in row if expert >= 0]
        assert len(set(chosen)) == len(chosen), "an expert twice in one token's choice"
    assert constants["num_experts"] % num_ranks == 0
    if weights is not None:
        assert weights.dtype == torch.float32 and weights.is_contiguous() and weights.shape == ids.shape


class ElasticBuffer(_Buffer):
    """DeepEP 2.1.0."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        self._construct(group, *_arguments(locals()))

    def dispatch(
        self,
        x: Any,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, ...]:
        return self._dispatch(x, locals())

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        return self._combine(x, handle, locals())


class EPBuffer(_Buffer):
    """DeepEP 2.5.0."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: int = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        self._construct(group, *_arguments(locals()))

    def dispatch(
        self,
        x: Any,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> tuple[Any, ...]:
        assert not do_handle_copy, "`do_handle_copy` must be False; handle copying is no longer supported"
        assert not defer_epilogue, "not in the double"
        return self._dispatch(x, locals())

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> tuple[Any, ...]:
        assert not defer_epilogue, "not in the double"
        return self._combine(x, handle, locals())


def _arguments(arguments: dict[str, Any]) -> tuple[dict[str, int], dict[str, Any]]:
    """The constructor's MoE sizes and its other options, by name."""
    names = ("num_max_tokens_per_rank", "hidden", "num_topk")
    sizes = {name: arguments[name] for name in names}
    others = {name: value for name, value in arguments.items() if name not in (*names, "self", "group")}
    return sizes, others


def library(buffer_class: type[_Buffer]) -> ModuleType:
    """A module `deep_ep` of the version that has `buffer_class`."""
    module = ModuleType("deep_ep")
    module.__file__ = __file__
    module.__dict__.update(
        {
            buffer_class.__name__: buffer_class,
            "__version__": {"ElasticBuffer": "2.1.0", "EPBuffer": "2.5.0"}[buffer_class.__name__],
            "EPHandle": EPHandle,
            "EventHandle": EventHandle,
            "EventOverlap": EventOverlap,
            "topk_idx_t": torch.int64,
        }
    )
    return module
