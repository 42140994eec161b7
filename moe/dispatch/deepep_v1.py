"""Training through DeepEP's v1 `Buffer`, and UCCL's, which has the same calls: the kernels of high throughput.

A token crosses once to each rank (between nodes: once to each node) with its routes, and the backward exchanges replay
the handle of its dispatch (DeepEP README, "Example use in model training or inference prefilling").

Not yet run on hardware: written against the sources named in `moe.dispatch.buffer_limits`, tested with doubles.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.config import MoeConfig
from moe.dispatch import compact
from moe.dispatch.base import DispatchedTokens, ExpertGroup, ExpertShape
from moe.dispatch.buffer_dispatcher import BufferDispatcher
from moe.dispatch.buffer_limits import MAX_BUFFER_BYTES, BufferLimits, normal_problems

_MIN_QUEUE_PAIRS = 24
"""The library's default; between nodes it wants one for each SM."""


class DeepEpV1Dispatcher(BufferDispatcher):
    """`moe.dispatcher` "deepep" or "uccl_ep" over a library that has `Buffer`; arguments as of BufferDispatcher."""

    mode = "normal"

    def __init__(
        self, library: Any, moe: MoeConfig, group: ExpertGroup, *, requested: str, limits: BufferLimits
    ) -> None:
        super().__init__(library, moe, group, requested=requested, limits=limits)
        self._hidden_size = 0

    def _problems(self, shape: ExpertShape) -> Iterator[str]:
        return normal_problems(shape, self._limits, self._moe.num_sms)

    def dispatch(
        self, hidden_TH: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, num_experts: int
    ) -> DispatchedTokens:
        """As TokenDispatcher.

        Raises ValueError for hidden states that are not bfloat16, unless the configuration says to round them for the
        wire, and ExchangeFailed when a rank is gone.
        """
        compact.require_bfloat16(hidden_TH, self._moe)
        exchange = _BufferExchange(self._open(hidden_TH), self._group.size, num_experts)
        ids_TK = expert_ids_TK.to(getattr(self._library, "topk_idx_t", torch.int64)).contiguous()
        passage = compact.Passage(exchange, self._group, self._group.monitor.layer, num_experts)
        return compact.dispatch(passage, hidden_TH, ids_TK, weights_TK)

    def combine(self, rows_SH: Tensor, dispatched: DispatchedTokens) -> Tensor:
        """As TokenDispatcher; weights are applied in float32, the wire carries one bfloat16 row a token and rank."""
        return compact.combine(rows_SH, dispatched)

    def _settings(self) -> dict[str, int]:
        return {"num_sms": self._moe.num_sms}

    def _buffer_sizes(self) -> dict[str, int]:
        return {"nvlink_buffer_bytes": self._buffer.num_nvl_bytes, "rdma_buffer_bytes": self._buffer.num_rdma_bytes}

    def _open(self, hidden_TH: Tensor) -> Any:
        """The buffer, made anew when the rows are wider than it was made for; a collective operation then."""
        hidden_size = hidden_TH.shape[1]
        if self._buffer is None or hidden_size > self._hidden_size:
            self.close()
            constants = {"hidden_size": hidden_size, "moe.num_sms": self._moe.num_sms}
            compact.require_equal(self._group, constants)
            self._buffer = _new_buffer(self._library, self._moe, self._group, self._limits, hidden_size)
            self._hidden_size = hidden_size
        return self._buffer


