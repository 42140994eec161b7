"""Where a rank's part of a tensor lies in the whole tensor: what a sharded checkpoint is made of."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

EXPERT_SLICE_ATTRIBUTE = "moerl_expert_slice"
"""On a fused-experts module: the ExpertSlice that this rank holds; absent when it holds all experts."""


@dataclass(frozen=True)
class ExpertSlice:
    """Experts `first` to `first + count - 1` of `total`: the part of a fused parameter's dimension 0 held here."""

    first: int
    count: int
    total: int


@dataclass(frozen=True)
class Piece:
    """A box of a tensor of `full_shape`: `tensor`, plain and on this rank, begins at `offset`.

    `replicas` ranks hold the same box, this one as number `replica`. A tensor that no rank splits is one piece with
    offset zero. The box may be empty.
    """

    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor
    replica: int = 0
    replicas: int = 1


def piece_of(tensor: Tensor, expert_slice: ExpertSlice | None = None, replica: tuple[int, int] = (0, 1)) -> Piece:
    """The piece of a whole tensor that `tensor` is here; the piece's tensor shares its memory.

    `tensor` may be a DTensor sharded by FSDP2. `expert_slice` says that the (D)tensor itself holds only these experts,
    on dimension 0. `replica` is (number of this rank, count) among the ranks that hold the same elements. Raises
    ValueError when `expert_slice` does not fit the tensor.
    """
    shape, offset, local = list(tensor.shape), [0] * tensor.dim(), tensor
    if isinstance(tensor, DTensor):
        _, sharded_at = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        offset, local = list(sharded_at), tensor.to_local()
    if expert_slice is not None:
        if not shape or shape[0] != expert_slice.count:
            raise ValueError(f"tensor of shape {tuple(shape)}: dimension 0 must be its {expert_slice.count} experts")
        shape[0] = expert_slice.total
        offset[0] += expert_slice.first
    return Piece(tuple(shape), tuple(offset), local.detach(), *replica)


def expert_slices(model: nn.Module) -> dict[str, ExpertSlice]:
    """The slice of each parameter of `model` that holds a part of the experts; empty when every rank holds all."""
    slices: dict[str, ExpertSlice] = {}
    for path, module in model.named_modules():
        expert_slice: Any = getattr(module, EXPERT_SLICE_ATTRIBUTE, None)
        if expert_slice is not None:
            slices |= {f"{path}.{name}": expert_slice for name, _ in module.named_parameters(recurse=False)}
    return slices
