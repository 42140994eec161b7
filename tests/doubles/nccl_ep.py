"""A double of `nccl.ep` (nccl-extensions 0.1.0), high-throughput mode with the flat layout, moving data over gloo.

Written from python/nccl/ep/{group,handle,tensor,enums}.py and interop/torch.py of the wheel nccl_extensions-0.1.0, and
from nccl_ep/nccl_ep.cc, nccl_ep/device/ht_ep_adapter.cu and nccl_ep/include/nccl_ep.h of NVIDIA/nccl-extensions
44d2de0. Field names, their order and defaults, and what is keyword-only are the library's; what it asserts or returns
ncclInvalidArgument for is asserted here. Stricter than the library: tensors must be contiguous (it never looks), all
ranks must make the same call, and outputs hold poison wherever nothing was written.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.doubles.gloo_exchange import exchange_objects

MAX_SUPPORTED_TOKENS_PER_RANK = 8192


class NcclInvalid(Exception):
    """`nccl.core.NcclInvalid`."""


class Algorithm(IntEnum):
    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(IntEnum):
    UNSET = 0
    EXPERT_MAJOR = 1
    RANK_MAJOR = 2
    FLAT = 3


class PassDir(IntEnum):
    FWD = 0
    BWD = 1


class OverflowPolicy(IntEnum):
    AUTO = 0
    TRAP = 1
    DROP = 2


class ZeroCopyMode(IntEnum):
    AUTO = 0
    OFF = 1
    ON = 2


class ExpertIdKind(IntEnum):
    AUTO = 0
    LOCAL = 1
    GLOBAL = 2


class Tensor:
    """`nccl.ep.Tensor` of a torch tensor."""

    def __init__(
        self, buffer: Any, *, dtype: Any = None, shape: Any = None, window: Any = None, window_offset: Any = None
    ) -> None:
        if not isinstance(buffer, torch.Tensor):
            raise NcclInvalid(f"Cannot resolve {type(buffer).__name__!r}: expected torch.Tensor")
        if dtype is not None or shape is not None:
            raise ValueError("`dtype`/`shape` are only valid with a raw integer pointer")
        if not buffer.shape:
            raise ValueError("Tensor requires at least one dimension")
        assert buffer.is_contiguous(), "the library would read the memory as if it were contiguous"
        assert window is None and window_offset is None, "not in the double"
        self.buffer = buffer


@dataclass(kw_only=True)
class AllocConfig:
    alloc_fn: int = 0
    free_fn: int = 0
    context: int = 0


@dataclass(kw_only=True)
class GroupConfig:
    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_recv_tokens_per_rank: int = 0
    max_token_bytes: int = 0
    rdma_buffer_size: int = 0
    num_qp_per_rank: int = 0
    num_channels: int = 0
    max_num_sms: int = 0
    alloc: AllocConfig = field(default_factory=AllocConfig)
    enable_mask: bool = False
    timeout_ns: int = 0
    zero_copy: ZeroCopyMode = ZeroCopyMode.AUTO
    overflow_policy: OverflowPolicy = OverflowPolicy.AUTO
    num_topk: int = 0


@dataclass(kw_only=True)
class HandleConfig:
    dispatch_output_per_expert_alignment: int = 0


@dataclass(kw_only=True)
class DispatchConfig:
    send_only: int = 0
    round_scales: int = 0
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: int = 0


@dataclass(kw_only=True)
class CombineConfig:
    send_only: int = 0
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: int = 0


@dataclass(kw_only=True)
class LayoutInfo:
    expert_counters: Tensor | None = None
    src_rank_counters: Tensor | None = None
    expert_offsets: Tensor | None = None
    recv_total_counter: Tensor | None = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


@dataclass(kw_only=True)
class DispatchInputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@dataclass(kw_only=True)
class DispatchOutputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None
    topk_idx: Tensor | None = None


@dataclass(kw_only=True)
class CombineInputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@dataclass(kw_only=True)
class CombineOutputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None


class Communicator:
    """`nccl.core.Communicator`, as `get_nccl_comm_from_group` returns it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: dist.ProcessGroup | None = group

    def destroy(self) -> None:
        self.group = None


def get_nccl_comm_from_group(group: dist.ProcessGroup | None = None) -> Communicator:
    return Communicator(group or dist.group.WORLD)


