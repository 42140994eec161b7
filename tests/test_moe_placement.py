import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from moe.placement import EXPERT_SLICE_ATTRIBUTE, ExpertSlice, Piece, expert_slices, piece_of
from tests.ranks import run_ranks

torch.set_num_threads(1)


def test_a_plain_tensor_is_one_piece_that_shares_its_memory() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    piece = piece_of(parameter, replica=(1, 4))
    assert (piece.full_shape, piece.offset, piece.replica, piece.replicas) == ((3, 2), (0, 0), 1, 4)
    assert not piece.tensor.requires_grad
    piece.tensor.fill_(7.0)
    assert parameter.tolist() == [[7.0, 7.0]] * 3
    assert piece_of(torch.tensor(2.0)).offset == ()


def test_a_slice_of_the_experts_lies_inside_all_experts() -> None:
    piece = piece_of(torch.zeros(2, 5), ExpertSlice(first=4, count=2, total=8))
    assert (piece.full_shape, piece.offset) == ((8, 5), (4, 0))


@pytest.mark.parametrize("shape", [(3, 5), ()])
def test_a_slice_must_be_the_tensors_own(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="dimension 0 must be its 2 experts"):
        piece_of(torch.zeros(shape), ExpertSlice(first=4, count=2, total=8))


def test_only_the_parameters_of_sliced_modules_are_named() -> None:
    model = nn.ModuleDict({"experts": nn.Linear(2, 3), "other": nn.Linear(2, 2)})
    assert expert_slices(model) == {}
    own = ExpertSlice(3, 3, 6)
    setattr(model["experts"], EXPERT_SLICE_ATTRIBUTE, own)
    assert expert_slices(model) == {"experts.weight": own, "experts.bias": own}


Found = tuple[tuple[int, ...], tuple[int, ...], list[list[float]]]


def _found(piece: Piece) -> Found:
    return piece.full_shape, piece.offset, piece.tensor.tolist()


def _sharded(rank: int, world_size: int) -> list[Found]:
    whole = torch.arange(10.0).view(5, 2)
    line, square = init_device_mesh("cpu", (world_size,)), init_device_mesh("cpu", (world_size // 2, 2))
    model = nn.Linear(2, 5, bias=False)
    with torch.no_grad():
        model.weight.copy_(whole)
    fully_shard(model, mesh=line)
    return [
        _found(piece_of(distribute_tensor(whole, line, [Shard(0)]))),
        _found(piece_of(distribute_tensor(whole, line, [Shard(0)]), ExpertSlice(5, 5, 10))),
        _found(piece_of(distribute_tensor(whole, square, [Replicate(), Shard(1)]))),
        _found(piece_of(model.weight)),
    ]


def test_shards_know_their_place() -> None:
    for rank, (line, experts, square, fsdp) in enumerate(run_ranks(4, _sharded)):
        rows = torch.arange(10.0).view(5, 2)[2 * rank : 2 * rank + 2]
        first = min(2 * rank, 5)
        assert line == ((5, 2), (first, 0), rows.tolist())
        assert experts == ((10, 2), (5 + first, 0), rows.tolist())
        assert square == ((5, 2), (0, rank % 2), torch.arange(10.0).view(5, 2)[:, [rank % 2]].tolist())
        assert fsdp == line
