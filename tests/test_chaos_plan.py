"""A fixed chaos plan over every step of a campaign: it completes with the weights of the undisturbed one.

The random counterpart, 20 default campaigns, is benchmarks/chaos.py.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures_steps import REPOSITORY, TINY_CONFIG
from workflows.local.chaos_plan import Fault, plan_toml

CONFIG = TINY_CONFIG.replace("lease_s = 2.0", "lease_s = 0.5").replace("[train.update]", "[train.update]\nepochs = 4")
CONFIG += "[train]\ncheckpoint_every = 2\n[reward]\nlease_s = 0.5\n"
AT_ONCE = (
    Fault(step="init", iteration=0, kind="sigkill", after_s=0.0),
    Fault(step="plan", iteration=1, kind="delete", after_s=0.0),
    Fault(step="rollout", iteration=1, worker=0, kind="sigkill", after_s=0.0),
    Fault(step="rollout", iteration=1, worker=0, attempt=1, kind="notice", after_s=0.0, seconds=0.1),
    Fault(step="rollout", iteration=1, worker=1, kind="freeze", after_s=0.0, seconds=1.5),
    Fault(step="reward", iteration=1, worker=0, kind="sigterm", after_s=0.0),
    Fault(step="reward", iteration=2, worker=0, kind="sigkill", after_s=0.0),
    Fault(step="flush", iteration=1, kind="database", after_s=0.0, seconds=0.3),
    Fault(step="flush", iteration=2, kind="sigkill", after_s=0.0),
    Fault(step="publish", iteration=1, kind="sigkill", after_s=0.0),
    Fault(step="evaluate", iteration=1, kind="cache", after_s=0.0, damage="flip"),
    Fault(step="evaluate", iteration=2, kind="cache", after_s=0.0, damage="wipe"),
    Fault(step="report", iteration=2, kind="sigkill", after_s=0.0),
    Fault(step="summary", iteration=0, kind="delete", after_s=0.0),
)
IN_THE_WORK = (  # which may be over before they are due
    Fault(step="rollout", iteration=2, worker=0, kind="sigkill", at_progress=0.25),
    Fault(step="rollout", iteration=2, worker=1, kind="notice", at_progress=0.5, seconds=0.2),
    Fault(step="train", iteration=1, kind="checkpoint", at_progress=0.5),
    Fault(step="train", iteration=2, kind="sigterm", at_progress=0.25),
    Fault(step="train", iteration=2, attempt=1, kind="sigkill", at_progress=0.75),
)
PLAN = AT_ONCE + IN_THE_WORK


def moerl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "workflows", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the run `shaken`, driven to its end under the plan."""
    folder = tmp_path_factory.mktemp("chaos")
    (folder / "tiny.toml").write_text(CONFIG)
    (folder / "plan.toml").write_text(plan_toml(PLAN))
    words = ("run", f"{folder}/tiny.toml", "--runs-dir", f"{folder}/runs", "--run-id", "shaken")
    finished = moerl(*words, "--chaos", f"{folder}/plan.toml")
    assert finished.returncode == 0, finished.stderr
    return folder / "runs"


@pytest.fixture(scope="module")
def report(runs_dir: Path) -> dict[str, Any]:
    finished = moerl("chaos", "report", "shaken", "--runs-dir", str(runs_dir), "--baseline", "auto", "--json")
    assert finished.returncode == 0, finished.stderr
    return dict(json.loads(finished.stdout))


def test_no_fault_changes_a_weight(report: dict[str, Any]) -> None:
    assert report["baseline"] == "shaken-calm"
    assert (report["weights_equal"], report["first_different_version"]) == (True, None)


def test_the_sums_agree_after_all_faults(runs_dir: Path) -> None:
    finished = moerl("audit", "shaken", "--runs-dir", str(runs_dir), "--deep")
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_every_fault_is_accounted_for(report: dict[str, Any]) -> None:
    struck = {fault["fault"]: fault for fault in report["faults"]}
    assert set(range(len(AT_ONCE))) <= set(struck) <= set(range(len(PLAN)))
    # The second attempt of train exists only if the first was hit.
    assert len(struck) + report["missed"] >= len(PLAN) - 1
    for index, fault in struck.items():
        planned = PLAN[index]
        assert (fault["step"], fault["iteration"], fault["attempt"]) == planned.target[:2] + planned.target[3:]
        if fault["ended_the_pod"]:
            assert 0 <= fault["detected_s"] <= fault["restarted_s"], fault
            assert fault["recovered_s"] is not None, fault
        assert fault["units_wasted"] <= 1


def test_the_plan_that_was_carried_out_is_kept_and_replays(runs_dir: Path) -> None:
    kept = runs_dir / "shaken" / "chaos-plan.toml"
    assert kept.read_text() == plan_toml(PLAN)
    again = moerl("resume", "shaken", "--runs-dir", str(runs_dir), "--chaos", str(kept))
    assert again.returncode == 0, again.stderr
    other = moerl("resume", "shaken", "--runs-dir", str(runs_dir), "--chaos", "random:1:0.5")
    assert (other.returncode, "has another chaos plan" in other.stderr) == (64, True)


def test_a_table_tells_of_each_fault(runs_dir: Path, report: dict[str, Any]) -> None:
    shown = moerl("chaos", "report", "shaken", "--runs-dir", str(runs_dir), "--baseline", "shaken-calm").stdout
    assert "weights the same as the undisturbed run shaken-calm" in shown
    assert f"{len(report['faults'])} struck" in shown
    assert shown.count("train-1 attempt 0") == sum(
        fault["step"] == "train" for fault in report["faults"][:99] if fault["iteration"] == 1
    )


def test_a_run_that_met_chaos_is_no_baseline(runs_dir: Path) -> None:
    finished = moerl("chaos", "report", "shaken", "--runs-dir", str(runs_dir), "--baseline", "shaken")
    assert (finished.returncode, "run shaken met chaos itself" in finished.stderr) == (65, True)


def test_a_report_without_chaos_says_how_to_get_one(runs_dir: Path, report: dict[str, Any]) -> None:
    finished = moerl("chaos", "report", report["baseline"], "--runs-dir", str(runs_dir))
    assert finished.returncode == 65
    assert "start a run with --chaos" in finished.stderr
