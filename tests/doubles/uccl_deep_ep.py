"""Double of UCCL's `deep_ep` wrapper: DeepEP's calls, with what differs between the two.

Written from UCCL commit da914a20: ep/bench/buffer.py (the wrapper's deep_ep/buffer.py links to it), ep/bench/utils.py,
ep/deep_ep_wrapper/deep_ep/__init__.py, ep/src/uccl_ep.cc, ep/include/ep_launch.cuh.
Other than DeepEP v1: `is_intranode`, no `comm`; the node's size comes from LOCAL_WORLD_SIZE, the GPU from LOCAL_RANK;
longer handles that hold the received counts; events keep the tensors they wait for; other tuned and compiled sizes;
arguments of the low-latency combine for an overlap that it does not have.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.doubles import deep_ep_v1, deep_ep_v1_types
from tests.doubles.deep_ep_v1_types import Config as _Config
from tests.doubles.deep_ep_v1_types import EventHandle, EventOverlap, host_assert

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "destroy_uccl", "initialize_uccl"]


class Config(_Config):
    """`from uccl.ep import Config`."""


Config.__module__ = "uccl.ep"


def initialize_uccl(*arguments: Any) -> Any:
    """Called by the wrapper's Buffer only."""
    raise NotImplementedError


def destroy_uccl(proxies: Any, workers: Any) -> None:
    """Called by the wrapper's Buffer only."""
    raise NotImplementedError


class Buffer(deep_ep_v1.Buffer):
    """ep/bench/buffer.py: class Buffer."""

    max_top_k = 16

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        is_intranode: bool | None = None,
    ) -> None:
        self._check_topology(group, is_intranode)
        self._start(group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank, explicitly_destroy)

    def _check_topology(self, group: dist.ProcessGroup, is_intranode: bool | None) -> None:
        """ep/bench/utils.py: detect_group_topology. A "node" is LOCAL_WORLD_SIZE consecutive ranks."""
        local_rank, self._local_size = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", -1))
        if self._local_size == -1:
            self._local_size = deep_ep_v1_types.NUM_MAX_NVL_PEERS
        places: list[Any] = [None] * group.size()
        dist.all_gather_object(places, (dist.get_rank() // self._local_size, local_rank), group)
        if len(set(places)) < len(places):
            raise ValueError("Duplicate physical GPU rank mapping on node: " + str(places))
        if is_intranode and len({node for node, _ in places}) > 1:
            raise ValueError("Detected multi-node group topology, but `is_intranode=True` was requested")

    def _nvl_peers(self) -> int:
        return self._local_size

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        deep_ep_v1.Buffer.set_num_sms(new_num_sms)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return _as_config(deep_ep_v1.Buffer.get_dispatch_config(num_ranks))

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return _as_config(deep_ep_v1.Buffer.get_combine_config(num_ranks))

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
        overlap: bool = False,
        packed_recv_count: Tensor | None = None,
        comp_signal: Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 0,
        src_signals: Tensor | None = None,
        src_signal_expect_value: int = 0,
    ) -> Any:
        if overlap:
            raise NotImplementedError("low_latency_combine(overlap=True) is not implemented yet. ")
        return super().low_latency_combine(
            x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, async_finish, return_recv_hook, out
        )

    def _new_handle(
        self, in_rank_TR: Tensor, counts: list[int], recv_src_idx: Tensor, config: _Config
    ) -> tuple[Any, ...]:
        """Within a node seven entries, between nodes twelve: with the host's counts; empty tensors get a row."""
        handle = super()._new_handle(in_rank_TR, counts, recv_src_idx, config)
        if self.num_nodes == 1:
            sources = recv_src_idx if len(recv_src_idx) else recv_src_idx.new_zeros(1)
            return (*handle[:3], len(recv_src_idx), sources, *handle[4:])
        *layout, meta, rdma_head, nvl_head = handle
        at_least_one = nvl_head if len(nvl_head) else nvl_head.new_zeros(1, nvl_head.size(1))
        return (*layout, len(recv_src_idx), len(nvl_head), meta, rdma_head, at_least_one)

    def _handle(self, handle: tuple[Any, ...], config: _Config) -> dict[str, Any]:
        host_assert(isinstance(handle, tuple) and len(handle) == (7 if self.num_nodes == 1 else 12), "handle")
        if self.num_nodes == 1:
            handle = (*handle[:3], handle[4][: handle[3]], *handle[5:])
        else:
            handle = (*handle[:7], *handle[9:])
        return super()._handle(handle, config)

    def _finish(self, outputs: list[Tensor | None], async_finish: bool) -> tuple[list[Any], EventOverlap]:
        visible, event = super()._finish(outputs, async_finish)
        kept = tuple(tensor for tensor in visible if isinstance(tensor, torch.Tensor))
        return visible, EventOverlap(event.event, kept if async_finish else None)

    def _check_rows(self, x: Tensor, config: _Config, top_k: int) -> None:
        super()._check_rows(x, config, top_k)
        host_assert(self.num_nodes in (1, 2, 3, 4, 8, 16), "Unsupported RDMA ranks")


def _as_config(config: _Config) -> Config:
    return Config(config.num_sms, config.nvl_send, config.nvl_recv, config.rdma_send, config.rdma_recv)