class Group:
    """`nccl.ep.Group`; constructed by `create`."""

    def __init__(self, comm: Communicator, config: GroupConfig) -> None:
        assert comm.group is not None, "the communicator is destroyed"
        self.process_group = comm.group
        self.config = config
        self.rank, self.size = comm.group.rank(), comm.group.size()
        self.num_local_experts = config.num_experts // self.size
        self.live_handles = 0
        self.destroyed = False

    @classmethod
    def create(cls, comm: Communicator, config: GroupConfig) -> "Group":
        assert config.algorithm == Algorithm.HIGH_THROUGHPUT, "the low-latency mode has no backward pass"
        assert config.num_experts > 0 and config.max_token_bytes > 0 and config.max_num_sms > 0
        assert config.max_token_bytes % 16 == 0, "HT max_token_bytes must be a multiple of 16 bytes"
        assert 0 < config.max_dispatch_tokens_per_rank <= MAX_SUPPORTED_TOKENS_PER_RANK
        assert config.max_recv_tokens_per_rank == 0, "only the eager mode is in the double"
        assert config.overflow_policy != OverflowPolicy.DROP, "eager mode does not support NCCL_EP_OVERFLOW_DROP"
        group = cls(comm, config)
        assert config.num_experts % group.size == 0
        assert group.num_local_experts * group.size % 4 == 0, "experts_per_lsa_team must be a multiple of 4"
        exchange_objects(group.process_group, "Group.create", vars(config), [None] * group.size)
        return group

    def create_handle(
        self,
        layout: Layout,
        topk_idx: Tensor,
        *,
        layout_info: LayoutInfo | None = None,
        config: HandleConfig | None = None,
        stream: Any,
    ) -> "Handle":
        if self.destroyed:
            raise NcclInvalid("Cannot create_handle: Group is not initialized or has been destroyed")
        assert layout == Layout.FLAT and config is None, "not in the double"
        self.live_handles += 1
        handle = Handle(self, topk_idx.buffer.shape[1])
        handle.update(topk_idx, layout_info=layout_info, stream=stream)
        return handle

    def destroy(self) -> None:
        assert self.live_handles == 0, "handles outlive their group"
        self.destroyed = True


class Handle:
    """`nccl.ep.Handle`; routes are those of the last `update`, and each FWD dispatch starts a pass."""

    def __init__(self, group: Group, num_topk: int) -> None:
        self.group: Group | None = group
        self.num_topk = num_topk
        self.dispatched = False

    def update(self, topk_idx: Tensor, *, layout_info: LayoutInfo | None = None, stream: Any) -> None:
        group = self._valid("update")
        ids = topk_idx.buffer
        assert ids.dim() == 2 and ids.dtype in (torch.int32, torch.int64) and ids.shape[1] == self.num_topk
        assert len(ids) <= group.config.max_dispatch_tokens_per_rank, "Token count exceeds HT buffer capacity"
        self.ids = ids.clone()
        self.dispatched = False
        everyone = exchange_objects(group.process_group, "update", {"topk": self.num_topk}, [self.ids] * group.size)
        first = group.rank * group.num_local_experts
        local = [torch.where((i >= first) & (i < first + group.num_local_experts), i - first, -1) for i in everyone]
        self.origin = [(rank, t) for rank, ids in enumerate(local) for t in (ids >= 0).any(1).nonzero()[:, 0].tolist()]
        rows = [sorted(e for e in local[rank][t].tolist() if e >= 0) for rank, t in self.origin]
        self.local_ids = torch.full((len(rows), self.num_topk), -1)
        for row, experts in enumerate(rows):
            assert len(set(experts)) == len(experts), "an expert twice in one token's choice"
            self.local_ids[row, : len(experts)] = torch.tensor(experts)
        self._write_counts(group, layout_info)

    def _write_counts(self, group: Group, layout_info: LayoutInfo | None) -> None:
        assert layout_info is not None and layout_info.recv_total_counter is not None, "eager mode needs the count"
        assert layout_info.src_rank_counters is None and layout_info.expert_offsets is None
        total = layout_info.recv_total_counter.buffer
        assert total.dim() == 1 and total.dtype in (torch.int32, torch.int64)
        total[0] = len(self.origin)
        if layout_info.expert_counters is not None:
            counters = layout_info.expert_counters.buffer
            assert counters.dtype == torch.int32 == total.dtype and len(counters) >= group.num_local_experts
            valid = self.local_ids[self.local_ids >= 0]
            counters[: group.num_local_experts] = torch.bincount(valid, minlength=group.num_local_experts)

    def dispatch(
        self,
        inputs: DispatchInputs,
        outputs: DispatchOutputs,
        *,
        layout_info: LayoutInfo | None = None,
        config: DispatchConfig | None = None,
        stream: Any,
    ) -> None:
        group, config = self._valid("dispatch"), config or DispatchConfig()
        tokens, received = _rows(inputs.tokens, group), _rows(outputs.tokens, group)
        assert len(tokens) == len(self.ids), "tokens are as many as in topk_idx"
        assert len(received) >= len(self.origin), "eager dispatch recv buffer too small"
        forward = config.pass_direction == PassDir.FWD
        others = (inputs.topk_weights, outputs.topk_weights, outputs.topk_idx)
        assert all((tensor is not None) == forward for tensor in others), "weights and ids go with FWD, and only then"
        weights = _weights(inputs.topk_weights, self.ids.shape) if forward else None
        assert forward or self.dispatched, "a backward dispatch without a forward one"
        call = f"dispatch {config.pass_direction.name}"
        sent = exchange_objects(
            group.process_group, call, {"hidden": tokens.shape[1]}, [(tokens, weights, self.ids)] * group.size
        )
        for row, (rank, token) in enumerate(self.origin):
            received[row] = sent[rank][0][token]
        if forward:
            assert layout_info is not None and layout_info.recv_topk_idx_kind == ExpertIdKind.LOCAL, "AUTO may change"
            self._write_routes(group, sent, outputs)
        self.dispatched = True

    def _write_routes(self, group: Group, sent: list[Any], outputs: DispatchOutputs) -> None:
        """Ids and weights of the local experts, packed in ascending order of the ids, then -1 and 0."""
        assert outputs.topk_idx is not None and outputs.topk_weights is not None
        ids = outputs.topk_idx.buffer
        weights = _weights(outputs.topk_weights, ids.shape)
        assert ids.dtype == torch.int64 and ids.shape == self.local_ids.shape
        ids.copy_(self.local_ids)
        weights.zero_()
        for row, (rank, token) in enumerate(self.origin):
            _, theirs, chosen = sent[rank]
            for slot, expert in enumerate(self.local_ids[row].tolist()):
                if expert >= 0:
                    at = chosen[token] == expert + group.rank * group.num_local_experts
                    weights[row, slot] = theirs[token][at][0]

    def combine(
        self, inputs: CombineInputs, outputs: CombineOutputs, *, config: CombineConfig | None = None, stream: Any
    ) -> None:
        group, config = self._valid("combine"), config or CombineConfig()
        assert self.dispatched, "a combine before its dispatch"
        rows, combined = _rows(inputs.tokens, group), _rows(outputs.tokens, group)
        assert len(rows) == len(self.origin) and len(combined) == len(self.ids)
        backward = config.pass_direction == PassDir.BWD
        assert (inputs.topk_weights is not None) == backward, "FWD forbids inputs.topk_weights, BWD requires them"
        assert (outputs.topk_weights is not None) == backward
        weights = _weights(inputs.topk_weights, self.local_ids.shape) if backward else None
        payload = (rows, weights, self.local_ids, self.origin)
        call = f"combine {config.pass_direction.name}"
        sent = exchange_objects(group.process_group, call, {"hidden": rows.shape[1]}, [payload] * group.size)
        sums = torch.zeros(combined.shape)
        back = torch.zeros(self.ids.shape)
        for owner, (their_rows, their_weights, their_ids, origin) in enumerate(sent):
            for row, (rank, token) in enumerate(origin):
                if rank == group.rank:
                    sums[token] += their_rows[row].float()
                    for slot, expert in enumerate(their_ids[row].tolist() if backward else ()):
                        if expert >= 0:
                            at = self.ids[token] == expert + owner * group.num_local_experts
                            back[token][at] = their_weights[row, slot]
        combined.copy_(sums)
        if backward:
            _weights(outputs.topk_weights, self.ids.shape).copy_(back)

    def complete(self, *, config: int = 0, stream: Any) -> None:
        raise AssertionError("Only LL mode is supported")

    def destroy(self) -> None:
        if self.group is not None:
            self.group.live_handles -= 1
            self.group = None

    def _valid(self, operation: str) -> Group:
        if self.group is None:
            raise NcclInvalid(f"Cannot {operation}: Handle is not initialized or has been destroyed")
        return self.group


