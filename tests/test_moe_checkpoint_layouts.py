import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.checkpoint import load_trainer_state, required_files, save_trainer_state
from moe.checkpoint_index import STATE_FILE, read_state
from moe.placement import Piece
from tests.checkpoint_holder import Grid, Holder, zeros
from tests.ranks import RankFailed, run_ranks

torch.set_num_threads(1)
GRIDS = [
    Grid(1, 1, 1),
    Grid(2, 1, 1),
    Grid(2, 2, 1),
    Grid(2, 1, 2),
    Grid(3, 3, 3),
    Grid(4, 1, 1),
    Grid(4, 2, 1),
    Grid(4, 4, 1),
    Grid(4, 2, 2),
    Grid(4, 2, 4),
    Grid(4, 1, 4),
    Grid(4, 4, 4),
    Grid(6, 2, 6),
]
FOUR = [grid for grid in GRIDS if grid.ranks == 4]


def tensors(rows: int, columns: int, experts_per_rank: int) -> dict[str, Tensor]:
    """Values name their place, so that an element read from a wrong one is seen."""
    shapes = {
        "model.dense": (rows, columns),
        "model.experts.up": (12 * experts_per_rank, columns, 2),
        "model.experts.bias": (12 * experts_per_rank,),
        "optimizer.dense.exp_avg": (rows, columns),
        "optimizer.experts.up.exp_avg": (12 * experts_per_rank, columns, 2),
        "optimizer.dense.step": (),
    }
    count = iter(range(1, 100))
    made = {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + next(count) * 1e4
        for name, shape in shapes.items()
    }
    return made | {"batch.ids_step": torch.arange(rows, dtype=torch.int64)}


Case = tuple[Grid, dict[str, Tensor], Path]


def _save_all(rank: int, world_size: int, cases: list[Case]) -> list[list[str]]:
    names = []
    for grid, whole, folder in cases:
        holder = Holder(grid.pieces(rank, whole), {"global_step": 5})
        names.append([path.name for path in save_trainer_state(holder, folder / str(rank), rank, world_size)])
    dist.barrier()
    return names


def _merge(folder: Path) -> Path:
    """All ranks' folders in one."""
    merged = folder / "merged"
    merged.mkdir()
    for own in folder.iterdir():
        for path in [] if own == merged else own.iterdir():
            path.rename(merged / path.name)
    return merged


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cases=st.lists(
        st.tuples(st.sampled_from(FOUR), st.integers(1, 9), st.integers(1, 3), st.integers(1, 2)),
        min_size=4,
        max_size=8,
    ),
    targets=st.lists(st.sampled_from(GRIDS), min_size=3, max_size=6, unique=True),
)
def test_any_layout_reads_what_any_layout_wrote(cases: list[tuple[Grid, int, int, int]], targets: list[Grid]) -> None:
    with TemporaryDirectory() as temporary:
        written: list[Case] = []
        for number, (grid, *sizes) in enumerate(cases):
            written.append((grid, tensors(*sizes), Path(temporary) / str(number)))
        run_ranks(4, _save_all, written)
        for _, whole, folder in written:
            merged = _merge(folder)
            for target in targets:
                for rank in range(target.ranks):
                    _assert_reads(target, rank, whole, merged)


def _assert_reads(grid: Grid, rank: int, whole: dict[str, Tensor], folder: Path) -> None:
    own = Holder(grid.pieces(rank, zeros(whole)), {})
    load_trainer_state(own, folder)
    for name, piece in grid.pieces(rank, whole).items():
        assert torch.equal(own.pieces[name].tensor, piece.tensor), (grid, rank, name)
    assert own.counters == {"global_step": 5}


def test_every_element_is_stored_once_and_replicas_share_the_work(tmp_path: Path) -> None:
    whole = {f"model.dense{number}": torch.ones(8, 8) for number in range(40)}
    whole |= {f"model.experts{number}": torch.ones(12, 8) for number in range(40)}
    names = run_ranks(4, _save_all, [(Grid(4, 2, 1), whole, tmp_path)])[2][0]
    assert names == ["model-00002-of-00004.safetensors"]
    state = read_state(_merge(tmp_path))
    data_bytes = sum(tensor.numel() * 4 for tensor in whole.values())
    header_bytes = 4 * (8 + 160 * len(whole))
    sizes = [file.size_bytes for file in state.files.values()]
    assert len(sizes) == 4
    assert data_bytes < sum(sizes) < data_bytes + header_bytes
    assert max(sizes) < 2 * min(sizes)


def test_a_rank_needs_only_the_files_that_hold_its_elements(tmp_path: Path) -> None:
    whole = {"model.experts.up": torch.arange(48.0).view(12, 4), "optimizer.experts.up.exp_avg": torch.ones(12, 4)}
    run_ranks(4, _save_all, [(Grid(4, 4, 1), whole, tmp_path)])
    folder = _merge(tmp_path)
    pieces = Grid(2, 2, 1).pieces(1, zeros(whole))
    needed = required_files(Holder(pieces), folder)
    assert needed == [f"{kind}-0000{rank}-of-00004.safetensors" for kind in ("model", "optimizer") for rank in (2, 3)]
    for path in folder.iterdir():
        if path.name not in {*needed, STATE_FILE}:
            path.unlink()
    _assert_reads(Grid(2, 2, 1), 1, whole, folder)


def test_ranks_write_the_same_bytes_again(tmp_path: Path) -> None:
    case = (Grid(4, 2, 4), tensors(5, 3, 1))
    run_ranks(4, _save_all, [(*case, tmp_path / "a"), (*case, tmp_path / "b")])
    first, second = _merge(tmp_path / "a"), _merge(tmp_path / "b")
    names = sorted(path.name for path in first.iterdir())
    assert len(names) == 9
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_the_state_file_is_plain_json(tmp_path: Path) -> None:
    run_ranks(4, _save_all, [(Grid(4, 2, 2), tensors(2, 2, 1), tmp_path)])
    state: dict[str, Any] = json.loads((_merge(tmp_path) / STATE_FILE).read_text())
    assert (state["format"], state["progress"]) == (2, {"global_step": 5})
    assert state["tensors"]["model.dense"]["dtype"] == "float32"


def _all_write(rank: int, world_size: int, folder: Path) -> None:
    save_trainer_state(Holder({"model.a": Piece((2,), (0,), torch.ones(2))}), folder / str(rank), rank, world_size)


def test_a_tensor_that_two_ranks_claim_alone_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="the ranks hold 4 of 2 elements of model.a; check its replicas"):
        run_ranks(2, _all_write, tmp_path)
