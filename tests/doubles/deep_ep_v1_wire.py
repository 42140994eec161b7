"""How the doubles of the v1 `Buffer` family move rows: over the process group, as bytes."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.doubles.deep_ep_v1_types import EPException


class Wire:
    """The ranks of one buffer; every operation first agrees on what all ranks are about to do."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._operations = 0

    def agree(self, operation: str, *constants: Any) -> None:
        """All ranks call the same operation, the same number of times, with equal constants; on hardware they hang."""
        self._operations += 1
        ours = (self._operations, operation, constants)
        theirs: list[Any] = [None] * self.size
        dist.all_gather_object(theirs, ours, self.group)
        for rank, other in enumerate(theirs):
            if other != theirs[0]:
                raise EPException(f"rank {rank} is at {other}, rank 0 at {theirs[0]}: the kernels would hang")

    def send(self, parts: list[Tensor]) -> list[Tensor]:
        """`parts[r]` goes to rank r; what came from each rank. Rows of any dtype; row shapes are equal on all ranks."""
        counts = torch.tensor([len(part) for part in parts])
        received_counts = torch.empty_like(counts)
        dist.all_to_all_single(received_counts, counts, group=self.group)
        rows = torch.cat(parts).contiguous()
        width_bytes = rows[:0].numel() or rows.shape[1:].numel() * rows.element_size()
        payload = rows.view(len(rows), -1).view(torch.uint8) if rows.numel() else rows.new_empty(0, dtype=torch.uint8)
        received = torch.empty(int(received_counts.sum()), width_bytes, dtype=torch.uint8)
        dist.all_to_all_single(
            received,
            payload.reshape(len(rows), width_bytes),
            received_counts.tolist(),
            counts.tolist(),
            group=self.group,
        )
        arrived = received.view(rows.dtype).view(len(received), *rows.shape[1:])
        return list(arrived.split(received_counts.tolist()))
