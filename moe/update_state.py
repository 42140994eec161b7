"""The pieces of a model's weights that this rank holds, and whether a stored state is of that model."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from moe.gradient_sync import expert_parameters
from moe.parallel import ParallelLayout
from moe.placement import Piece, expert_slices, piece_of


def model_pieces(model: nn.Module, layout: ParallelLayout) -> dict[str, Piece]:
    """Weights and persistent buffers by name, tied weights once; live tensors."""
    slices, experts = expert_slices(model), expert_parameters(model)
    pieces: dict[str, Piece] = {}
    seen: set[int] = set()
    # keep_vars: the parameters themselves, which tied names share.
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if isinstance(tensor, nn.Parameter):
            pieces[name] = piece_of(tensor, slices.get(name), layout.replica(tensor in experts))
        else:
            pieces[name] = replicated_piece(tensor, layout)
    return pieces


def replicated_piece(tensor: Tensor, layout: ParallelLayout) -> Piece:
    """A tensor that every rank holds whole."""
    return piece_of(tensor, None, (layout.rank, layout.ranks))


def check_names(own: Mapping[str, Piece], stored: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless the `model.` tensors of `stored` (name to whole shape) are those of `own`."""
    given = {name.removeprefix("model."): shape for name, shape in stored.items() if name.startswith("model.")}
    if different := sorted(own.keys() ^ given.keys()):
        raise ValueError(f"trainer state: tensor model.{different[0]} is missing or unknown; it is of another model")
    for name, piece in own.items():
        if piece.full_shape != tuple(given[name]):
            raise ValueError(f"trainer state: tensor model.{name} has another shape; it is of another model")
