"""Publish and fetch a publication, against raw boto3 `upload_file` and `download_file` on the same S3 server.

    python -m benchmarks.publication [--server moto|radosgw] [--size-mib 256] [--repeats 5] [--output FILE]

Ours hashes every byte (SHA-256) on both ways; raw boto3 doesn't. The two take turns, so that a slow minute of the
machine hits both. Prints JSON: medians in MB/s (10^6 bytes), and the ratio of the medians, ours / raw.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import boto3

from steps.adapters.publications import upload_folder
from steps.adapters.publications_cache import fetch_folder
from steps.adapters.store import open_store
from tests.s3_servers import join_server, leave_server, wait_until_stopped


class Timing(NamedTuple):
    wall_s: float
    cpu_s: float
    """Of this process; the server's is not in it, so it says how much work ours adds when the machine is busy."""


BUCKET = "benchmark"
FILE_NAME = "model.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description="Publish and fetch MB/s, against raw boto3 on the same server")
    parser.add_argument("--server", choices=["moto", "radosgw"], default="radosgw")
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moerl-bench-") as folder:
        state_dir = Path(folder) / "server"
        try:
            os.environ.update(join_server(arguments.server, state_dir).environment())
            seconds = measure(Path(folder), arguments.size_mib << 20, arguments.repeats)
        finally:
            leave_server(state_dir)
            wait_until_stopped(state_dir)
    text = json.dumps(build_report(arguments.server, arguments.size_mib, seconds), indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


def measure(folder: Path, size_bytes: int, repeats: int) -> dict[str, list[Timing]]:
    """Timings of each repeat, by what was measured."""
    source = folder / "source"
    source.mkdir()
    write_random_file(source / FILE_NAME, size_bytes)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    store = open_store(f"s3://{BUCKET}")
    seconds: dict[str, list[Timing]] = {"raw_upload": [], "publish": [], "raw_download": [], "fetch": []}
    for number in range(repeats + 1):  # the first turn warms connections and the page cache up, and isn't counted
        raw, ours = f"raw-{number}", f"ours-{number}"
        turn = {
            "raw_upload": timed(partial(client.upload_file, str(source / FILE_NAME), BUCKET, raw)),
            "publish": timed(partial(upload_folder, store, source, ours, {})),
            "raw_download": timed(partial(client.download_file, BUCKET, raw, str(folder / "raw"))),
            "fetch": timed(partial(fetch_folder, store, ours, folder / "cache")),
        }
        for name, value in turn.items():
            seconds[name] += [value] if number else []
        shutil.rmtree(folder / "cache")
        client.delete_object(Bucket=BUCKET, Key=raw)
        store.delete([info.key for info in store.list(ours)])
    return seconds


def timed(action: Callable[[], object]) -> Timing:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    action()
    return Timing(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def write_random_file(path: Path, size_bytes: int) -> None:
    with open(path, "wb") as stream:
        for _ in range(size_bytes >> 20):
            stream.write(os.urandom(1 << 20))


def build_report(server: str, size_mib: int, seconds: dict[str, list[Timing]]) -> dict[str, object]:
    size_mb = (size_mib << 20) / 1e6
    wall_s = {name: statistics.median(timing.wall_s for timing in timings) for name, timings in seconds.items()}
    cpu_s = {name: statistics.median(timing.cpu_s for timing in timings) for name, timings in seconds.items()}
    return {
        "benchmark": "publication",
        "server": server,
        "size_mib": size_mib,
        "repeats": len(seconds["publish"]),
        "median_mb_per_s": {name: round(size_mb / value, 1) for name, value in wall_s.items()},
        "ratio_publish": round(wall_s["raw_upload"] / wall_s["publish"], 3),
        "ratio_fetch": round(wall_s["raw_download"] / wall_s["fetch"], 3),
        "median_client_cpu_s": {name: round(value, 3) for name, value in cpu_s.items()},
        "wall_s": {name: [round(timing.wall_s, 3) for timing in timings] for name, timings in seconds.items()},
        "machine": {"cpus": os.cpu_count(), "architecture": platform.machine(), "system": platform.platform()},
        "versions": {"python": sys.version.split()[0], "boto3": version("boto3"), "botocore": version("botocore")},
    }


if __name__ == "__main__":
    main()
