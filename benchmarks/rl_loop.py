"""The whole RL loop against TRL's GRPOTrainer: samples per second, and seconds to a held-out reward of 0.95.

    python -m benchmarks.rl_loop --trl-python PATH [--repeats 3] [--limit-s 180] [--skip-time-to-target]

PATH is a Python interpreter that has TRL, which this project does not depend on. A virtual environment of its own:

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.*" "transformers==5.24.*" "trl==1.16.*"

Without --trl-python only our own side is measured. Both sides train the default configuration's policy version 0 on
the same task, with the same batch, mini-batches, loss, optimizer and schedule. The supervised warm-up and start-up are
in no figure, the first batch in none of these samples per second, all of which include the rewards:

    trl                 generation and update, in one process with one or two threads, whichever is faster
    rollout_and_train   ours without workflows: sampling workers and a trainer on shared weights
    loop_phases         `moerl run`: the time in the steps rollout, reward, flush and train
    loop_iteration      `moerl run`: from the end of one iteration to that of the next, with all of its steps

Seconds to the target count TRL's batches alone, its evaluations and its start excluded; of ours everything counts from
policy version 0 to the end of the evaluation that reached the target. When TRL doesn't get there within --limit-s, the
ratio is taken with the seconds it has had, and is an upper bound.

What differs is each side's way to the same update: ours computes a group's prompt once, leaves out responses whose
advantage is 0 and takes the sampler's log-probabilities as the old ones, TRL computes those anew. Run it on an idle
machine: two threads of one process lose far more to a busy core than two processes do.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe.losses import clip_range
from steps import paths
from steps.config import RunConfig
from steps.config_loader import load_config
from steps.tasks.catalog import build_dataset
from workflows.run_folder import RunFolder

REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULT_CONFIG = REPOSITORY / "configs" / "reverse-digits.toml"
TARGET_REWARD = 0.95
BATCHES = 5
"""Of a throughput measurement; the first one is not counted."""
BATCHES_LIMIT_S = 60.0
"""When TRL's batches have taken this long, no further one is begun; a single batch then stands for itself."""
MANY_BATCHES = 100_000
TRL_THREADS = (1, 2)
LOOP_PHASES = ("rollout", "reward", "flush", "train")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bench:
    """What all measurements share."""

    folder: Path
    trl_python: str | None
    config: RunConfig

    @property
    def config_path(self) -> str:
        return str(self.folder / DEFAULT_CONFIG.name)

    @property
    def publication(self) -> Path:
        """Policy version 0 of the first campaign: a Hugging Face folder."""
        runs = RunFolder(runs_dir=self.folder, run_id="campaign-0")
        return runs.store / paths.publication_prefix(runs.run_id, 0)

    @property
    def samples(self) -> int:
        return self.config.rollout.prompts_per_iteration * self.config.rollout.group_size


def main() -> None:
    """Measure everything and print the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", metavar="PATH", help="interpreter of an environment that has TRL")
    parser.add_argument("--repeats", type=int, default=3, help="throughput measurements; medians are reported")
    parser.add_argument("--limit-s", type=float, default=180.0, help="training seconds that TRL has for the target")
    parser.add_argument("--skip-time-to-target", action="store_true")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="moerl-bench-") as folder:
        config_path = shutil.copy(DEFAULT_CONFIG, folder)
        bench = Bench(Path(folder), arguments.trl_python, load_config(config_path))
        check_comparable(bench.config)
        versions = {"trl_side": trl_versions(bench.trl_python)} if bench.trl_python else {}
        campaign = run_campaign(bench, 0, [f"iterations={BATCHES}"] if arguments.skip_time_to_target else [])
        repeats, trl_by_threads = measure_throughput(bench, campaign, arguments.repeats)
        threads = max(trl_by_threads, key=lambda count: trl_by_threads[count], default=None)
        report = {
            "benchmark": "rl_loop",
            "machine": machine,
            "versions": {"ours": campaign["versions"] | {"python": platform.python_version()}, **versions},
            "samples_per_batch": bench.samples,
            "trl_samples_per_s_by_threads": rounded(trl_by_threads),
            **summarise(repeats),
        }
        if not arguments.skip_time_to_target:
            report["time_to_target"] = measure_time_to_target(bench, campaign, threads, arguments.limit_s)
    print(json.dumps(report, indent=2))


def check_comparable(config: RunConfig) -> None:
    """The TRL side speaks GRPO with an exact reward: refuse a configuration that it would not follow."""
    loss, update = config.train.loss, config.train.update
    prompts = config.rollout.prompts_per_iteration
    facts = {
        'train.loss.algorithm must be "grpo"': loss.algorithm == "grpo",
        "train.loss must have no KL, entropy term or correction": loss.kl_coefficient == loss.entropy_coefficient == 0
        and loss.correction == "none",
        "moe.aux_loss_coefficient must be 0": config.moe.aux_loss_coefficient == 0,
        'task.verifier must be "exact"': config.task.verifier == "exact",
        "optimizer steps must divide the prompts": prompts % update.optimizer_steps_per_epoch == 0,
    }
    if wrong := [fact for fact, holds in facts.items() if not holds]:
        sys.exit(f"rl_loop: {DEFAULT_CONFIG.name}: {wrong[0]} to be compared with TRL")


def measure_throughput(bench: Bench, campaign: Json, repeats: int) -> tuple[list[dict[str, float]], dict[int, float]]:
    """Samples per second of each repeat, and TRL's by number of threads in the first one. The sides take turns."""
    by_threads: dict[int, float] = {}
    rows: list[dict[str, float]] = []
    for number in range(repeats):
        if number:
            campaign = run_campaign(bench, number, warm_started(bench))
        row = {**campaign_rates(campaign), "rollout_and_train": rollout_train_rate(bench)}
        if bench.trl_python and not by_threads:
            by_threads = {threads: trl_rate(bench, threads) for threads in TRL_THREADS}
            row["trl"] = max(by_threads.values())
        elif bench.trl_python:
            row["trl"] = trl_rate(bench, max(by_threads, key=lambda count: by_threads[count]))
        log(f"repeat {number + 1}: samples/s {rounded(row)}")
        rows.append(row)
    return rows, by_threads


