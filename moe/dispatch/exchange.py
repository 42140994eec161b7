"""Uneven exchanges of rows between the ranks of a group, counted, through buffers that are reused."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage

from moe.dispatch.monitor import LayerExchange

_CACHED_BYTES = 1 << 20
"""Rows worked on at once on a CPU, so that the second operation finds them in its cache."""


@dataclass(frozen=True)
class Staging:
    """Buffers for rows: on a CPU, fresh memory costs more in page faults than the copies themselves."""

    _buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = field(default_factory=dict)
    _results: dict[str, list[tuple[UntypedStorage, int]]] = field(default_factory=dict)
    """By name: memory of results, and how many uses it has when nobody but this list holds it."""

    def rows(self, name: str, count: int, like_TH: Tensor) -> Tensor:
        """(count, hidden) of uninitialised memory, valid until the next call with this name."""
        size, key = count * like_TH.shape[1], (name, like_TH.dtype, like_TH.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = like_TH.new_empty(size)
        return buffer[:size].view(count, like_TH.shape[1])

    def result(self, name: str, count: int, like_TH: Tensor) -> Tensor:
        """(count, hidden) of uninitialised memory for the caller to keep; reused once all tensors on it are gone.

        Results of one name are about equally large.
        """
        if like_TH.device.type != "cpu":  # the accelerators' allocators reuse memory themselves
            return like_TH.new_empty(count, like_TH.shape[1])
        return _on(self._free(name, count * like_TH.shape[1] * like_TH.element_size()), count, like_TH)

    def _free(self, name: str, size_bytes: int) -> UntypedStorage:
        results = self._results.setdefault(name, [])
        for place, (storage, idle_uses) in enumerate(results):
            if _uses(storage) == idle_uses:
                if storage.nbytes() >= size_bytes:
                    return storage
                del results[place]  # too small: a larger one takes its place
                break
        storage = torch.empty(size_bytes + size_bytes // 8, dtype=torch.uint8).untyped_storage()
        results.append((storage, _uses(storage)))
        return storage

    def clear(self) -> None:
        self._buffers.clear()
        self._results.clear()


def _on(storage: UntypedStorage, count: int, like_TH: Tensor) -> Tensor:
    """A (count, hidden) tensor on `storage`; no view of another tensor, which autograd treats with care."""
    hidden = like_TH.shape[1]
    rows: Tensor = like_TH.new_empty(0).set_(storage, 0, (count, hidden), (hidden, 1))
    return rows


def _uses(storage: UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


@dataclass(frozen=True)
class Peers:
    """The ranks that exchange rows: all of an expert-parallel group, those of one node, or one of each node."""

    process_group: dist.ProcessGroup | None
    rank: int
    off_node: Sequence[bool]
    """For each peer, whether it is on another node."""
    wire_dtype: torch.dtype | None = None
    """Of rows on the wire; None: their own."""
    staging: Staging = field(default_factory=Staging)

    @property
    def size(self) -> int:
        return len(self.off_node)

    def swap(
        self, received: Tensor, sent: Tensor, receive: Sequence[int], send: Sequence[int], record: LayerExchange
    ) -> None:
        """Send `send[p]` rows to each peer p, in the order of peers, and fill `received` with `receive[p]` from each.

        Nothing is sent from a rank to itself: both lists have a zero there. Raises RuntimeError when a peer is gone or
        does not answer within the group's timeout.
        """
        row_bytes = sent[:1].nbytes if len(sent) else 0
        record.sent_bytes += sum(send) * row_bytes
        record.sent_off_node_bytes += row_bytes * sum(
            count for count, off in zip(send, self.off_node, strict=True) if off
        )
        if self.size > 1:
            dist.all_to_all_single(received, sent, list(receive), list(send), group=self.process_group)

    def swap_counts(self, counts_PC: Tensor, record: LayerExchange) -> Tensor:
        """Each peer's line of `counts_PC` (int64) for this rank: (peers, C), on the same device."""
        received_PC = torch.empty_like(counts_PC)
        if self.size == 1:
            return received_PC.copy_(counts_PC)
        dist.all_to_all_single(received_PC, counts_PC, group=self.process_group)
        line_bytes = counts_PC[:1].nbytes
        record.sent_bytes += line_bytes * (self.size - 1)
        record.sent_off_node_bytes += line_bytes * sum(self.off_node)
        return received_PC


def chunks(rows_SH: Tensor) -> list[slice]:
    """Consecutive rows that fit a CPU's cache together; on an accelerator all rows at once."""
    row_bytes = max(1, rows_SH.shape[1] * rows_SH.element_size())
    size = max(1, _CACHED_BYTES // row_bytes if rows_SH.device.type == "cpu" else len(rows_SH))
    return [slice(start, min(start + size, len(rows_SH))) for start in range(0, len(rows_SH), size)]


def take_rows(taken_NH: Tensor, rows_SH: Tensor, index_N: Tensor, weights_N: Tensor | None) -> None:
    """Fill `taken_NH` with `rows_SH[index_N]`, times `weights_N`. Not differentiable."""
    for part in chunks(taken_NH):
        taken_CH = taken_NH[part]
        torch.index_select(rows_SH, 0, index_N[part], out=taken_CH)
        if weights_N is not None:
            taken_CH.mul_(weights_N[part].unsqueeze(1))


def sum_rows(
    total_NH: Tensor,
    rows_SH: Tensor,
    index_R: Tensor,
    ends_N: Tensor,
    weights_R: Tensor | None = None,
    *,
    add: bool = False,
) -> Tensor:
    """Sums of rows: row n of `total_NH` becomes, or with `add` grows by, the sum of `rows_SH[index_R[r]]`, times
    `weights_R[r]`, for r from `ends_N[n]` to `ends_N[n+1]`; returns `total_NH`.

    `ends_N` is (N+1,) and begins with 0. Gather, product and sum are one kernel, so that the gathered rows are never
    in memory. Not differentiable.
    """
    rows_SH = rows_SH.detach()
    weights_R = None if weights_R is None else weights_R.to(rows_SH.dtype)
    if not index_R.numel() or not rows_SH.shape[1]:
        return total_NH if add else total_NH.zero_()
    parts = chunks(total_NH)
    starts = [0] if len(parts) == 1 else ends_N[[part.start for part in parts]].tolist()
    for part, start, stop in zip(parts, starts, [*starts[1:], len(index_R)], strict=True):
        sums_CH = torch.nn.functional.embedding_bag(
            index_R[start:stop],
            rows_SH,
            ends_N[part.start : part.stop + 1] - start,
            mode="sum",
            per_sample_weights=None if weights_R is None else weights_R[start:stop],
            include_last_offset=True,
        )
        total_CH = total_NH[part]
        total_CH.add_(sums_CH) if add else total_CH.copy_(sums_CH)
    return total_NH
