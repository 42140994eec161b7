import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe import delta as deltas
from moe.delta import apply_delta, comparable, write_delta

torch.set_num_threads(1)
SHAPE = (70, 130)
MIXED = (torch.float64, torch.float16, torch.uint8, torch.bool)


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).mul(0.02).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


def pair(folder: Path, fraction: float, *dtypes: torch.dtype) -> tuple[Path, Path]:
    """Two files in which about this part of the elements differ."""
    old = {f"{dtype}": noise(SHAPE, dtype, 1) for dtype in dtypes}
    generator = torch.Generator().manual_seed(3)
    new = {
        name: torch.where(
            torch.rand(tensor.shape, generator=generator) < fraction, noise((70, 130), tensor.dtype, 2), tensor
        )
        for name, tensor in old.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(old, folder / "old.safetensors", metadata={"format": "pt"})
    save_file(new, folder / "new.safetensors", metadata={"format": "pt"})
    return folder / "old.safetensors", folder / "new.safetensors"


def applied(delta: Path, old: Path) -> Path:
    target = old.with_name("target")
    shutil.copyfile(old, target)
    apply_delta(delta, target)
    return target


@pytest.mark.parametrize("block_bytes", [512, 1 << 20])
@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.03, 0.5, 1.0])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,), (torch.bfloat16,), (torch.float64, torch.float16, torch.uint8, torch.bool)]
)
def test_an_applied_delta_gives_the_new_file_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtypes: tuple[torch.dtype, ...], fraction: float, block_bytes: int
) -> None:
    monkeypatch.setattr(deltas, "BLOCK_BYTES", block_bytes)
    old, new = pair(tmp_path, fraction, *dtypes)
    stats = write_delta(old, new, tmp_path / "delta")
    assert applied(tmp_path / "delta", old).read_bytes() == new.read_bytes()
    before, after = load_file(old), load_file(new)
    assert stats.elements == sum(tensor.numel() for tensor in before.values())
    assert stats.changed_elements == sum(int((before[name] != after[name]).sum()) for name in before)
    assert stats.size_bytes == (tmp_path / "delta").stat().st_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_percent_of_the_elements_take_less_than_five_percent_of_the_bytes(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    old = {"w": noise((1 << 20,), dtype, 1)}
    changed = torch.rand(1 << 20, generator=torch.Generator().manual_seed(2)) < 0.03
    new = {"w": torch.where(changed, noise((1 << 20,), dtype, 3), old["w"])}
    save_file(old, tmp_path / "old")
    save_file(new, tmp_path / "new")
    stats = write_delta(tmp_path / "old", tmp_path / "new", tmp_path / "delta")
    assert stats.size_bytes < 0.05 * (tmp_path / "new").stat().st_size


@pytest.mark.parametrize("fraction", [0.03, 1.0])
def test_a_delta_can_be_applied_again_also_after_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fraction: float
) -> None:
    monkeypatch.setattr(deltas, "BLOCK_BYTES", 4096)
    old, new = pair(tmp_path, fraction, torch.float32)
    write_delta(old, new, tmp_path / "delta")
    before, after = old.read_bytes(), new.read_bytes()
    half = len(after) // 2
    for state in (after, after[:half] + before[half:], before[:half] + after[half:]):
        old.write_bytes(state)
        assert applied(tmp_path / "delta", old).read_bytes() == after


def test_equal_files_give_an_empty_delta(tmp_path: Path) -> None:
    old, _ = pair(tmp_path, 0.0, torch.float32)
    stats = write_delta(old, old, tmp_path / "delta")
    assert stats.changed_elements == 0 and stats.size_bytes < 100


@pytest.mark.parametrize(
    "other", [{"w": torch.zeros(5)}, {"v": torch.zeros(4)}, {"w": torch.zeros(2, 2)}, {"w": torch.zeros(4).int()}, None]
)
def test_files_of_other_tensors_have_no_delta(tmp_path: Path, other: dict[str, Tensor] | None) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "old")
    (tmp_path / "new").write_bytes(b"\xff" * 100)
    if other:
        save_file(other, tmp_path / "new")
    assert not comparable(tmp_path / "old", tmp_path / "new")
    with pytest.raises(ValueError, match="other tensors than"):
        write_delta(tmp_path / "old", tmp_path / "new", tmp_path / "delta")


def test_a_delta_for_another_file_or_cut_off_is_refused(tmp_path: Path) -> None:
    old, new = pair(tmp_path, 0.03, torch.float32)
    delta = tmp_path / "delta"
    write_delta(old, new, delta)
    (tmp_path / "shorter").write_bytes(old.read_bytes()[:-4])
    with pytest.raises(ValueError, match="delta: it is none for a file of"):
        apply_delta(delta, tmp_path / "shorter")
    data = delta.read_bytes()
    for length in (0, 7, 15, 17, 40, len(data) // 2, len(data) - 1):
        delta.write_bytes(data[:length])
        with pytest.raises(ValueError, match="the file is corrupt"):
            applied(delta, old)


@settings(max_examples=150, deadline=None)
@given(places=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_delta_fails_with_one_line_or_writes_within_the_file(
    places: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    old, new = pair(folder, 0.03, torch.float32)
    delta = folder / "delta"
    write_delta(old, new, delta)
    data = bytearray(delta.read_bytes())
    for place, value in places:
        data[place] = value
    delta.write_bytes(data)
    size_bytes = old.stat().st_size
    try:
        target = applied(delta, old)
    except ValueError as error:
        assert "\n" not in str(error) and str(delta) in str(error)
    else:
        assert target.stat().st_size == size_bytes
