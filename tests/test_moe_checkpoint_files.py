import hashlib
import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from moe.checkpoint_files import TensorSpec, alignment_order, tensor_bytes, write_json, write_safetensors

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool]


@settings(max_examples=40, deadline=None)
@given(
    tensors=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    ),
    metadata=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2),
)
def test_safetensors_reads_what_was_written(
    tensors: dict[str, tuple[torch.dtype, list[int]]], metadata: dict[str, str]
) -> None:
    wanted = {
        name: (torch.arange(math.prod(shape)) + 1).to(dtype).view(shape) for name, (dtype, shape) in tensors.items()
    }
    specs = sorted((TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in wanted.items()), key=alignment_order)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        written = write_safetensors(path, specs, (wanted[spec.name] for spec in specs), metadata)
        data = path.read_bytes()
        assert (written.sha256, written.size_bytes) == (hashlib.sha256(data).hexdigest(), len(data))
        assert [entry.name for entry in Path(folder).iterdir()] == [path.name]
        found = load_file(path)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found[name], tensor)
        if metadata:
            with safe_open(path, "pt") as opened:
                assert opened.metadata() == metadata


def test_a_view_is_written_row_major(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    view = whole[:, 1:3].t()
    spec = TensorSpec("x", view.dtype, tuple(view.shape))
    write_safetensors(tmp_path / "x.safetensors", [spec], [view], {})
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], view)


@pytest.mark.parametrize("tensor", [torch.zeros(2), torch.zeros(3, dtype=torch.int32)])
def test_a_tensor_other_than_announced_leaves_no_file(tensor: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor x is .* as announced"):
        write_safetensors(tmp_path / "x.safetensors", [TensorSpec("x", torch.float32, (3,))], [tensor], {})
    assert not list(tmp_path.iterdir())


def test_the_bytes_of_a_contiguous_tensor_are_not_copied() -> None:
    tensor = torch.zeros(4)
    data = tensor_bytes(tensor)
    tensor.fill_(1.0)
    assert bytes(data[:4]) == b"\x00\x00\x80\x3f"


def test_json_is_written_whole_and_canonically(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1, "a": [1.5, None]})
    write_json(tmp_path / "b.json", {"a": [1.5, None], "b": 1})
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1.5, None], "b": 1}
    assert len(list(tmp_path.iterdir())) == 2
