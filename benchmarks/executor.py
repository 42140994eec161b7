"""Local executor: seconds per no-op step, against the bare fork of the warm server's process.

    python -m benchmarks.executor [--steps 50] [--repeats 3] [--preload none|default] [--output FILE]

A Steps template of no-op `python -m` steps in series: the median from one step's Pending to the next one's, so state
file and event included. Then the same number as one fan-out over the machine's CPUs: steps a second. The bare fork is
measured in a process with the same modules loaded: fork, exit, waitpid.
"""

import argparse
import gc
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workflows.local.events import Event
from workflows.local.executor import LocalCluster
from workflows.local.warm_client import DEFAULT_PRELOAD, SINGLE_THREADED, Preload

NOOP = "import os, pathlib\npathlib.Path(os.environ['MOERL_OUTPUTS_DIR'], 'x').write_text('1')\n"
FORKS = 50


def build_template(steps: int) -> dict[str, Any]:
    """`series`, `steps` no-op steps one after the other, and `fan`, all at once."""
    outputs = {"parameters": [{"name": "x", "valueFrom": {"path": "/tmp/moerl/outputs/x"}}]}
    noop = {"name": "noop", "container": {"command": ["python", "-m", "noop"]}, "outputs": outputs}
    series = {"name": "series", "steps": [[{"name": f"s{number}", "template": "noop"}] for number in range(steps)]}
    fan_step = {"name": "fan", "template": "noop", "withSequence": {"count": str(steps)}}
    fan = {"name": "fan", "steps": [[fan_step]]}
    return {"entrypoint": "series", "templates": [noop, series, fan]}


def submit(cluster: LocalCluster, name: str, entrypoint: str, steps: int) -> float:
    """Seconds from submission to the end."""
    spec = build_template(steps) | {"entrypoint": entrypoint}
    start_s = time.perf_counter()
    status = cluster.submit({"kind": "Workflow", "metadata": {"name": name}, "spec": spec})
    assert status.phase == "Succeeded", status.message
    return time.perf_counter() - start_s


def measure_steps(steps: int, repeats: int, preload: Preload) -> dict[str, float]:
    """Medians over `repeats` runs of the series and of the fan-out; the first one, which waits for imports, apart."""
    events: list[Event] = []
    series_s: list[float] = []
    fan_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "noop.py").write_text(NOOP)
        with LocalCluster(
            Path(folder, "runs"),
            config_maps={},
            secrets={},
            templates=[],
            on_event=events.append,
            working_dir=Path(folder),
            preload=preload,
        ) as cluster:
            start_s = submit(cluster, "warm-up", "series", 1)
            for number in range(repeats):
                events.clear()
                submit(cluster, f"series-{number}", "series", steps)
                series_s += gaps_between_steps(events)
                fan_s.append(submit(cluster, f"fan-{number}", "fan", steps))
    return {
        "seconds_per_step": round(statistics.median(series_s), 4),
        "fan_out_steps_per_s": round(steps / statistics.median(fan_s), 1),
        "first_step_s": round(start_s, 2),
    }


def gaps_between_steps(events: Sequence[Event]) -> list[float]:
    """Seconds from each step's Pending to the next one's."""
    starts_s = [event.time_s for event in events if event.node_type == "Pod" and event.phase == "Pending"]
    return [after - before for before, after in zip(starts_s, starts_s[1:], strict=False)]


def measure_fork(preload: Preload) -> float:
    """Median seconds of fork, exit and waitpid in a process that has loaded `preload`."""
    command = [sys.executable, "-m", "benchmarks.executor", "--fork", ",".join(preload.first + preload.when_idle)]
    done = subprocess.run(command, env={**os.environ, **SINGLE_THREADED}, capture_output=True, text=True, check=True)
    return float(done.stdout)


def fork_repeatedly(modules: Sequence[str]) -> float:
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    times_s = []
    for _ in range(FORKS):
        start_s = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds per no-op step of the local executor.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--preload", choices=["default", "none"], default="default")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--fork", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fork is not None:
        print(fork_repeatedly([module for module in arguments.fork.split(",") if module]))
        return
    preload = DEFAULT_PRELOAD if arguments.preload == "default" else Preload()
    fork_s = measure_fork(preload)
    figures = measure_steps(arguments.steps, arguments.repeats, preload)
    report = {
        "benchmark": "executor",
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "steps": arguments.steps,
        "preload": arguments.preload,
        **figures,
        "fork_s": round(fork_s, 4),
        "step_over_fork": round(figures["seconds_per_step"] / fork_s, 2),
        "load_average": round(os.getloadavg()[0], 1),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