def _rows(tensor: Tensor | None, group: Group) -> torch.Tensor:
    assert tensor is not None, "tokens are required"
    rows = tensor.buffer
    assert rows.dim() == 2 and rows.dtype in (torch.bfloat16, torch.float16, torch.float32)
    row_bytes = rows.shape[1] * rows.element_size()
    assert row_bytes % 16 == 0 and row_bytes <= group.config.max_token_bytes
    return rows


def _weights(tensor: Tensor | None, shape: torch.Size) -> torch.Tensor:
    assert tensor is not None and tensor.buffer.dtype == torch.float32
    assert tensor.buffer.shape == shape, f"weights are {tuple(tensor.buffer.shape)}, not {tuple(shape)}"
    return tensor.buffer


def modules() -> dict[str, ModuleType]:
    """`nccl`, `nccl.ep`, `nccl.ep.interop` and `nccl.ep.interop.torch`, for sys.modules."""
    names = ("nccl", "nccl.ep", "nccl.ep.interop", "nccl.ep.interop.torch")
    made = {name: ModuleType(name) for name in names}
    for name in names[1:]:
        parent, child = name.rsplit(".", 1)
        setattr(made[parent], child, made[name])
    for module in made.values():
        module.__path__ = []
    public = {name: value for name, value in globals().items() if not name.startswith("_") and name[0].isupper()}
    made["nccl.ep"].__dict__.update(
        public, __file__=__file__, get_lib_version=lambda: "0.1.0", get_lib_path=lambda: __file__
    )
    made["nccl.ep.interop.torch"].__dict__.update(get_nccl_comm_from_group=get_nccl_comm_from_group)
    return made