def summarise(repeats: Sequence[Mapping[str, float]]) -> Json:
    """Medians over repeats, of the rates and of each repeat's ratios."""
    ours = [name for name in repeats[0] if name != "trl"]
    ratios = [{name: row[name] / row["trl"] for name in ours} for row in repeats if "trl" in row]
    return {
        "median_samples_per_s": {name: round(statistics.median(row[name] for row in repeats)) for name in repeats[0]},
        "ratios": {name: round(statistics.median(row[name] for row in ratios), 2) for name in ours if ratios},
        "repeats": [rounded(row) for row in repeats],
    }


def run_campaign(bench: Bench, number: int, overrides: Sequence[str]) -> Json:
    """The report of `moerl run` on the default configuration."""
    log(f"moerl run {number + 1} {' '.join(overrides)}")
    command = [sys.executable, "-m", "workflows", "run", bench.config_path, "--json"]
    command += ["--runs-dir", str(bench.folder), "--run-id", f"campaign-{number}"]
    command += [word for override in overrides for word in ("--set", override)]
    report: Json = json.loads(run_process(command))
    return report


def warm_started(bench: Bench) -> list[str]:
    """Overrides for a short campaign that starts from the first one's policy version 0."""
    return [f"warmup.start={json.dumps(str(bench.publication))}", "warmup.max_steps=0", f"iterations={BATCHES}"]


def campaign_rates(report: Json) -> dict[str, float]:
    """Medians over the iterations after the first one."""
    phases, whole = [], []
    for before, row in zip(report["iterations"], report["iterations"][1:], strict=False):
        phases.append(row["samples"] / sum(row["phase_seconds"][phase] for phase in LOOP_PHASES))
        whole.append(row["samples"] / (last_end_s(row) - last_end_s(before)))
    return {"loop_phases": statistics.median(phases), "loop_iteration": statistics.median(whole)}


def last_end_s(row: Json, step: str | None = None) -> float:
    """When the last attempt of an iteration, or of one of its steps, ended."""
    ends: list[float] = [attempt["end_s"] for attempt in row["attempts"] if step in (None, attempt["step"])]
    return max(ends)


def rollout_train_rate(bench: Bench) -> float:
    command = [
        sys.executable,
        "-m",
        "benchmarks._rollout_train",
        bench.config_path,
        str(bench.publication),
        str(BATCHES),
    ]
    rows: list[dict[str, float]] = json.loads(run_process(command))
    return bench.samples / statistics.median(row["rollout_s"] + row["train_s"] for row in rows[1:])


def trl_rate(bench: Bench, threads: int) -> float:
    seconds: list[float] = run_trl(bench, threads, BATCHES, BATCHES_LIMIT_S)["batch_seconds"]
    return bench.samples / statistics.median(seconds[1:] or seconds)


