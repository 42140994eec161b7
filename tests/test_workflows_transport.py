"""`moerl transport`: it hands over to the probe, with its options, output and exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workflows.cli import run_command_line

REPOSITORY = Path(__file__).resolve().parents[1]


def moerl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workflows", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_help_of_the_probe_has_its_options_and_examples(tmp_path: Path) -> None:
    done = moerl("transport", "probe", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert "--deduplicate" in done.stdout


def test_the_group_lists_the_probe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["transport", "--help"]) == 0
    assert "probe" in capsys.readouterr().out


def test_a_wrong_option_exits_as_everywhere(tmp_path: Path) -> None:
    done = moerl("transport", "probe", "--tokens", "none", cwd=tmp_path)
    assert done.returncode == 64
    assert done.stderr == "moerl transport probe: argument --tokens: 'none' is not a whole number; see --help\n"


def test_the_probe_runs_from_anywhere_and_prints_json(tmp_path: Path) -> None:
    small = ("--tokens", "8", "--hidden", "16", "--top-k", "2", "--experts", "4", "--repeats", "1")
    done = moerl("transport", "probe", "--ranks", "2", "--json", *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["matches"]
