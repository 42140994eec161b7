"""The one place that imports `deep_ep`: four different libraries answer to that name, and each gets its own dispatcher.

| library | tells itself by | dispatcher |
|---|---|---|
| DeepEP 1 | `Buffer` only | DeepEpV1Dispatcher |
| DeepEP 2.0, 2.1 | `ElasticBuffer` (a legacy `Buffer` beside it) | DeepEpElasticDispatcher |
| DeepEP 2.5 | `EPBuffer` | DeepEpElasticDispatcher |
| UCCL's wrapper | `Buffer`, its types from `uccl.ep` | DeepEpV1Dispatcher, with UCCL's limits |

Not yet run on hardware.
"""

import os
from pathlib import Path
from types import ModuleType

from moe.config import MoeConfig
from moe.dispatch.base import ExpertGroup, TokenDispatcher
from moe.dispatch.buffer_limits import buffer_limits, is_uccl
from moe.dispatch.deepep_elastic import DeepEpElasticDispatcher
from moe.dispatch.deepep_low_latency import DeepEpLowLatencyDispatcher
from moe.dispatch.deepep_v1 import DeepEpV1Dispatcher
from moe.dispatch.uccl_ep import dispatcher_over

_IMPORT_ERRORS = (AssertionError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What `deep_ep/__init__.py` raises: its checks of CUDA and of the one libnccl are assertions or run into None."""


def build_deepep(moe: MoeConfig, group: ExpertGroup) -> TokenDispatcher:
    """The dispatcher for the library that is installed as `deep_ep`, between the ranks of `group`.

    Raises ValueError of one line when there is no such library, it cannot run here, or it lacks what `moe` asks for.
    """
    library = import_deep_ep("deepep", "deepep")
    if not any(hasattr(library, name) for name in ("EPBuffer", "ElasticBuffer", "Buffer")):
        raise ValueError(
            f"deep_ep of {library.__file__} has no EPBuffer, ElasticBuffer or Buffer: "
            "it is no DeepEP that is known here, pip install 'argo-moe-rl[deepep]'"
        )
    if hasattr(library, "EPBuffer"):
        _refuse_efa(library)
    if moe.low_latency or not (hasattr(library, "EPBuffer") or hasattr(library, "ElasticBuffer")):
        return _build_over_buffer(library, moe, group)
    return DeepEpElasticDispatcher(library, moe, group, requested="deepep")


def import_deep_ep(requested: str, extra: str) -> ModuleType:
    """The module that is installed as `deep_ep`, whichever of the four it is.

    Raises ValueError of one line, naming the `extra` to install when there is none, or what the import stumbled over.
    """
    try:
        import deep_ep
    except _IMPORT_ERRORS as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "deep_ep":
            raise ValueError(
                f"moe.dispatcher {requested} needs the module deep_ep: pip install 'argo-moe-rl[{extra}]'"
            ) from error
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise ValueError(
            f"moe.dispatcher {requested}: importing deep_ep failed ({type(error).__name__}: {reason}): "
            "it needs a GPU, nvcc (CUDA_HOME) and exactly the libnccl that torch has loaded"
        ) from error
    library: ModuleType = deep_ep
    return library


def has_efa(root: Path = Path("/")) -> bool:
    """Whether a network card of this machine is an AWS Elastic Fabric Adapter; `root` is where /sys is."""
    drivers = root.glob("sys/class/infiniband/*/device/driver")
    return any(driver.resolve().name == "efa" for driver in drivers)


def _build_over_buffer(library: ModuleType, moe: MoeConfig, group: ExpertGroup) -> TokenDispatcher:
    """The interface of DeepEP 1, which UCCL's wrapper has too; in DeepEP 2 only its low-latency kernels are used."""
    if not hasattr(library, "Buffer"):
        raise ValueError(
            f"moe.low_latency = true: deep_ep of {library.__file__} has no Buffer with low-latency kernels, "
            "set it to false: the one dispatch of this library serves few tokens too"
        )
    if is_uccl(library):
        return dispatcher_over(library, moe, group, requested="deepep")
    dispatcher = DeepEpLowLatencyDispatcher if moe.low_latency else DeepEpV1Dispatcher
    return dispatcher(library, moe, group, requested="deepep", limits=buffer_limits(library))


def _refuse_efa(library: ModuleType) -> None:
    """DeepEP 2.5 asserts GDAKI (csrc/kernels/comm/context.cpp), which EFA lacks, unless it is to stay within NVLink."""
    if has_efa() and os.environ.get("EP_DISABLE_GIN", "0") == "0":
        raise ValueError(
            f"deep_ep of {library.__file__} (EPBuffer) needs NCCL GDAKI, which EFA lacks: use moe.dispatcher "
            "uccl_ep or nccl_ep, or DeepEP 2.1; on one node EP_DISABLE_GIN=1 keeps it to NVLink"
        )
