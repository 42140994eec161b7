"""A device other than the CPU, on machines without one: tensors that lie in the CPU's memory and claim not to.

It computes what the CPU computes, and refuses what CUDA refuses: operands on two devices, an index that lies on the
device into a tensor that does not, collectives of what NCCL has no type for, grouped products of unaligned rows; also
grouped products of no rows, which are not known to work there. It knows no order of streams and no memory of its own.

torch takes it for a device of its own (PrivateUse1), so that autograd runs its backward passes in another thread, as
for CUDA. Use it in a process that has run no backward pass before, and is not needed after: autograd counts the devices
once, the device can't be unregistered, and an error inside a backward pass aborts the process.

Written from torch 2.13: ATen/native/GroupedMMUtils.h, and what its CUDA build is documented to refuse.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "emulated"
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param"
"""It frees the memory of gathered weights by their storage, which has none here."""
NCCL_DTYPES = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
_COPIES = {torch.ops.aten.copy_, torch.ops.aten._to_copy, torch.ops.aten.to}
_INDEXING = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}
"""They bring indices from the CPU to the device themselves (which waits), not the reverse."""


class _Queue:
    """A stream or an event: all work is done when it is asked for."""

    def __init__(self, priority: int = 0) -> None: ...
    def record(self, stream: object = None) -> "_Queue":
        return self

    record_event = record

    def wait_event(self, other: object) -> None: ...

    wait_stream = wait_event


class _Module(_DummyBackendModule):
    """What torch, and FSDP2 in particular, look for in `torch.emulated`."""

    Stream = Event = _Queue

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def current_stream(self) -> _Queue:
        return _Queue()

    def stream(self, stream: _Queue) -> AbstractContextManager[None]:
        return nullcontext()


class DeviceTensor(Tensor):
    """On the device; `values` are where it says they are not."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "DeviceTensor":
        made: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(NAME, 0),
            dispatch_sizes_strides_policy="sizes",  # squeeze_ changes them
        )
        made.values = values
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"DeviceTensor({self.values})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Device(TorchDispatchMode):
    """Makes new tensors on the device; those that exist find `_run` themselves."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with its local tensors
        return _run(func, args, kwargs or {})


@contextmanager
def accelerator() -> Iterator[torch.device]:
    """The device, which inside the block can be named like any other."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    # torch.tensor then asks the mode to move what it has read.
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Device(), patch(f"{_FSDP}.alloc_storage"), patch(f"{_FSDP}.free_storage"):
            yield torch.device(NAME, 0)
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def _run(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    given: list[Tensor] = []
    tree_map(lambda value: given.append(value) if isinstance(value, Tensor) else None, (args, kwargs))
    _check(func, args, given)
    wrappers = {id(tensor.values): tensor for tensor in given if isinstance(tensor, DeviceTensor)}
    places: list[torch.device] = []
    tree_map(lambda value: places.append(value) if isinstance(value, torch.device) else None, (args, kwargs))
    is_on_device = places[0].type == NAME if places else bool(wrappers)
    result = func(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or not is_on_device:
            return value
        return wrappers[id(value)] if id(value) in wrappers else DeviceTensor(value)

    return tree_map(wrap, result)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == NAME else value
    return value.values if isinstance(value, DeviceTensor) else value


def _check(func: Any, args: Any, given: list[Tensor]) -> None:
    on_device = [tensor for tensor in given if isinstance(tensor, DeviceTensor)]
    if not on_device:
        return
    if func.namespace == "c10d":
        for tensor in on_device:
            if tensor.dtype not in NCCL_DTYPES or not tensor.values.is_contiguous():
                _refuse(f"{func}: NCCL takes no {tensor.dtype} of strides {tensor.values.stride()}")
    if func is torch.ops.aten._grouped_mm.default:
        _check_grouped_mm(*args[:2])
    elsewhere = [tensor for tensor in given if not isinstance(tensor, DeviceTensor) and tensor.dim() > 0]
    if func.overloadpacket in _COPIES or not elsewhere or (func in _INDEXING and isinstance(args[0], DeviceTensor)):
        return
    _refuse(f"{func}: expected all tensors to be on the same device, found {NAME} and cpu")


def _check_grouped_mm(*operands: Tensor) -> None:
    for operand in operands:
        if not operand.numel():
            _refuse(f"grouped_mm of an empty operand, {tuple(operand.shape)}: not known to work on CUDA")
        if max(operand.stride()[-2:]) * operand.element_size() % 16:
            _refuse(f"grouped_mm: strides {operand.stride()} should be multiples of 16 bytes")


def _refuse(message: str) -> NoReturn:
    print(message, file=sys.stderr, flush=True)  # see above about backward passes
    raise RuntimeError(message)
