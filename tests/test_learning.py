"""Policies learn from rewards: the first iterations of whole campaigns, as `moerl run` does them."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)
REPOSITORY = Path(__file__).resolve().parent.parent


def run_campaign(config: Path | str, runs_dir: Path, *overrides: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "workflows", "run", str(config), "--json", "--runs-dir", str(runs_dir)]
    for override in overrides:
        command += ["--set", override]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    report: dict[str, Any] = json.loads(finished.stdout)
    return report


def rewards(report: dict[str, Any]) -> list[float]:
    return [row["reward_eval"] for row in [report["initial"], *report["iterations"]]]


def test_the_default_campaign_learns_and_its_mismatch_with_the_sampler_is_nil(tmp_path: Path) -> None:
    report = run_campaign("reverse-digits", tmp_path, "iterations=5")
    curve = rewards(report)
    assert 0.2 <= curve[0] <= 0.5
    assert curve[-1] >= curve[0] + 0.3, curve
    assert all(row["validated"] for row in report["iterations"])
    assert all(row["train_samples_per_s"] > 0 and row["rollout_tokens_per_s"] > 0 for row in report["iterations"])


def test_experts_spread_over_two_ranks_learn_as_fast(tmp_path: Path) -> None:
    report = run_campaign("reverse-digits", tmp_path, "iterations=5", "train.ranks=2", "moe.dispatcher=all_to_all")
    curve = rewards(report)
    assert 0.2 <= curve[0] <= 0.5
    assert curve[-1] >= curve[0] + 0.3, curve
    transports = [row["transport"] for row in report["iterations"]]
    assert {(t["observed"], t["status"], t["ranks"]) for t in transports} == {("all_to_all", "ok", 2)}
    assert all(t["sent_bytes"] > 0 == t["predicted_off_node_bytes"] for t in transports)
    num_layers = report["config"]["model"]["num_layers"]
    assert all(len(row["router_layers"]) == num_layers for row in report["iterations"])


def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    curve = rewards(run_campaign("reverse-digits", tmp_path, "iterations=5", "reward.shuffle=true"))
    assert max(curve[1:]) < curve[0] + 0.1, curve


def test_a_users_own_rows_are_learned(tmp_path: Path) -> None:
    draw = random.Random(0)
    words = sorted({"".join(draw.choices("abcdefgh", k=4)) for _ in range(3000)})
    rows = [{"prompt": f"{word} ", "answer": word[::-1], "id": word} for word in words]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "mine.toml"
    config.write_text(
        (REPOSITORY / "configs" / "reverse-digits.toml")
        .read_text()
        .replace('kind = "reverse_digits"\ndigits = 6\n', 'kind = "jsonl"\ntrain_path = "mine.jsonl"\n')
        .replace("train_size = 8000\n", "")
    )
    curve = rewards(run_campaign(config, tmp_path, "iterations=5"))
    assert curve[-1] >= curve[0] + 0.2, curve