def run_trl(bench: Bench, threads: int, batches: int, limit_s: float, target: float | None = None) -> Json:
    """Output of `_trl_grpo.py`; with a target it evaluates after each batch."""
    assert bench.trl_python is not None
    spec_path, output_path = bench.folder / "trl-spec.json", bench.folder / "trl-output.json"
    spec = trl_spec(bench) | {"threads": threads, "batches": batches, "target_reward": target, "limit_s": limit_s}
    spec_path.write_text(json.dumps(spec))
    command = [bench.trl_python, str(REPOSITORY / "benchmarks" / "_trl_grpo.py"), str(spec_path), str(output_path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
    run_process(command, environment)
    output: Json = json.loads(output_path.read_text())
    return output


def trl_spec(bench: Bench) -> Json:
    """The configuration as plain values, and the prompts."""
    config = bench.config
    dataset = build_dataset(config.task, config.seed)
    sampling, optimizer, update = config.rollout.sampling, config.train.optimizer, config.train.update
    clip_low, clip_high = clip_range(config.train.loss)
    return {
        "publication": str(bench.publication),
        "train": [(prompt.text, prompt.answer) for prompt in dataset.train],
        "heldout": [(prompt.text, prompt.answer) for prompt in dataset.heldout[: config.evaluate.max_prompts]],
        "seed": config.seed,
        "prompts": config.rollout.prompts_per_iteration,
        "group_size": config.rollout.group_size,
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "epochs": update.epochs,
        "steps_per_batch": update.optimizer_steps_per_epoch,
        "clip_low": clip_low,
        "clip_high": clip_high,
        "dual_clip": config.train.loss.dual_clip,
        "learning_rate": optimizer.learning_rate,
        "warmup_steps": optimizer.warmup_steps,
        "betas": optimizer.betas,
        "epsilon": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
    }


def measure_time_to_target(bench: Bench, campaign: Json, threads: int | None, limit_s: float) -> Json:
    """Seconds of both sides from policy version 0 to the target, and their ratio where both or ours got there."""
    curve = [campaign["initial"]["reward_eval"], *(row["reward_eval"] for row in campaign["iterations"])]
    reached = next((row for row in campaign["iterations"] if row["reward_eval"] >= TARGET_REWARD), None)
    ours_s = None if reached is None else round(last_end_s(reached, "evaluate") - last_end_s(campaign["initial"]), 2)
    ours = {"seconds": ours_s, "batches": None if reached is None else reached["iteration"], "rewards": curve}
    log(f"ours: held-out rewards {[round(reward, 3) for reward in curve]}, target after {ours_s} s")
    if threads is None:
        return {"target_reward": TARGET_REWARD, "ours": ours}
    log(f"TRL, {threads} threads, to {TARGET_REWARD} within {limit_s:g} s")
    output = run_trl(bench, threads, MANY_BATCHES, limit_s, TARGET_REWARD)
    trl_s, trl_reached = sum(output["batch_seconds"]), output["rewards"][-1] >= TARGET_REWARD
    log(f"TRL: held-out rewards {[round(reward, 3) for reward in output['rewards']]}, {trl_s:.1f} s")
    return {
        "target_reward": TARGET_REWARD,
        "ours": ours,
        "trl": {
            "seconds": round(trl_s, 2),
            "reached": trl_reached,
            "batches": len(output["batch_seconds"]),
            "rewards": output["rewards"],
        },
        "ratio": None if ours_s is None else round(ours_s / trl_s, 2),
        "ratio_is_upper_bound": not trl_reached,
    }


def trl_versions(interpreter: str) -> Json:
    """Versions in that environment; ends the program when it lacks TRL."""
    code = (
        "import json, platform; from importlib.metadata import version; "
        "names = ('trl', 'torch', 'transformers', 'accelerate', 'datasets'); "
        "print(json.dumps({'python': platform.python_version()} | {name: version(name) for name in names}))"
    )
    try:
        done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        sys.exit(f"rl_loop: --trl-python {interpreter} is no interpreter with TRL: see python -m benchmarks.rl_loop -h")
    versions: Json = json.loads(done.stdout)
    return versions


def run_process(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Its stdout; ends the program with the end of its stderr when it fails."""
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        log(done.stderr[-3000:])
        sys.exit(f"rl_loop: {' '.join(command[:3])} failed with exit code {done.returncode}")
    return done.stdout


def describe_machine() -> Json:
    return {"platform": platform.platform(), "cpus": os.cpu_count(), "load_average": round(os.getloadavg()[0], 2)}


def rounded(rates: Mapping[Any, float]) -> dict[Any, int]:
    return {name: round(rate) for name, rate in rates.items()}


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
