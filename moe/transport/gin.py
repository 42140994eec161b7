"""Which GPU-initiated networking (GIN) an NCCL communicator uses, asked of the NCCL library itself.

Written against `ncclCommQueryProperties` of NVIDIA/nccl 2.30.7 (src/dev_runtime.cc, src/include/nccl_device/core.h);
not yet run on hardware.
"""

import ctypes
import os
from typing import Any, Final

import torch
import torch.distributed as dist

API_MAGIC: Final = 0xCAFEBEEF
FIRST_VERSION: Final = 22904
"""The GIN type is filled in for callers from after 2.29.3."""
LAYOUT_VERSION: Final = 23007
"""Of the structure below. The library fills in the fields of the version that the caller declares, not of the size:
declaring a newer one would let it write past the end."""

GIN_TYPES: Final = {0: "none", 2: "proxy", 3: "gdaki", 4: "gpi", 5: "efa_gda"}


class CommProperties(ctypes.Structure):
    """`ncclCommProperties` as of 2.30.7."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("rank", ctypes.c_int),
        ("n_ranks", ctypes.c_int),
        ("cuda_dev", ctypes.c_int),
        ("nvml_dev", ctypes.c_int),
        ("device_api_support", ctypes.c_bool),
        ("multimem_support", ctypes.c_bool),
        ("gin_type", ctypes.c_int),
        ("n_lsa_teams", ctypes.c_int),
        ("host_rma_support", ctypes.c_bool),
        ("railed_gin_type", ctypes.c_int),
    ]


def gin_of_group(process_group: dist.ProcessGroup | None) -> dict[str, str]:
    """`{"gin_type": ..., "railed_gin_type": ...}` of a group's communicator; empty without an NCCL communicator.

    The group must have run a collective: torch creates the communicator with the first one.
    """
    device = torch.device("cuda")
    if process_group is None or device not in process_group._device_types:
        return {}
    backend: Any = process_group._get_backend(device)
    pointer = backend._comm_ptr() if hasattr(backend, "_comm_ptr") else 0
    library = loaded_nccl() if pointer else None
    return {} if library is None else query_gin(library, pointer)


def loaded_nccl() -> ctypes.CDLL | None:
    """The libnccl that this process has loaded; None when torch has it built in. No other copy knows our pointers."""
    try:
        return ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def query_gin(library: Any, comm_pointer: int) -> dict[str, str]:
    """The GIN types of a communicator, by `library` = libnccl; empty when this NCCL is too old to know."""
    version = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(version)) or version.value < FIRST_VERSION:
        return {}
    properties = CommProperties(
        size=ctypes.sizeof(CommProperties), magic=API_MAGIC, version=min(version.value, LAYOUT_VERSION)
    )
    if library.ncclCommQueryProperties(ctypes.c_void_p(comm_pointer), ctypes.byref(properties)):
        return {}
    return {"gin_type": _name(properties.gin_type), "railed_gin_type": _name(properties.railed_gin_type)}


def _name(gin_type: int) -> str:
    return GIN_TYPES.get(gin_type, f"unknown ({gin_type})")
