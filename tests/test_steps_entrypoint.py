"""The frame around a step: a bug keeps its traceback and exits 1, a user's error is one line, the ledger knows both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from steps.adapters import ledger
from steps.adapters.database import Database, migrate, open_database

PROGRAM = """
import sys
from pathlib import Path
from steps import entrypoint
from steps.errors import DataError

def body(context):
    context.metrics["samples"] = 3
    context.progress(2, 4)
    context.output("answer", 42)
    {action}

entrypoint.TERMINATION_LOG = Path(sys.argv[1])
entrypoint.execute("plan", body, run_id="run-1", iteration=7)
"""


class Frame:
    """Runs a body in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/moerl.sqlite"
        self.termination_log = folder / "termination-log"
        self.termination_log.touch()
        migrate(self.url)

    def run(self, action: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {
            "MOERL_STORE": str(self.folder / "store"),
            "MOERL_DATABASE_URL": self.url,
            "MOERL_OUTPUTS_DIR": str(self.folder / "outputs"),
            "ARGO_PROGRESS_FILE": str(self.folder / "progress"),
            "MOERL_ATTEMPT": "2",
            "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        }
        command = [sys.executable, "-c", PROGRAM.format(action=action), str(self.termination_log)]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    @property
    def database(self) -> Database:
        return open_database(self.url)


@pytest.fixture
def frame(tmp_path: Path) -> Frame:
    return Frame(tmp_path)


def test_outputs_progress_and_metrics_arrive(frame: Frame) -> None:
    assert frame.run("pass").returncode == 0
    assert (frame.folder / "outputs" / "answer").read_text() == "42"
    assert (frame.folder / "progress").read_text() == "2/4\n"
    (attempt,) = ledger.list_attempts(frame.database, "run-1")
    assert (attempt.step, attempt.iteration, attempt.exit_code, attempt.metrics) == ("plan", 7, 0, {"samples": 3})
    assert attempt.provenance["retry"] == 2
    assert json.dumps(attempt.provenance["versions"]).count("torch") == 1


def test_a_users_error_is_one_line_for_the_log_and_for_argo(frame: Frame) -> None:
    result = frame.run("raise DataError('row 3 is wrong')")
    assert result.returncode == 65
    assert result.stderr == "plan: row 3 is wrong\n"
    assert frame.termination_log.read_text() == "plan: row 3 is wrong"
    (attempt,) = ledger.list_attempts(frame.database, "run-1")
    assert (attempt.exit_code, attempt.detail) == (65, "row 3 is wrong")


def test_a_bug_keeps_its_traceback_and_exits_1(frame: Frame) -> None:
    result = frame.run("1 / 0")
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "ZeroDivisionError" in result.stderr
    (attempt,) = ledger.list_attempts(frame.database, "run-1")
    assert (attempt.exit_code, attempt.detail) == (1, "ZeroDivisionError: division by zero")


def test_a_database_that_is_gone_at_the_end_does_not_hide_why_the_step_failed(frame: Frame) -> None:
    result = frame.run(
        "__import__('os').rename('{0}', '{0}.away'); raise DataError('the real reason')".format(
            frame.url.removeprefix("sqlite:///")
        )
    )
    assert result.returncode == 65
    assert "the real reason" in result.stderr and "Traceback" not in result.stderr
