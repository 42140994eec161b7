"""`moe.dispatcher = "uccl_ep"`: UCCL's EP library, CPU proxies that write over any RDMA, EFA among them.

The wheel `uccl` brings `uccl.ep`, whose calls take raw pointers. Its wrapper (ep/deep_ep_wrapper in UCCL's sources)
gives them DeepEP's `Buffer` and is imported as `deep_ep`. Read from UCCL da914a20, ep/bench/buffer.py and utils.py.

Not yet run on hardware: tested with a double of the wrapper.
"""

import os
from importlib import import_module
from typing import Any

import torch

from moe.config import MoeConfig
from moe.dispatch.base import ExpertGroup, TokenDispatcher
from moe.dispatch.buffer_limits import UCCL, is_uccl
from moe.dispatch.deepep_low_latency import DeepEpLowLatencyDispatcher
from moe.dispatch.deepep_v1 import DeepEpV1Dispatcher

_LOCAL_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


def build_uccl(moe: MoeConfig, group: ExpertGroup) -> TokenDispatcher:
    """The dispatcher over UCCL's `Buffer`, for training or, with `moe.low_latency`, for few tokens.

    Raises ValueError, one line, when the library, its wrapper or its environment is not there.
    """
    return dispatcher_over(_import_wrapper(), moe, group, requested="uccl_ep")


def dispatcher_over(library: Any, moe: MoeConfig, group: ExpertGroup, *, requested: str) -> TokenDispatcher:
    """As `build_uccl`, over the module that was imported as `deep_ep`."""
    check_environment(group)
    kind = DeepEpLowLatencyDispatcher if moe.low_latency else DeepEpV1Dispatcher
    return kind(library, moe, group, requested=requested, limits=UCCL)


def check_environment(group: ExpertGroup) -> None:
    """Raise ValueError when the library would misplace this rank: it reads its GPU and its node from the environment.

    A group within a node has fewer ranks than LOCAL_WORLD_SIZE or just as many; a group of several nodes a multiple.
    """
    missing = [name for name in _LOCAL_VARIABLES if not os.environ.get(name, "").isdigit()]
    if missing:
        raise ValueError(f"UCCL-EP reads {' and '.join(missing)} from the environment: start the ranks with torchrun")
    local_rank, local_size = (int(os.environ[name]) for name in _LOCAL_VARIABLES)
    if torch.cuda.is_available() and local_size > torch.cuda.device_count():
        raise ValueError(
            f"UCCL-EP refuses two ranks on one GPU: {local_size} ranks of this node share {torch.cuda.device_count()} "
            "GPUs; start one rank a GPU"
        )
    if local_rank >= local_size:
        raise ValueError(
            f"LOCAL_RANK = {local_rank} must be below LOCAL_WORLD_SIZE = {local_size}: correct the launcher"
        )
    if group.size >= local_size and group.size % local_size:
        raise ValueError(
            f"UCCL-EP needs a group of fewer than LOCAL_WORLD_SIZE = {local_size} ranks or a multiple, not "
            f"{group.size}: set moe.expert_parallel_size"
        )


def _import_wrapper() -> Any:
    try:
        import_module("uccl.ep")
    except ImportError as error:
        raise ValueError(
            f"moe.dispatcher uccl_ep needs UCCL-EP ({error}): pip install 'argo-moe-rl[uccl]' on Python 3.12 or later, "
            "and its deep_ep wrapper from source"
        ) from error
    from moe.dispatch.deepep import import_deep_ep  # not above: it builds on this module

    library = import_deep_ep("uccl_ep", "uccl")
    if not is_uccl(library):
        raise ValueError(
            f"moe.dispatcher uccl_ep found another deep_ep ({getattr(library, '__file__', 'unknown file')}): install "
            "the wrapper of UCCL-EP (ep/deep_ep_wrapper in its sources) in its place, or set moe.dispatcher to deepep"
        )
    return library
