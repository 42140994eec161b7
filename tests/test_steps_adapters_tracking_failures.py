"""Whatever is wrong with tracking is a reason in the result: it neither fails nor holds up a step."""

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from steps.adapters import tracking
from steps.adapters.spool import Metric, Spool
from steps.adapters.store import Store, open_store
from steps.adapters.tracking import Tracker
from steps.paths import spool_prefix

RUN = "digits-1"
LONG_BUDGET_S = 120.0
EVENTS = [Metric(key="reward_mean", value=0.5, step=1, timestamp_ms=1_700_000_000_000)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def reason_of_failure(store: Store, uri: str) -> str:
    """Why one record stayed in the spool, which must be all that a failure does."""
    tracker = Tracker(store, RUN, "experiment", LONG_BUDGET_S, uri)
    tracker.record("a", EVENTS)
    result = tracker.forward()
    assert (result.sent, result.pending, result.run_url) == (0, 1, None)
    assert Spool(store, spool_prefix(RUN)).pending() == ["a"]
    assert "\n" not in result.reason and "pa-ss" not in result.reason
    return result.reason


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("sqlite:///mlflow.db", "use four slashes and an absolute path"),
        ("http://me:pa-ss@host:notaport", "use http://host:port"),
        ("http://me:pa-ss/pa-ss@host", "use http://host:port"),
        ("http://host:99999", "use http://host:port"),
        ("http://[host", "use http://host:port"),
        (f"http://{'x' * 70}.example", "use http://host:port"),
        ("no-such-scheme://me:pa-ss@host", r"no-such-scheme://\*\*\*@host: "),
        ("oracle+nothing://me:pa-ss@host/x", r"oracle\+nothing://\*\*\*@host/x: "),
    ],
)
def test_an_unusable_tracking_uri_is_a_reason(store: Store, uri: str, reason: str) -> None:
    assert re.search(reason, reason_of_failure(store, uri))


def test_a_sqlite_file_that_cannot_be_used_is_a_reason(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no database, but longer than the header of one would be: " * 20)
    (tmp_path / "folder").mkdir()
    assert "is a file, not a directory" in reason_of_failure(store, f"sqlite:///{tmp_path}/file/x/mlflow.db")
    assert "DatabaseError: file is not a database" in reason_of_failure(store, f"sqlite:///{tmp_path}/file")
    assert "unable to open database file" in reason_of_failure(store, f"sqlite:///{tmp_path}/folder")
    assert "/proc/mlflow.db" in reason_of_failure(store, "sqlite:////proc/mlflow.db")


def test_a_sqlite_file_that_is_never_ready_costs_the_allowance(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import steps.adapters.mlflow_run  # noqa: F401  # so that the allowance isn't spent on loading it

    monkeypatch.setattr(tracking, "SQLITE_PREPARATION_S", 0.2)
    path = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("CREATE TABLE held (x)")
        holder.execute("BEGIN EXCLUSIVE")
        assert "MLflow was not ready within 0.2 s" in reason_of_failure(store, f"sqlite:///{path}")


def test_without_the_mlflow_package_everything_stays_pending(store: Store, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules['mlflow'] = None\n"
        "from steps.adapters.store import open_store\n"
        "from steps.adapters.tracking import Tracker\n"
        "print(Tracker(open_store(sys.argv[1]), sys.argv[2], 'e', 60.0, sys.argv[3]).forward())\n"
    )
    Tracker(store, RUN, "experiment", 1.0, None).record("a", EVENTS)
    answer = subprocess.run(
        [sys.executable, "-c", program, store.uri, RUN, f"sqlite:///{tmp_path}/mlflow.db"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    assert "sent=0, pending=1" in answer.stdout and "ModuleNotFoundError" in answer.stdout
    assert answer.stderr == ""
