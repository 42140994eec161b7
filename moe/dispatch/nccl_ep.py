"""NCCL EP (`nccl.ep`), its high-throughput algorithm with the flat layout: the only one of it that has a backward pass.

Written against nccl-extensions 0.1.0 (python/nccl/ep/*.py, nccl_ep/include/nccl_ep.h, nccl_ep/nccl_ep.cc); tested
against a double, not yet run on hardware. The group is made for the actual number of received tokens ("eager":
max_recv_tokens_per_rank = 0): the counts come to the host before the receive buffers are made. A handle holds one
layer's routes until the backward pass has used them; then it is given new routes by a later layer, as making one
allocates device memory.
"""

import math
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe.config import MoeConfig
from moe.dispatch import compact, limits
from moe.dispatch.base import DispatchedTokens, ExpertGroup, ExpertShape, TransportReport

HIDDEN_MULTIPLE = 8
MAX_TOKENS_PER_RANK = 8192
MAX_RANKS = 64
MAX_NODES = 8
MAX_RANKS_PER_NODE = 8
MAX_LOCAL_EXPERTS = 1024
NODE_EXPERTS_MULTIPLE = 4


def build_nccl_ep(moe: MoeConfig, group: ExpertGroup) -> "NcclEpDispatcher":
    """The dispatcher through `nccl.ep`; ValueError of one line when it is missing or older than nccl-extensions."""
    library = _import_nccl_ep()
    if moe.low_latency:
        raise ValueError("moe.low_latency = true: nccl_ep is for training, its low-latency kernels have no backward")
    if group.process_group is None:
        raise ValueError("moe.dispatcher nccl_ep needs torch.distributed: start the ranks, or use local")
    return NcclEpDispatcher(library, moe, group)


def _import_nccl_ep() -> ModuleType:
    try:
        import nccl.ep
        import nccl.ep.interop.torch
    except (ImportError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0] == "nccl":
            raise ValueError(
                "moe.dispatcher nccl_ep needs the module nccl.ep: pip install 'argo-moe-rl[nccl-ep]'"
            ) from error
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise ValueError(
            f"moe.dispatcher nccl_ep: importing nccl.ep failed ({reason}): it needs the libnccl of torch's CUDA version"
        ) from error
    library: ModuleType = nccl.ep
    if not hasattr(library, "OverflowPolicy") or not hasattr(library, "Group"):
        raise ValueError(
            f"nccl.ep of {library.__file__} is not that of nccl-extensions >= 0.1 with its compiled part: "
            "pip install 'argo-moe-rl[nccl-ep]'"
        )
    return library


