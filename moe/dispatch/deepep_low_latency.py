"""DeepEP's low-latency kernels, and UCCL's: few tokens a rank, no gradients; for sampling and for probes.

Every rank sends each route on its own to the expert's rank, into a slot that is reserved there, and the combine applies
the weights. (DeepEP README, "Example use in inference decoding".)

Not yet run on hardware: written against the sources named in `moe.dispatch.buffer_limits`, tested with doubles.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe.config import MoeConfig
from moe.dispatch import compact
from moe.dispatch.base import DispatchedTokens, ExpertGroup, ExpertShape
from moe.dispatch.buffer_dispatcher import BufferDispatcher
from moe.dispatch.buffer_limits import BufferLimits, low_latency_problems

_WIRE_DTYPE = torch.bfloat16
_MESSAGE_BYTES = 16
"""Header of a row: the index of its token."""


@dataclass(frozen=True)
class _Received:
    handle: Any
    ids_TK: Tensor
    weights_TK: Tensor
    occupied_EM: Tensor
    """bool (local experts, slots): the slots that hold a token."""
    sent: tuple[int, int]
    """Rows that left for other ranks, and for other nodes."""
    dtype: torch.dtype


class DeepEpLowLatencyDispatcher(BufferDispatcher):
    """`moe.low_latency = true` with "deepep" or "uccl_ep", over a library that has `Buffer`.

    Arguments as of BufferDispatcher. A result of `dispatch` must be combined before the second dispatch after it: the
    library has two buffers.
    """

    mode = "low latency"

    def __init__(
        self, library: Any, moe: MoeConfig, group: ExpertGroup, *, requested: str, limits: BufferLimits
    ) -> None:
        super().__init__(library, moe, group, requested=requested, limits=limits)
        self._buffer_shape = (0, 0)

    def _problems(self, shape: ExpertShape) -> Iterator[str]:
        return low_latency_problems(shape, self._limits, self._moe.max_tokens_per_rank)

    def dispatch(
        self, hidden_TH: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, num_experts: int
    ) -> DispatchedTokens:
        """As TokenDispatcher, without gradients.

        Raises ValueError when an input wants a gradient, for more tokens than `moe.max_tokens_per_rank`, and for hidden
        states that are not bfloat16 unless they are cast for the wire; ExchangeFailed when a rank is gone.
        """
        self._check_inputs(hidden_TH, weights_TK)
        ids_TK = expert_ids_TK.to(getattr(self._library, "topk_idx_t", torch.int64)).contiguous()
        buffer = self._open(hidden_TH.shape[1], num_experts)
        monitor = self._group.monitor
        with monitor.exchange("dispatch", monitor.layer) as record:
            slots_EMH, count_E, handle, done, _ = buffer.low_latency_dispatch(
                hidden_TH.to(_WIRE_DTYPE).contiguous(),
                ids_TK,
                self._moe.max_tokens_per_rank,
                num_experts,
                use_fp8=False,
                async_finish=True,
            )
            done.current_stream_wait()
            occupied_EM = torch.arange(slots_EMH.shape[1], device=count_E.device) < count_E.unsqueeze(1)
            rows_SH = slots_EMH[occupied_EM]
            sent = self._sent_routes(ids_TK, num_experts)
            record.received_rows += len(rows_SH)
            row_bytes = hidden_TH.shape[1] * _WIRE_DTYPE.itemsize + _MESSAGE_BYTES
            record.sent_bytes += sent[0] * row_bytes
            record.sent_off_node_bytes += sent[1] * row_bytes
        received = _Received(handle, ids_TK, weights_TK.float().contiguous(), occupied_EM, sent, hidden_TH.dtype)
        return DispatchedTokens(rows_SH.to(hidden_TH.dtype), count_E.cumsum(0).to(torch.int32), received)

    def combine(self, rows_SH: Tensor, dispatched: DispatchedTokens) -> Tensor:
        """As TokenDispatcher; the library applies the weights, in float32.

        Bytes are counted as the way back of the routes that this rank sent: over the group they are those that cross.
        """
        received: _Received = dispatched.handle
        if rows_SH.requires_grad and torch.is_grad_enabled():
            raise ValueError(_no_gradients("the experts' output"))
        monitor = self._group.monitor
        slots_EMH = rows_SH.new_zeros((*received.occupied_EM.shape, rows_SH.shape[1]), dtype=_WIRE_DTYPE)
        slots_EMH[received.occupied_EM] = rows_SH.to(_WIRE_DTYPE)
        with monitor.exchange("combine", monitor.layer) as record:
            combined_TH, done, _ = self._buffer.low_latency_combine(
                slots_EMH, received.ids_TK, received.weights_TK, received.handle, async_finish=True
            )
            done.current_stream_wait()
            row_bytes = rows_SH.shape[1] * _WIRE_DTYPE.itemsize
            record.sent_bytes += received.sent[0] * row_bytes
            record.sent_off_node_bytes += received.sent[1] * row_bytes
        output: Tensor = combined_TH
        return output.to(received.dtype)

    def _settings(self) -> dict[str, int]:
        return {"max_tokens_per_rank": self._moe.max_tokens_per_rank}

    def _buffer_sizes(self) -> dict[str, int]:
        return {"rdma_buffer_bytes": self._buffer.num_rdma_bytes}

    def _check_inputs(self, hidden_TH: Tensor, weights_TK: Tensor) -> None:
        if torch.is_grad_enabled() and (hidden_TH.requires_grad or weights_TK.requires_grad):
            raise ValueError(_no_gradients("an input"))
        compact.require_bfloat16(hidden_TH, self._moe)
        compact.require_capacity(hidden_TH, self._moe)

    def _sent_routes(self, ids_TK: Tensor, num_experts: int) -> tuple[int, int]:
        owner_S = ids_TK[ids_TK >= 0] // (num_experts // self._group.size)
        per_node = self._group.ranks_per_node
        off_rank = owner_S != self._group.rank
        off_node = owner_S // per_node != self._group.rank // per_node
        return int(off_rank.sum()), int(off_node.sum())

    def _open(self, hidden_size: int, num_experts: int) -> Any:
        if self._buffer is None or self._buffer_shape != (hidden_size, num_experts):
            self.close()
            group, tokens = self._group, self._moe.max_tokens_per_rank
            self._buffer = self._library.Buffer(
                group.process_group,
                num_rdma_bytes=self._library.Buffer.get_low_latency_rdma_size_hint(
                    tokens, hidden_size, group.size, num_experts
                ),
                low_latency_mode=True,
                num_qps_per_rank=num_experts // group.size,  # a queue for each local expert
                explicitly_destroy=True,
            )
            self._buffer_shape = (hidden_size, num_experts)
        return self._buffer


def _no_gradients(what: str) -> str:
    return f"moe.low_latency = true has no gradients and {what} requires one: set it to false for training"
