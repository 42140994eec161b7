"""Commands that are printed can be pasted."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from workflows.printed_commands import mlflow_command, moerl_command, shown_path


def test_the_printed_command_starts_this_program_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for folder in (tmp_path, Path(sys.executable).parent):
        monkeypatch.chdir(folder)
        done = subprocess.run(moerl_command("resume", "--help"), shell=True, capture_output=True, text=True)
        assert done.returncode == 0 and "Usage: moerl resume" in done.stdout, done.stderr


def test_without_console_scripts_the_interpreter_runs_the_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = str(tmp_path / "python")
    monkeypatch.setattr(sys, "executable", python)
    assert shlex.split(moerl_command("resume", "a b")) == [python, "-m", "workflows", "resume", "a b"]
    assert shlex.split(mlflow_command("ui")) == [python, "-m", "mlflow", "ui"]


def test_paths_are_relative_where_that_is_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_path(tmp_path / "runs") == "runs"
    assert shown_path(Path("/etc")) == "/etc"
    assert shown_path(tmp_path / "-x") == "./-x"
