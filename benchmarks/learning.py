"""Learning: held-out greedy reward before and after whole campaigns, and how long they take.

    python -m benchmarks.learning [--configs reverse-digits sort-digits] [--seeds 0 1 2] [--set reward.shuffle=true]

Each campaign is a `moerl run` in a folder of its own: the rendered manifests in the local executor, a directory store,
SQLite and MLflow. Wall seconds include everything but the installation. JSON with each campaign and the medians.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

TARGET = 0.95


def run_campaign(config: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """One campaign's report, condensed; a failure keeps what `moerl run` printed."""
    command = [sys.executable, "-m", "workflows", "run", config, "--json", "--set", f"seed={seed}"]
    for override in overrides:
        command += ["--set", override]
    with tempfile.TemporaryDirectory() as folder:
        started_s = time.perf_counter()
        finished = subprocess.run([*command, "--runs-dir", folder], capture_output=True, text=True)
        wall_s = time.perf_counter() - started_s
    if finished.returncode != 0:
        raise SystemExit(f"{config}, seed {seed}: exit {finished.returncode}\n{finished.stderr[-2000:]}")
    return condense(json.loads(finished.stdout), config, seed, wall_s)


def condense(report: dict[str, Any], config: str, seed: int, wall_s: float) -> dict[str, Any]:
    rows = [report["initial"], *report["iterations"]]
    curve = [row["reward_eval"] for row in rows]
    return {
        "config": config,
        "seed": seed,
        "initial_reward": curve[0],
        "final_reward": curve[-1],
        "best_reward": max(curve),
        "first_iteration_at_target": next((row["iteration"] for row in rows if row["reward_eval"] >= TARGET), None),
        "wall_s": round(wall_s, 1),
        "iteration_s": round(statistics.median(row["wall_seconds"] for row in rows[1:]), 2),
        "curve": [round(value, 3) for value in curve],
        "final_weights_sha256": report["final_weights_sha256"],
    }


def summarize(campaigns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = list(dict.fromkeys(campaign["config"] for campaign in campaigns))
    return {
        name: {
            key: statistics.median(campaign[key] for campaign in campaigns if campaign["config"] == name)
            for key in ("initial_reward", "final_reward", "wall_s", "iteration_s")
        }
        for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=["reverse-digits"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    campaigns = []
    for config in arguments.configs:
        for seed in arguments.seeds:
            campaigns.append(run_campaign(config, seed, arguments.overrides))
            print(json.dumps(campaigns[-1]), file=sys.stderr, flush=True)
    machine = {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    result = {"campaigns": campaigns, "median": summarize(campaigns), "machine": machine, "versions": versions}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
