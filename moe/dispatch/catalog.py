"""Every dispatcher that a run can name. A backend is imported when it is chosen: its library need not be installed."""

import torch

from moe.config import MoeConfig
from moe.dispatch.all_to_all import AllToAllDispatcher
from moe.dispatch.base import ExpertGroup, TokenDispatcher
from moe.dispatch.capacity import CapacityLimit
from moe.dispatch.deduplicated import NodeDeduplicatedDispatcher
from moe.dispatch.local import LocalDispatcher


def build_dispatcher(moe: MoeConfig, group: ExpertGroup) -> TokenDispatcher:
    """The dispatcher that `moe.dispatcher` names, between the ranks of `group`.

    All ranks of the group call it together. Raises ValueError of one line for a name that does not exist, a backend
    whose library is missing, or a group that the backend cannot serve.
    """
    dispatcher = _build_backend(moe, group)
    if moe.capacity_factor:
        return CapacityLimit(dispatcher, moe.capacity_factor, group.monitor)
    return dispatcher


def _build_backend(moe: MoeConfig, group: ExpertGroup) -> TokenDispatcher:
    if moe.dispatcher == "local":
        return LocalDispatcher()
    if moe.dispatcher == "all_to_all":
        return _build_all_to_all(moe, group)
    if moe.dispatcher == "deepep":
        from moe.dispatch.deepep import build_deepep

        return build_deepep(moe, group)
    if moe.dispatcher == "uccl_ep":
        from moe.dispatch.uccl_ep import build_uccl

        return build_uccl(moe, group)
    if moe.dispatcher == "nccl_ep":
        from moe.dispatch.nccl_ep import build_nccl_ep

        return build_nccl_ep(moe, group)
    raise ValueError(
        f"moe.dispatcher {moe.dispatcher!r} does not exist: use one of local, all_to_all, deepep, uccl_ep, nccl_ep"
    )


def _build_all_to_all(moe: MoeConfig, group: ExpertGroup) -> TokenDispatcher:
    wire_dtype = torch.bfloat16 if moe.exchange_dtype == "bfloat16" else None
    if moe.deduplicate == "node" and group.num_nodes > 1:
        return NodeDeduplicatedDispatcher(group, wire_dtype=wire_dtype, timeout_s=moe.exchange_timeout_s)
    return AllToAllDispatcher(group, merge=moe.deduplicate != "none", wire_dtype=wire_dtype)
