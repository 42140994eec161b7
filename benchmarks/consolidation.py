"""A sharded trainer state to a full publication, against the whole model in one process.

    python -m benchmarks.consolidation [--layers 12] [--experts 32] [--ranks 4] [--dtype bfloat16] [--repeats 5]

Ours (`moe.consolidate`) streams layer by layer. The other way loads the state into a whole model, casts it and calls
`save_pretrained` of transformers. Both verify the checksums of what they read. Every turn is a process of its own, and
the two take turns; the bare copy of the weight files is the limit of the disk. Prints JSON: median seconds, output MB/s
(10^6 bytes), and the peak of anonymous memory that the turn added, in MiB, beside the sizes of the model and a layer.
"""

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor

from moe.checkpoint import MODEL_PREFIX, load_trainer_state, model_files, save_trainer_state
from moe.checkpoint_weights import ModelWeights
from moe.config import ModelConfig
from moe.consolidate import consolidate
from moe.model import build_model, empty_model, materialize
from moe.publication import save_publication, weights_sha256
from moe.tokenizer import build_char_tokenizer
from tests.checkpoint_holder import Grid, Holder
from tests.ranks import run_ranks

VOCAB_SIZE = 64
SAMPLING_INTERVAL_S = 0.002


class Turn(NamedTuple):
    seconds: float
    peak_mib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=4, help="expert-parallel ranks that wrote the state")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = ModelConfig(
        num_layers=arguments.layers,
        num_experts=arguments.experts,
        hidden_size=arguments.hidden,
        moe_intermediate_size=arguments.hidden // 2,
    )
    with TemporaryDirectory(prefix="moerl-bench-") as temporary:
        folder = Path(temporary)
        prepare(folder, sizes, arguments.ranks)
        turns = measure(folder, arguments.dtype, arguments.repeats)
        report = build_report(folder, arguments, turns)
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


def prepare(folder: Path, sizes: ModelConfig, ranks: int) -> None:
    """A trainer state of random weights, as `ranks` expert-parallel ranks write it, and the parent publication."""
    model = build_model(sizes, VOCAB_SIZE, seed=0)
    tensors = {MODEL_PREFIX + name: tensor for name, tensor in model.state_dict().items()}
    run_ranks(ranks, save, tensors, folder / "state")
    save_publication(model, build_char_tokenizer("ab"), folder / "parent")


def save(rank: int, ranks: int, tensors: dict[str, Tensor], folder: Path) -> None:
    save_trainer_state(Holder(Grid(ranks=ranks, ep=ranks).pieces(rank, tensors)), folder, rank, ranks)


def measure(folder: Path, dtype: str, repeats: int) -> dict[str, list[Turn]]:
    turns: dict[str, list[Turn]] = {"streamed": [], "whole": [], "copy": []}
    sums: set[str] = set()
    for _ in range(repeats):
        for name, way in (("streamed", streamed), ("whole", whole), ("copy", copy)):
            with get_context("spawn").Pool(1) as pool:  # a new process: nothing freed before is used again
                turns[name].append(pool.apply(watched, (way, folder, folder / name, dtype)))
            if name != "copy":
                sums.add(weights_sha256(folder / name))
            shutil.rmtree(folder / name)
    if len(sums) != 1:
        raise AssertionError("the two ways gave different weights")
    return turns


def streamed(folder: Path, target: Path, dtype: str) -> None:
    consolidate(folder / "state", folder / "parent", target, dtype)


def whole(folder: Path, target: Path, dtype: str) -> None:
    model = empty_model(folder / "parent")
    materialize(model, torch.device("cpu"))
    load_trainer_state(ModelWeights(model), folder / "state")
    model.to(getattr(torch, dtype)).save_pretrained(target)


def copy(folder: Path, target: Path, dtype: str) -> None:
    target.mkdir()
    for name in model_files(folder / "state"):
        shutil.copyfile(folder / "state" / name, target / name)
        with (target / name).open("rb+") as file:
            os.fsync(file.fileno())


def watched(way: Callable[[Path, Path, str], None], folder: Path, target: Path, dtype: str) -> Turn:
    """Time and peak memory of one turn, in a process that has done nothing else."""
    torch.set_num_threads(1)
    before_mib, ended = anonymous_mib(), threading.Event()
    peaks_mib = [before_mib]

    def watch() -> None:
        while not ended.wait(SAMPLING_INTERVAL_S):
            peaks_mib.append(anonymous_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started_s = time.perf_counter()
    way(folder, target, dtype)
    seconds = time.perf_counter() - started_s
    ended.set()
    watcher.join()
    return Turn(seconds, max(peaks_mib) - before_mib)


def anonymous_mib() -> float:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError("/proc/self/status has no RssAnon: this benchmark needs Linux")
    return int(found[1]) / 1024


def build_report(folder: Path, arguments: argparse.Namespace, turns: dict[str, list[Turn]]) -> dict[str, object]:
    parameters = sum((folder / "state" / name).stat().st_size for name in model_files(folder / "state")) / 4
    stored_mib = parameters * getattr(torch, arguments.dtype).itemsize / 2**20
    seconds = {name: statistics.median(turn.seconds for turn in own) for name, own in turns.items()}
    return {
        "benchmark": "consolidation",
        "layers": arguments.layers,
        "experts": arguments.experts,
        "hidden": arguments.hidden,
        "ranks": arguments.ranks,
        "dtype": arguments.dtype,
        "repeats": arguments.repeats,
        "state_mib": round(parameters * 4 / 2**20, 1),
        "publication_mib": round(stored_mib, 1),
        "layer_mib": round(stored_mib / arguments.layers, 1),
        "median_seconds": {name: round(value, 3) for name, value in seconds.items()},
        "median_output_mb_per_s": {n: round(stored_mib * 1.048576 / seconds[n], 1) for n in ("streamed", "whole")},
        "peak_mib": {name: round(max(turn.peak_mib for turn in own), 1) for name, own in turns.items()},
        "seconds": {name: [round(turn.seconds, 3) for turn in own] for name, own in turns.items()},
        "machine": {"cpus": os.cpu_count(), "architecture": platform.machine(), "system": platform.platform()},
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "safetensors": version("safetensors"),
        },
    }


if __name__ == "__main__":
    main()
