"""`moerl`: its commands, its one-line errors with their exit codes, and runs that are stopped and resumed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from steps.config import RunConfig
from steps.config_loader import config_toml
from steps.errors import DataError, ServiceUnavailable, UsageError
from steps.paths import validate_run_id
from workflows.cli import run_command_line
from workflows.local.status import NodeStatus, WorkflowStatus, save_status
from workflows.run_command import build_campaign, load_templates, new_record, new_run_id
from workflows.run_failure import explain_failure
from workflows.run_folder import RunFolder, create_run, list_runs, open_run

REPOSITORY = Path(__file__).resolve().parents[1]
TINY = """
name = "tiny"
iterations = 2
[task]
digits = 3
verifier = "per_position"
train_size = 64
heldout_size = 8
[model]
hidden_size = 32
num_layers = 1
num_experts = 4
moe_intermediate_size = 32
[rollout]
prompts_per_iteration = 4
prompts_per_unit = 2
group_size = 4
[rollout.sampling]
max_new_tokens = 4
[train.update]
optimizer_steps_per_epoch = 2
"""


def moerl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "workflows", *arguments]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["bogus"], 64, "No such command 'bogus'"),
        (["run", "--bogus"], 64, "No such option"),
        (["run", "nowhere.toml"], 64, "no configuration 'nowhere.toml'"),
        (["run", "tiny.toml", "--run-id", "No Good"], 64, "run id 'No Good'"),
        (["run", "tiny.toml", "--set", "train.optimizer.learning_rat=1"], 78, "train.optimizer.learning_rate"),
        (["run", "tiny.toml", "--set", "iterations=many"], 78, "iterations"),
        (["config", "show", "tiny.toml", "--set", "iterations"], 78, "iterations"),
        (["resume", "nothing"], 65, "no run 'nothing'"),
        (["report", "../etc"], 65, "no run '../etc'"),
    ],
)
def test_a_users_mistake_is_one_line_and_its_exit_code(
    arguments: list[str],
    code: int,
    words: str,
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tiny.parent)
    assert run_command_line(arguments) == code
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("moerl: ")
    assert words in captured.err and captured.out == ""
    assert not (tiny.parent / "runs").exists()


@pytest.mark.parametrize("name", [["run"], ["resume"], ["runs"], ["report"], ["render"], ["config", "show"]])
def test_help_has_examples(name: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line([*name, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Examples" in text and f"moerl {' '.join(name)}" in text


def test_without_arguments_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line([]) == 64
    captured = capsys.readouterr()
    assert "Usage: moerl" in captured.out and captured.err == ""


def test_dry_run_prints_the_workflow_and_writes_nothing(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny.parent)
    assert run_command_line(["run", "tiny.toml", "--dry-run", "--run-id", "a-1", "--set", "rollout.workers=3"]) == 0
    workflow = yaml.safe_load(capsys.readouterr().out)
    assert workflow["metadata"]["name"] == "a-1"
    assert workflow["spec"]["workflowTemplateRef"] == {"name": "policy-campaign"}
    values = {item["name"]: item["value"] for item in workflow["spec"]["arguments"]["parameters"]}
    assert (values["run"], values["iterations"], values["rollout-workers"]) == ("a-1", "2", "3")
    assert sorted(path.name for path in tiny.parent.iterdir()) == ["tiny.toml"]


def test_the_campaign_sets_only_parameters_that_the_template_declares() -> None:
    (template,) = [one for one in load_templates() if one["metadata"]["name"] == "policy-campaign"]
    declared = {item["name"] for item in template["spec"]["arguments"]["parameters"]}
    workflow = build_campaign(new_record("a-1", "c", RunConfig()), config_toml(RunConfig()))
    assert {item["name"] for item in workflow["spec"]["arguments"]["parameters"]} <= declared


def test_show_is_a_configuration_that_shows_the_same(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny.parent)
    assert run_command_line(["config", "show", "tiny.toml", "--set", "seed=7"]) == 0
    first = capsys.readouterr().out
    (tiny.parent / "again.toml").write_text(first)
    assert run_command_line(["config", "show", "again.toml"]) == 0
    assert capsys.readouterr().out == first
    assert "seed = 7" in first


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["config", "schema"]) == 0
    assert "train" in json.loads(capsys.readouterr().out)["properties"]


@given(st.from_regex(r"[a-z0-9][a-z0-9-]{0,28}[a-z0-9]", fullmatch=True))
def test_every_configurations_name_makes_a_valid_run_id(name: str) -> None:
    run_id = new_run_id(name, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    assert validate_run_id(run_id).endswith("-20260102-030405")


def make_run(runs_dir: Path, run_id: str = "tiny-1") -> RunFolder:
    return create_run(runs_dir, new_record(run_id, "tiny.toml", RunConfig()), config_toml(RunConfig()))


def test_a_run_id_can_be_used_once(tmp_path: Path) -> None:
    make_run(tmp_path)
    with pytest.raises(UsageError, match="moerl resume tiny-1"):
        make_run(tmp_path)


def test_runs_are_found_by_their_folder(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs")
    (tmp_path / "runs" / "something-else").mkdir()
    assert [run.run_id for run in list_runs(tmp_path / "runs")] == ["tiny-1"]
    assert open_run(tmp_path / "runs", "tiny-1") == folder
    with pytest.raises(DataError, match="no run 'something-else'"):
        open_run(tmp_path / "runs", "something-else")


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder.path / "run.json").write_text("{")
    with pytest.raises(DataError, match=r"run\.json"):
        folder.load_record()


def test_a_runs_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServiceUnavailable, match="--runs-dir"):
        make_run(tmp_path / "file")


def test_a_run_is_driven_by_one_process_at_a_time(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    assert not folder.is_running()
    with folder.lock():
        assert folder.is_running()
        with pytest.raises(ServiceUnavailable, match="another process"), folder.lock():
            pass
    assert not folder.is_running()


def failed_node(folder: Path, name: str, code: str, log: str, phase: str = "Failed", at: float = 1.0) -> NodeStatus:
    place = folder / re.sub(r"\W", "_", name)
    place.mkdir(parents=True)
    (place / "main.log").write_text(log)
    return NodeStatus(
        name=name, display_name=name, type="Pod", phase=phase, exit_code=code, folder=str(place), finished_s=at
    )


def save(root: Path, name: str, *nodes: NodeStatus, phase: str = "Failed") -> WorkflowStatus:
    status = WorkflowStatus(name=name, phase=phase, nodes={node.name: node for node in nodes})
    (root / name).mkdir(exist_ok=True)
    save_status(status, root / name)
    return status


def test_a_failure_is_told_by_the_step_that_failed_for_good(tmp_path: Path) -> None:
    mended = failed_node(tmp_path, "rollout(0)", "75", "rollout: stopped\n", at=9.0)
    retry = NodeStatus(name="rollout", display_name="rollout", type="Retry", phase="Succeeded")
    fatal = failed_node(tmp_path, "train(0)", "65", "12:00:00 train: hello\ntrain: the batch is gone\n", at=5.0)
    save(tmp_path, "a-1-00001", phase="Succeeded")
    save(tmp_path, "a-1-00002", mended, retry, fatal)
    watcher = failed_node(tmp_path, "watch-00002", "64", "")
    failure = explain_failure(tmp_path, save(tmp_path, "a-1", watcher))
    assert failure.exit_code == 65
    assert failure.what == "train of a-1-00002 failed (exit 65)"
    assert failure.why == "train: the batch is gone"
    assert failure.tail == ""


def test_a_bug_keeps_its_traceback(tmp_path: Path) -> None:
    node = failed_node(tmp_path, "init(0)", "1", "Traceback (most recent call last):\n  File x\nKeyError: 'a'\n")
    failure = explain_failure(tmp_path, save(tmp_path, "a-1", node))
    assert (failure.exit_code, failure.why) == (1, "KeyError: 'a'")
    assert failure.tail.startswith("Traceback")


@pytest.mark.parametrize("code", ["137", "-1"])
def test_a_killed_step_counts_as_interrupted(tmp_path: Path, code: str) -> None:
    failure = explain_failure(tmp_path, save(tmp_path, "a-1", failed_node(tmp_path, "init(0)", code, "")))
    assert failure.exit_code == 75


def test_a_workflow_without_a_failed_step_tells_its_message(tmp_path: Path) -> None:
    status = save(tmp_path, "a-1")
    status.message = "deadline"
    assert explain_failure(tmp_path, status).why == "deadline"


def report_of(runs_dir: Path, run_id: str) -> dict[str, Any]:
    done = moerl("report", run_id, "--runs-dir", str(runs_dir), "--json", cwd=runs_dir)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run `tiny-1`: its runs folder, and what `moerl run` printed."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tiny.toml").write_text(TINY)
    done = moerl("run", "tiny.toml", "--run-id", "tiny-1", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs", done.stdout


def test_a_run_from_start_to_report(whole_run: tuple[Path, str]) -> None:
    runs_dir, output = whole_run
    for words in ("held-out", "report.html", "mlflow ui --backend-store-uri sqlite:///"):
        assert words in output
    assert "<svg" in (runs_dir / "tiny-1" / "report.html").read_text()
    report = report_of(runs_dir, "tiny-1")
    assert [row["policy_version"] for row in report["iterations"]] == [1, 2]
    assert all(row["samples"] == 16 and row["tokens"] > 0 for row in report["iterations"])
    assert report["state"] == "finished" and report["final_weights_sha256"]
    listed = moerl("runs", cwd=runs_dir.parent).stdout
    assert "tiny-1" in listed and "2/2" in listed and "finished" in listed


def test_a_run_that_was_stopped_and_resumed_ends_with_the_same_weights(tiny: Path, whole_run: tuple[Path, str]) -> None:
    runs_dir = tiny.parent / "runs"
    process = subprocess.Popen(
        command("run", "tiny.toml", "--run-id", "stopped"),
        cwd=tiny.parent, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(runs_dir / "stopped" / "store" / "runs" / "stopped" / "latest.json")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    resume = f"moerl resume stopped --runs-dir {runs_dir}"
    assert resume in errors and "Traceback" not in errors
    assert "interrupted" in moerl("runs", cwd=tiny.parent).stdout
    resumed = moerl(*resume.split()[1:], cwd=runs_dir)
    assert resumed.returncode == 0, resumed.stderr
    before, after = report_of(whole_run[0], "tiny-1"), report_of(runs_dir, "stopped")
    assert after["final_weights_sha256"] == before["final_weights_sha256"]
    finished = [a for row in (after["initial"], *after["iterations"]) for a in row["attempts"] if a["state"] == "ok"]
    done_once = [(a["step"], a["worker"]) for a in finished if a["step"] == "init_run"]
    assert done_once == [("init_run", None)]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def test_a_row_that_is_wrong_ends_the_run_with_its_line(tiny: Path) -> None:
    (tiny.parent / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c"}\n')
    task = 'kind = "jsonl"\ntrain_path = "rows.jsonl"'
    (tiny.parent / "mine.toml").write_text(TINY.replace("digits = 3", task).replace("train_size = 64", ""))
    done = moerl("run", "mine.toml", "--run-id", "mine-1", cwd=tiny.parent)
    assert done.returncode == 65, done.stderr
    assert "rows.jsonl:2" in done.stderr and "Traceback" not in done.stderr
    assert "moerl resume mine-1" in done.stderr
