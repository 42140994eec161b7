"""How the doubles of GPU libraries move their data, and notice ranks that do different things."""

from typing import Any

import torch.distributed as dist


def exchange_objects(group: dist.ProcessGroup, call: str, constants: dict[str, Any], payloads: list[Any]) -> list[Any]:
    """Send `payloads[rank]` to each rank; what each rank sent here. All make the same call with equal constants."""
    everywhere: list[Any] = [None] * group.size()
    dist.all_gather_object(everywhere, (call, constants, payloads), group=group)
    for rank, (other, theirs, _) in enumerate(everywhere):
        assert other == call, f"rank {rank} is in {other}, this rank in {call}"
        assert theirs == constants, f"constants differ from those of rank {rank}: {constants} and {theirs}"
    return [sent[group.rank()] for _, _, sent in everywhere]
