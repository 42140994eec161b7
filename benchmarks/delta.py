"""Delta publications: bytes, seconds and memory, for the tiny model and a large synthetic set of tensors.

    python -m benchmarks.delta [--size-mib 2048] [--changed 0.03] [--repeats 3] [--output FILE]

Publication 1 is stored as what differs from publication 0, in a directory. Each publish and fetch is a process of its
own, whose peak memory is measured. publish = hash the folder, find the changes, store them; apply = fetch version 1
with version 0 in the cache (copy, overwrite, verify); late = fetch it with an empty cache; full = stored whole.
The rows `update` are the default model before and after one AdamW step in float32, published in the dtype: what a
learning rate changes. Prints JSON.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe.config import ModelConfig
from moe.model import build_model
from moe.publication import save_publication, weights_sha256
from moe.tokenizer import build_char_tokenizer
from steps.adapters.publications import upload_folder
from steps.adapters.publications_cache import fetch_folder
from steps.adapters.publications_delta import Parent, upload_delta
from steps.adapters.publications_manifest import read_manifest
from steps.adapters.store import open_store

Turn = tuple[float, float]
"""(seconds, peak MiB that the process added)"""
TENSOR_BYTES = 64 << 20
TENSORS_PER_FILE = 8
VOCAB_SIZE = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=int, default=2048, help="of the synthetic set")
    parser.add_argument("--changed", type=float, default=0.03, help="part of the elements that changes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for name, write in (
            ("tiny model", partial(write_model_pair, change=partial(change_some, fraction=arguments.changed))),
            ("synthetic", partial(write_synthetic_pair, size_mib=arguments.size_mib, fraction=arguments.changed)),
            ("update, learning rate 1e-6", partial(write_model_pair, change=partial(adamw_step, learning_rate=1e-6))),
            ("update, learning rate 1e-3", partial(write_model_pair, change=partial(adamw_step, learning_rate=1e-3))),
        ):
            with TemporaryDirectory(prefix="moerl-bench-") as folder:
                write(Path(folder), dtype)
                row = measure(Path(folder), arguments.repeats)
                rows.append({"set": name, "dtype": str(dtype).removeprefix("torch."), **row})
    report = {
        "benchmark": "delta",
        "changed": arguments.changed,
        "repeats": arguments.repeats,
        "rows": rows,
        "machine": {"cpus": os.cpu_count(), "architecture": platform.machine(), "system": platform.platform()},
        "versions": {name: version(name) for name in ("torch", "zstandard", "numpy")}
        | {"python": sys.version.split()[0]},
    }
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


def measure(folder: Path, repeats: int) -> dict[str, object]:
    """Of `folder`/0 and `folder`/1; a reader's result must have the weights of `folder`/1."""
    uri, old, new = str(folder / "store"), folder / "0", folder / "1"
    upload_folder(open_store(uri), old, "0", {})
    turns: dict[str, list[Turn]] = {"publish": [], "apply": [], "late": [], "full_publish": [], "full_fetch": []}
    expected = weights_sha256(new)
    for _ in range(repeats):
        turns["publish"] += [alone(lambda: upload_delta(open_store(uri), new, "1", {}, Parent("0", old)))]
        turns["full_publish"] += [alone(lambda: upload_folder(open_store(uri), new, "full", {}))]
        turns["full_fetch"] += [alone(lambda: fetch_folder(open_store(uri), "full", folder / "cache-full"))]
        turns["late"] += [alone(lambda: fetch_folder(open_store(uri), "1", folder / "cache-late"))]
        alone(lambda: fetch_folder(open_store(uri), "0", folder / "cache"))
        turns["apply"] += [alone(lambda: fetch_folder(open_store(uri), "1", folder / "cache"))]
        manifest = read_manifest(open_store(uri), "1")
        if weights_sha256(folder / "cache" / manifest.sha256) != expected:
            raise RuntimeError("the reconstructed weights differ")
        for cache in folder.glob("cache*"):
            shutil.rmtree(cache)
        for prefix in ("1", "full"):
            shutil.rmtree(folder / "store" / prefix)
    return {
        "full_mib": round(manifest.size_bytes / 2**20, 2),
        "stored_mib": round(manifest.stored_bytes / 2**20, 2),
        "ratio": round(manifest.stored_bytes / manifest.size_bytes, 4),
        "is_delta": manifest.delta is not None,
        "median_s": {name: round(statistics.median(turn[0] for turn in own), 3) for name, own in turns.items()},
        "peak_mib": {name: round(max(turn[1] for turn in own)) for name, own in turns.items()},
    }


def alone(action: Callable[[], object]) -> Turn:
    """Run it in a process of its own."""
    receiving, sending = get_context("fork").Pipe(duplex=False)

    def main() -> None:
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started_s = time.perf_counter()
        action()
        seconds = time.perf_counter() - started_s
        sending.send((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024))

    process = get_context("fork").Process(target=main)
    process.start()
    turn: Turn = receiving.recv()
    process.join()
    return turn


def write_model_pair(folder: Path, dtype: torch.dtype, change: Callable[[torch.nn.Module], None]) -> None:
    """The default model, and the same after `change`, published in `dtype`; it changes as it would be published."""
    model = build_model(ModelConfig(), vocab_size=VOCAB_SIZE, seed=0)
    tokenizer = build_char_tokenizer("0123456789>")
    torch.manual_seed(1)
    for number in ("0", "1"):
        save_publication(model, tokenizer, folder / number, str(dtype).removeprefix("torch."))
        change(model)


@torch.no_grad()
def change_some(model: torch.nn.Module, fraction: float) -> None:
    for parameter in model.parameters():
        parameter.copy_(changed(parameter, fraction))


def adamw_step(model: torch.nn.Module, learning_rate: float) -> None:
    """With gradients of noise: the first step of AdamW moves every weight by the learning rate."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=learning_rate).step()


def write_synthetic_pair(folder: Path, dtype: torch.dtype, size_mib: int, fraction: float) -> None:
    count = (size_mib << 20) // TENSOR_BYTES
    torch.manual_seed(0)
    for number in ("0", "1"):
        (folder / number).mkdir()
    for file in range(0, count, TENSORS_PER_FILE):
        names = [f"layers.{index}" for index in range(file, min(file + TENSORS_PER_FILE, count))]
        old = {name: torch.randn(TENSOR_BYTES // dtype.itemsize).mul_(0.02).to(dtype) for name in names}
        save_file(old, folder / "0" / f"model-{file:05d}.safetensors")
        save_file(
            {name: changed(old[name], fraction) for name in names}, folder / "1" / f"model-{file:05d}.safetensors"
        )


def changed(tensor: Tensor, fraction: float) -> Tensor:
    """With new values of the same scale in a random part of the places."""
    mask = torch.rand(tensor.shape) < fraction
    return torch.where(mask, torch.randn(tensor.shape).mul_(0.02).to(tensor.dtype), tensor)


if __name__ == "__main__":
    main()
