"""`moerl`: its commands, its one-line errors with their exit codes, and runs that are stopped and resumed."""

import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from steps.config import RunConfig
from steps.config_loader import config_toml
from steps.paths import validate_run_id
from workflows.cli import run_command_line
from workflows.local.status import NodeStatus, WorkflowStatus, save_status
from workflows.run_command import build_campaign, load_templates, new_record, new_run_id
from workflows.run_failure import explain_failure
from workflows.run_folder import RunFolder

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


def moerl(*arguments: str, cwd: Path, python_path: str = "") -> subprocess.CompletedProcess[str]:
    return paste(shlex.join(command(*arguments)), cwd, python_path)


def paste(line: str, cwd: Path, python_path: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command as if it was typed."""
    return subprocess.run(
        line,
        shell=True,
        cwd=cwd,
        env=environment() | {"PYTHONPATH": os.pathsep.join(filter(None, (python_path, str(REPOSITORY))))},
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
        (["report", "../etc"], 65, "no run 'etc' in .."),
        (["report", "x" * 300 + "/demo"], 69, "File name too long"),
        (["run", "x" * 300], 64, "File name too long"),
        (["run", "tiny.toml", "--runs-dir", "q?x"], 64, "can't hold '?'"),
        (["run", "tiny.toml", "--runs-dir", "p%20x"], 64, "can't hold '%'"),
        (["resume", "demo", "--runs-dir", "p%20x"], 64, "can't hold '%'"),
        (["runs", "--runs-dir", "q?x"], 64, "can't hold '?'"),
        (["run", "tiny.toml", "--runs-dir", "tiny.toml"], 69, "--runs-dir"),
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
    done = moerl("run", "tiny.toml", "--run-id", "tiny-1", "--runs-dir", "my runs #1", cwd=folder)
    assert done.returncode == 0, done.stderr
    start = done.stderr.splitlines()[:2]
    assert "tiny-1 in my runs #1/tiny-1" in start[0] and "Ctrl-C" in start[1] and "'my runs #1'" in start[1]
    return folder / "my runs #1", done.stdout


def test_a_run_from_start_to_report(whole_run: tuple[Path, str]) -> None:
    runs_dir, output = whole_run
    for words in (
        "version",
        "publish",
        "report.html",
        f"mlflow ui --backend-store-uri 'sqlite:///{runs_dir}/mlflow.db'",
    ):
        assert words in output
    with closing(sqlite3.connect(runs_dir / "mlflow.db")) as tracked:
        assert tracked.execute("SELECT name, status FROM runs").fetchall() == [("tiny-1", "FINISHED")]
    assert "<svg" in (runs_dir / "tiny-1" / "report.html").read_text()
    report = report_of(runs_dir, "tiny-1")
    assert [row["policy_version"] for row in report["iterations"]] == [1, 2]
    assert all(row["samples"] == 16 and row["tokens"] > 0 for row in report["iterations"])
    assert report["state"] == "finished" and report["final_weights_sha256"]
    listed = moerl("runs", "--runs-dir", runs_dir.name, cwd=runs_dir.parent).stdout
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
    assert "Traceback" not in errors
    assert "interrupted" in moerl("runs", cwd=tiny.parent).stdout
    resumed = paste(errors.rpartition("stopped; resume with: ")[2].strip(), cwd=tiny.parent)
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


def test_a_row_that_is_wrong_ends_the_run_with_its_line_and_a_command_to_go_on(tiny: Path) -> None:
    """The verifier lies on the PYTHONPATH of `moerl run`, relative to where it was called; resuming remembers that."""
    rows = tiny.parent / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c"}\n')
    (tiny.parent / "lib").mkdir()
    (tiny.parent / "lib" / "mine.py").write_text("def score(prompt, response, answer, meta):\n    return 1.0\n")
    task = 'kind = "jsonl"\ntrain_path = "rows.jsonl"'
    text = TINY.replace("digits = 3", task).replace("train_size = 64", "").replace("per_position", "mine:score")
    (tiny.parent / "mine.toml").write_text(text)
    arguments = ["run", "mine.toml", "--run-id", "mine-1", "--set", "iterations=1", "--set", "task.heldout_size=2"]
    done = moerl(*arguments, cwd=tiny.parent, python_path="lib")
    assert done.returncode == 65, done.stderr
    assert "rows.jsonl:2" in done.stderr and "Traceback" not in done.stderr
    rows.write_text("".join(json.dumps({"prompt": f"a{n} ", "answer": "b"}) + "\n" for n in range(12)))
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("resume  ")]
    resumed = paste(line.removeprefix("resume  "), cwd=tiny.parent)
    assert resumed.returncode == 0, resumed.stderr


def copy_of(whole_run: tuple[Path, str], runs_dir: Path) -> RunFolder:
    shutil.copytree(whole_run[0] / "tiny-1", runs_dir / "tiny-1")
    return RunFolder(runs_dir=runs_dir, run_id="tiny-1")


def test_a_full_disk_is_one_line_when_the_page_is_written(
    whole_run: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(whole_run, tmp_path)
    (folder.path / ".report.html.partial").symlink_to("/dev/full")
    assert run_command_line(["report", str(folder.path)]) == 69
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "report.html: the disk is full" in captured.err
    assert "version" in captured.out


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_is_one_line_when_the_output_goes_there(options: list[str], whole_run: tuple[Path, str]) -> None:
    with open("/dev/full", "w") as full:
        line = command("report", "tiny-1", "--runs-dir", str(whole_run[0]), *options)
        done = subprocess.run(line, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 69
    assert done.stderr == "moerl: the output: No space left on device; free some space and run again\n"


def test_the_report_of_the_outcome_does_not_hide_what_ended_the_run(
    whole_run: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(whole_run, tmp_path)
    (folder.path / ".report.html.partial").symlink_to("/dev/full")
    with folder.lock():
        assert run_command_line(["resume", str(folder.path)]) == 69
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "another process" in error


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [("argo", 69, "can't write"), ("lock", 69, "can't write"), ("config.toml", 65, "missing")],
)
def test_a_run_that_lost_a_file_is_one_line(
    name: str, code: int, words: str, whole_run: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(whole_run, tmp_path)
    lost = folder.path / name
    lost.rename(tmp_path / "lost")
    if name == "argo":
        lost.write_text("")
    elif name == "lock":
        lost.mkdir()
    assert run_command_line(["resume", "tiny-1", "--runs-dir", str(tmp_path)]) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error and str(lost) in error


def test_steps_take_the_settings_that_the_command_was_given(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOERL_IMDS", "perhaps")
    finished = moerl("run", "tiny.toml", cwd=tiny.parent)
    assert finished.returncode == 78
    assert "MOERL_IMDS = 'perhaps': set it to on or off" in finished.stderr