def _new_buffer(library: Any, moe: MoeConfig, group: ExpertGroup, limits: BufferLimits, hidden_size: int) -> Any:
    """A buffer as large as the library's own hints for dispatch and combine say.

    Raises ValueError when the hints exceed what the library can address.
    """
    library.Buffer.set_num_sms(moe.num_sms)
    configs = _configs(library.Buffer, group.size)
    hidden_bytes = hidden_size * torch.bfloat16.itemsize
    nvl_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, group.size) for config in configs)
    rdma_bytes = 0
    if group.size > limits.gpus_per_node:  # a build without RDMA refuses the question
        rdma_bytes = max(config.get_rdma_buffer_size_hint(hidden_bytes, group.size) for config in configs)
        if max(nvl_bytes, rdma_bytes) > MAX_BUFFER_BYTES:
            raise ValueError(
                f"{limits.library} needs buffers of {nvl_bytes} and {rdma_bytes} bytes, more than {MAX_BUFFER_BYTES}: "
                f"lower moe.num_sms = {moe.num_sms}"
            )
    return library.Buffer(
        group.process_group,
        num_nvl_bytes=nvl_bytes,
        num_rdma_bytes=rdma_bytes,
        num_qps_per_rank=max(_MIN_QUEUE_PAIRS, moe.num_sms),
        explicitly_destroy=True,
    )


def _configs(buffer: Any, num_ranks: int) -> tuple[Any, Any]:
    """Tuned settings for dispatch and combine; both hold the number of SMs, which handles depend on."""
    return buffer.get_dispatch_config(num_ranks), buffer.get_combine_config(num_ranks)


class _BufferExchange:
    """One pass through a buffer; the handle of its dispatch serves the combine and both backward exchanges.

    Each call runs on the library's stream, after what the compute stream holds, and is waited for before its results
    are read. A rank without tokens sends one token nowhere: the pointer of an empty tensor is null, which the kernels
    take for an argument that was left out.
    """

    rows_per_expert: list[int]

    def __init__(self, buffer: Any, num_ranks: int, num_experts: int) -> None:
        self._buffer = buffer
        self._dispatch_config, self._combine_config = _configs(buffer, num_ranks)
        self._num_experts = num_experts
        self._num_tokens = 0
        self._handle: Any = None

    def dispatch(self, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._num_tokens = len(hidden_TH)
        ids_TK = _never_empty(ids_TK, -1)
        per_rank_R, per_node, per_expert_E, in_rank_TR, counted = self._buffer.get_dispatch_layout(
            ids_TK, self._num_experts, previous_event=self._buffer.capture(), async_finish=True
        )
        received_RH, ids_RK, weights_RK, self.rows_per_expert, self._handle, done = self._buffer.dispatch(
            _never_empty(hidden_TH),
            num_tokens_per_rank=per_rank_R,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank_TR,
            num_tokens_per_expert=per_expert_E,
            topk_idx=ids_TK,
            topk_weights=_never_empty(weights_TK),
            config=self._dispatch_config,
            previous_event=counted,
            async_finish=True,
        )
        done.current_stream_wait()
        return received_RH, ids_RK.long(), weights_RK

    def combine(self, rows_RH: Tensor) -> Tensor:
        return self._combine(rows_RH, None)[0]

    def dispatch_gradient(self, grad_RH: Tensor, grad_weights_RK: Tensor) -> tuple[Tensor, Tensor]:
        return self._combine(grad_RH, grad_weights_RK)

    def combine_gradient(self, grad_TH: Tensor) -> Tensor:
        grad_RH, *_, done = self._buffer.dispatch(
            _never_empty(grad_TH),
            handle=self._handle,
            config=self._dispatch_config,
            previous_event=self._buffer.capture(),
            async_finish=True,
        )
        done.current_stream_wait()
        received: Tensor = grad_RH
        return received

    def _combine(self, rows_RH: Tensor, weights_RK: Tensor | None) -> tuple[Tensor, Any]:
        sums_TH, weights_TK, done = self._buffer.combine(
            rows_RH,
            self._handle,
            topk_weights=weights_RK,
            config=self._combine_config,
            previous_event=self._buffer.capture(),
            async_finish=True,
        )
        done.current_stream_wait()
        return sums_TH[: self._num_tokens], None if weights_TK is None else weights_TK[: self._num_tokens]


def _never_empty(rows_T: Tensor, value: float = 0) -> Tensor:
    return rows_T if len(rows_T) else F.pad(rows_T, (0, 0, 0, 1), value=value)