class NcclEpDispatcher:
    """Tokens by way of one NCCL EP group for each size of layer."""

    def __init__(self, library: ModuleType, moe: MoeConfig, group: ExpertGroup) -> None:
        self._library = library
        self._moe = moe
        self._group = group
        self._links: dict[tuple[int, int, int], _Link] = {}
        self._communicator: Any = None

    def validate(self, shape: ExpertShape) -> None:
        """Raise ValueError naming the limit of NCCL EP that `shape` breaks."""
        for problem in nccl_ep_problems(shape, self._moe):
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
        link = self._open_link(num_experts, hidden_TH.shape[1], expert_ids_TK.shape[1])
        passage = compact.Passage(_NcclEpExchange(link), self._group, self._group.monitor.layer, num_experts)
        return compact.dispatch(passage, hidden_TH, expert_ids_TK.long().contiguous(), weights_TK)

    def combine(self, rows_SH: Tensor, dispatched: DispatchedTokens) -> Tensor:
        """Weighted sums of each token's rows, brought back: (T, hidden)."""
        return compact.combine(rows_SH, dispatched)

    def transport_report(self) -> TransportReport:
        """The library that carried the tokens."""
        details: dict[str, str | int | float] = {
            "library_version": str(self._library.get_lib_version()),
            "library_file": str(self._library.get_lib_path()),
            "wire": "gin",
            "algorithm": "high_throughput",
            "num_sms": self._moe.num_sms,
            "max_tokens_per_rank": self._moe.max_tokens_per_rank,
        }
        return TransportReport(requested="nccl_ep", observed="nccl_ep", details=details)

    def close(self) -> None:
        """Release handles, groups and the communicator; all ranks of the group call it."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None

    def _open_link(self, num_experts: int, hidden_size: int, top_k: int) -> "_Link":
        """The NCCL EP group for layers of this size, made by the first of them; a collective operation then."""
        key = (num_experts, hidden_size, top_k)
        if key not in self._links:
            monitor = self._group.monitor
            with monitor.exchange("set-up of the group", monitor.layer):
                self._links[key] = self._make_link(*key)
        return self._links[key]

    def _make_link(self, num_experts: int, hidden_size: int, top_k: int) -> "_Link":
        constants = {
            "moe.max_tokens_per_rank": self._moe.max_tokens_per_rank,
            "moe.num_sms": self._moe.num_sms,
            "num_experts": num_experts,
            "hidden_size": hidden_size,
            "num_experts_per_token": top_k,
        }
        compact.require_equal(self._group, constants)
        if self._communicator is None:
            interop = self._library.interop.torch
            self._communicator = interop.get_nccl_comm_from_group(self._group.process_group)
        num_local_experts = num_experts // self._group.size
        return _Link(self._library, self._communicator, self._moe, num_experts, num_local_experts, hidden_size)


class _Link:
    """One NCCL EP group with all its handles, and those of them that no layer is using."""

    def __init__(
        self,
        library: Any,
        communicator: Any,
        moe: MoeConfig,
        num_experts: int,
        num_local_experts: int,
        hidden_size: int,
    ) -> None:
        self.library = library
        self.num_local_experts = num_local_experts
        self._handles: list[Any] = []
        self._free_handles: list[Any] = []
        self._group = library.Group.create(
            communicator,
            library.GroupConfig(
                algorithm=library.Algorithm.HIGH_THROUGHPUT,
                num_experts=num_experts,
                max_dispatch_tokens_per_rank=moe.max_tokens_per_rank,
                max_recv_tokens_per_rank=0,
                max_token_bytes=hidden_size * 2,
                max_num_sms=moe.num_sms,
                timeout_ns=math.ceil(moe.exchange_timeout_s * 1e9),
                overflow_policy=library.OverflowPolicy.TRAP,
            ),
        )

    def take_handle(self, ids_TK: Tensor, layout_info: Any, stream: int) -> Any:
        """A handle with these routes; `give_back` returns it when nobody needs them any more."""
        ids = self.library.Tensor(ids_TK)
        if self._free_handles:
            handle = self._free_handles.pop()
            handle.update(ids, layout_info=layout_info, stream=stream)
        else:
            handle = self._group.create_handle(self.library.Layout.FLAT, ids, layout_info=layout_info, stream=stream)
            self._handles.append(handle)
        return handle

    def give_back(self, handle: Any) -> None:
        self._free_handles.append(handle)

    def close(self) -> None:
        """Destroy the handles first, those of passes that had no backward too: they point into the group."""
        for handle in self._handles:
            handle.destroy()
        self._handles.clear()
        self._group.destroy()


class _NcclEpExchange:
    """One pass through a group; everything runs on the current stream, so that order is all the waiting there is."""

    def __init__(self, link: _Link) -> None:
        self.rows_per_expert: list[int] = []
        self._link = link
        self._ids_TK: Tensor | None = None
        self._handle: Any = None
        self._num_received = 0
        self._num_tokens = 0

    def dispatch(self, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        library, stream, top_k = self._link.library, _stream(hidden_TH), ids_TK.shape[1]
        counts = torch.zeros(self._link.num_local_experts + 1, dtype=torch.int32, device=hidden_TH.device)
        layout_info = library.LayoutInfo(
            expert_counters=library.Tensor(counts[1:]), recv_total_counter=library.Tensor(counts[:1])
        )
        handle = self._link.take_handle(ids_TK, layout_info, stream)
        weakref.finalize(self, self._link.give_back, handle).atexit = False
        self._handle, self._ids_TK, self._num_tokens = handle, ids_TK, len(hidden_TH)
        self._num_received, *self.rows_per_expert = counts.tolist()
        received_RH = hidden_TH.new_empty(self._num_received, hidden_TH.shape[1])
        local_ids_RK = ids_TK.new_empty(self._num_received, top_k)
        weights_RK = weights_TK.new_empty(self._num_received, top_k)
        handle.dispatch(
            library.DispatchInputs(tokens=library.Tensor(hidden_TH), topk_weights=library.Tensor(weights_TK)),
            library.DispatchOutputs(
                tokens=library.Tensor(received_RH),
                topk_weights=library.Tensor(weights_RK),
                topk_idx=library.Tensor(local_ids_RK),
            ),
            layout_info=library.LayoutInfo(recv_topk_idx_kind=library.ExpertIdKind.LOCAL),
            config=library.DispatchConfig(pass_direction=library.PassDir.FWD),
            stream=stream,
        )
        return received_RH, local_ids_RK, weights_RK

    def combine(self, rows_RH: Tensor) -> Tensor:
        library = self._link.library
        sums_TH = rows_RH.new_empty(self._num_tokens, rows_RH.shape[1])
        self._handle.combine(
            library.CombineInputs(tokens=library.Tensor(rows_RH)),
            library.CombineOutputs(tokens=library.Tensor(sums_TH)),
            config=library.CombineConfig(pass_direction=library.PassDir.FWD),
            stream=_stream(rows_RH),
        )
        return sums_TH

    def dispatch_gradient(self, grad_RH: Tensor, grad_weights_RK: Tensor) -> tuple[Tensor, Tensor]:
        library = self._link.library
        grad_TH = grad_RH.new_empty(self._num_tokens, grad_RH.shape[1])
        grad_weights_TK = grad_weights_RK.new_empty(self._num_tokens, grad_weights_RK.shape[1])
        self._handle.combine(
            library.CombineInputs(tokens=library.Tensor(grad_RH), topk_weights=library.Tensor(grad_weights_RK)),
            library.CombineOutputs(tokens=library.Tensor(grad_TH), topk_weights=library.Tensor(grad_weights_TK)),
            config=library.CombineConfig(pass_direction=library.PassDir.BWD),
            stream=_stream(grad_RH),
        )
        return grad_TH, grad_weights_TK

    def combine_gradient(self, grad_TH: Tensor) -> Tensor:
        library = self._link.library
        grad_RH = grad_TH.new_empty(self._num_received, grad_TH.shape[1])
        self._handle.dispatch(
            library.DispatchInputs(tokens=library.Tensor(grad_TH)),
            library.DispatchOutputs(tokens=library.Tensor(grad_RH)),
            config=library.DispatchConfig(pass_direction=library.PassDir.BWD),
            stream=_stream(grad_TH),
        )
        return grad_RH


def nccl_ep_problems(shape: ExpertShape, moe: MoeConfig) -> Iterator[str]:
    """One line for each limit of NCCL EP's high-throughput mode (RELEASE.md, common.hpp, nccl_ep.cc) that is broken."""
    advice = "lower moe.expert_parallel_size"
    yield from limits.dtype_problems("nccl_ep", shape, moe)
    yield from limits.expert_problems("nccl_ep", shape, MAX_LOCAL_EXPERTS * shape.ep_size, MAX_LOCAL_EXPERTS)
    yield from limits.token_problems("nccl_ep", shape, moe)
    if shape.hidden_size % HIDDEN_MULTIPLE:
        yield f"nccl_ep: hidden_size {shape.hidden_size} is no multiple of {HIDDEN_MULTIPLE}: use all_to_all"
    if moe.max_tokens_per_rank > MAX_TOKENS_PER_RANK:
        yield f"nccl_ep: moe.max_tokens_per_rank = {moe.max_tokens_per_rank} is over {MAX_TOKENS_PER_RANK}: lower it"
    if shape.ep_size > MAX_RANKS:
        yield f"nccl_ep: {shape.ep_size} ranks are over {MAX_RANKS}: {advice}"
    ranks = min(shape.ep_size, shape.ranks_per_node)
    if ranks > MAX_RANKS_PER_NODE:
        yield f"nccl_ep: {ranks} ranks of one node are over {MAX_RANKS_PER_NODE}: {advice}"
    if -(-shape.ep_size // ranks) > MAX_NODES:
        yield f"nccl_ep: {-(-shape.ep_size // ranks)} nodes are over {MAX_NODES}: {advice}"
    node_experts = shape.num_experts // shape.ep_size * ranks
    if node_experts % NODE_EXPERTS_MULTIPLE:
        yield (
            f"nccl_ep: {node_experts} experts of a node's {ranks} ranks are no multiple of {NODE_EXPERTS_MULTIPLE}: "
            "change moe.expert_parallel_size"
        )


def _stream(tensor: Tensor) -> int:
    """The current CUDA stream, as an address; without CUDA there is only the one that is 0."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
