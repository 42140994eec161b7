"""Chaos: do campaigns complete under random faults, with the weights of the undisturbed one, and at what cost?

    python -m benchmarks.chaos [--runs-dir DIR] [--campaigns 20] [--rate 0.12] [--config NAME] [--set a.b=value]

Campaign N is `moerl run --chaos random:N:RATE`; besides, its executor is killed outright once, N * 7 % of the way, and
the run is resumed with the same plan. Then `moerl audit` and `moerl chaos report` are asked. All of a run's state is in
DIR: call it again after an interruption, and finished campaigns are only read. JSON with each campaign and the totals;
exit 1 when a campaign did not complete, an audit was not clean, or weights differ.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

BASELINE = "undisturbed"
MAX_RESUMES = 5
POLL_S = 0.05


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.runs_dir = Path(arguments.runs_dir or tempfile.mkdtemp(prefix="moerl-chaos-"))
        self.config = arguments.config
        self.rate = arguments.rate
        self.options = [word for override in arguments.overrides for word in ("--set", override)]

    def moerl(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "workflows", *words, "--runs-dir", str(self.runs_dir)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ask(self, *words: str) -> tuple[int, str]:
        """(exit code, stdout) of a command that reads."""
        process = self.moerl(*words)
        stdout, _ = process.communicate()
        return process.returncode, stdout

    def finish(self, run: str, chaos: Sequence[str], kill_after_s: float | None) -> dict[str, Any]:
        """Drive a run to its end; what is in its folder already is not repeated. Seconds add up over all calls."""
        folder = self.runs_dir / run
        kept = folder / "benchmark.json"
        if kept.exists():
            return dict(json.loads(kept.read_text()))
        executor_kills, wall_s = 0, 0.0
        for _ in range(MAX_RESUMES):
            if (folder / "run.json").exists():
                plan = ["--chaos", str(folder / "chaos-plan.toml")] if chaos else []
                process = self.moerl("resume", run, *plan)
            else:
                process = self.moerl("run", self.config, "--run-id", run, *self.options, *chaos)
            started_s = time.monotonic()
            if kill_after_s is not None and not executor_kills:
                executor_kills += kill_after(process, kill_after_s)
            _, stderr = process.communicate()
            wall_s += time.monotonic() - started_s
            if process.returncode == 0:
                result = {"completed": True, "wall_s": round(wall_s, 1), "executor_kills": executor_kills}
                kept.write_text(json.dumps(result))
                return result
            print(f"{run}: exit {process.returncode}: {stderr[-300:]}", file=sys.stderr, flush=True)
            if process.returncode != -signal.SIGKILL:
                break
        return {"completed": False, "wall_s": round(wall_s, 1), "executor_kills": executor_kills}

    def campaign(self, seed: int, calm_s: float) -> dict[str, Any]:
        run = f"chaos-{seed}"
        kill_after_s = calm_s * (seed * 7 % 100) / 100 if seed else None
        result = {"run": run, "seed": seed}
        result |= self.finish(run, ["--chaos", f"random:{seed}:{self.rate}"], kill_after_s)
        audit_code, audit = self.ask("audit", run)
        code, text = self.ask("chaos", "report", run, "--json", "--baseline", BASELINE)
        if code != 0:
            raise SystemExit(f"moerl chaos report {run}: exit {code}")
        report = json.loads(text)
        return {
            **result,
            "audit_clean": audit_code == 0,
            "audit": "" if audit_code == 0 else audit[-1000:],
            "weights_equal": report["weights_equal"],
            "missed": report["missed"],
            **report["summary"],
            "faults": report["faults"],
        }


def kill_after(process: subprocess.Popen[str], seconds: float) -> int:
    """SIGKILL the executor unless it has ended; 1 when it was killed."""
    deadline_s = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    if process.poll() is not None:
        return 0
    process.kill()
    return 1


def summarize(campaigns: Sequence[dict[str, Any]], calm_s: float) -> dict[str, Any]:
    faults = [fault for campaign in campaigns for fault in campaign["faults"]]
    ended = [fault for fault in faults if fault["ended_the_pod"]]
    samplers = [fault for fault in ended if fault["step"] == "rollout"]
    executor_kills = sum(campaign["executor_kills"] for campaign in campaigns)
    recovery = [fault["recovered_s"] for fault in samplers if fault["recovered_s"] is not None]
    return {
        "campaigns": len(campaigns),
        "completed": sum(campaign["completed"] for campaign in campaigns),
        "audits_clean": sum(campaign["audit_clean"] for campaign in campaigns),
        "weights_equal": sum(campaign["weights_equal"] is True for campaign in campaigns),
        "faults": len(faults) + executor_kills,
        "faults_that_ended_a_pod": len(ended),
        "executor_kills": executor_kills,
        "by_kind": dict(sorted(Counter(fault["kind"] for fault in faults).items())),
        "by_step": dict(sorted(Counter(fault["step"] for fault in faults).items())),
        "rollout_kills": len(samplers),
        "units_wasted_per_rollout_kill_max": max((fault["units_wasted"] for fault in samplers), default=0),
        "rollout_recovery_median_s": statistics.median(recovery) if recovery else None,
        "rollout_recovery_max_s": max(recovery, default=None),
        "wasted_tokens": sum(fault["wasted_tokens"] for fault in faults),
        "undisturbed_s": calm_s,
        "wall_ratio_median": round(statistics.median(campaign["wall_s"] for campaign in campaigns) / calm_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs-dir", default="", help="where the runs are kept, to be called again (default: nowhere)")
    parser.add_argument("--campaigns", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.12)
    parser.add_argument("--config", default="reverse-digits")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    calm = bench.finish(BASELINE, [], None)
    if not calm["completed"]:
        raise SystemExit("the undisturbed campaign did not complete")
    campaigns = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.campaigns):
        campaigns.append(bench.campaign(seed, calm["wall_s"]))
        shown = {key: value for key, value in campaigns[-1].items() if key != "faults"}
        print(json.dumps(shown), file=sys.stderr, flush=True)
    total = summarize(campaigns, calm["wall_s"])
    machine = {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    print(json.dumps({"total": total, "campaigns": campaigns, "machine": machine, "versions": versions}, indent=1))
    if not total["campaigns"] == total["completed"] == total["audits_clean"] == total["weights_equal"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
