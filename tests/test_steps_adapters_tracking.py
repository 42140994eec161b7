import math
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steps.adapters.spool import Artifact, Event, Metric, Params, RegisteredVersion, RunStatus, Spool, Tags
from steps.adapters.store import Store, open_store
from steps.adapters.tracking import Tracker
from steps.errors import DataError
from steps.paths import spool_prefix
from tests.s3_servers import free_port

RUN = "digits-1"
LONG_BUDGET_S = 120.0
START_MS = 1_700_000_000_000


def metrics_of(iteration: int) -> list[Event]:
    return [
        Metric(key="reward mean!", value=iteration / 10, step=iteration, timestamp_ms=START_MS + iteration),
        Metric(key="actor/entropy", value=math.nan, step=iteration, timestamp_ms=START_MS + iteration),
    ]


def first_events() -> list[Event]:
    return [
        RunStatus(state="RUNNING", timestamp_ms=START_MS),
        Params(values={"seed": "0", "model.hidden size": "128"}),
        Tags(values={"workflow": "abc"}),
        Artifact(name="config.toml", text="seed = 0\n"),
        *metrics_of(1),
    ]


def published(version: int, *aliases: str) -> RegisteredVersion:
    return RegisteredVersion(name="digits", source=f"file:///store/publications/{version:05d}", aliases=aliases)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def sqlite_tracker(store: Store, path: Path, run_id: str = RUN) -> Tracker:
    return Tracker(store, run_id, "experiment", LONG_BUDGET_S, f"sqlite:///{path}")


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An MLflow database without runs, so that not each test pays for its migrations."""
    from steps.adapters.mlflow_run import create_sqlite_file

    path = tmp_path_factory.mktemp("mlflow") / "new" / "mlflow.db"
    create_sqlite_file(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["mlflow.db"]
    return path.read_bytes()


@pytest.fixture
def database(tmp_path: Path, empty_database: bytes) -> Path:
    path = tmp_path / "mlflow.db"
    path.write_bytes(empty_database)
    return path


def rows(database: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(query).fetchall()


def test_everything_arrives_once_with_its_original_time(store: Store, database: Path) -> None:
    tracker = sqlite_tracker(store, database)
    tracker.record("00000-init", first_events())
    tracker.record("00002-train", [*metrics_of(2), RunStatus(state="FINISHED", timestamp_ms=START_MS + 99)])
    result = tracker.forward()
    assert (result.sent, result.pending, result.reason) == (2, 0, "")
    found = rows(database, "select key, value, step, timestamp, is_nan from metrics order by key, step")
    assert found == [
        ("actor/entropy", 0.0, 1, START_MS + 1, 1),
        ("actor/entropy", 0.0, 2, START_MS + 2, 1),
        ("reward mean_", 0.1, 1, START_MS + 1, 0),
        ("reward mean_", 0.2, 2, START_MS + 2, 0),
    ]
    assert rows(database, "select key, value from params order by key") == [("model.hidden size", "128"), ("seed", "0")]
    assert rows(database, "select status, start_time, end_time from runs") == [
        ("FINISHED", START_MS + 1, START_MS + 99)
    ]
    [(artifact_uri,)] = rows(database, "select artifact_uri from runs")
    assert Path(str(artifact_uri).removeprefix("file://"), "config.toml").read_text() == "seed = 0\n"
    assert Path(str(artifact_uri).removeprefix("file://")).is_relative_to(database.parent)


def test_a_second_forward_sends_nothing(store: Store, database: Path) -> None:
    tracker = sqlite_tracker(store, database)
    tracker.record("a", metrics_of(1))
    assert tracker.forward().sent == 1
    assert tracker.forward() == sqlite_tracker(store, database).forward()
    assert tracker.forward().sent == 0


def test_a_replay_after_a_lost_mark_changes_nothing(store: Store, database: Path) -> None:
    tracker = sqlite_tracker(store, database)
    tracker.record("a", [*first_events(), published(1, "candidate")])
    assert tracker.forward().sent == 1
    before = [rows(database, f"select * from {table}") for table in ("metrics", "params", "model_versions")]
    store.delete([f"{spool_prefix(RUN)}/sent/a"])
    assert tracker.forward().reason == ""
    assert [rows(database, f"select * from {table}") for table in ("metrics", "params", "model_versions")] == before
    assert rows(database, "select count(*) from runs") == [(1,)]


def test_the_first_record_of_a_name_stays(store: Store) -> None:
    spool = Spool(store, spool_prefix(RUN))
    Tracker(store, RUN, "experiment", 1.0, None).record("a", metrics_of(1))
    Tracker(store, RUN, "experiment", 1.0, None).record("a", metrics_of(2))
    assert [event.step for event in spool.read("a") if isinstance(event, Metric)] == [1, 1]


def test_steps_that_forward_at_once_share_one_run(store: Store, database: Path) -> None:
    for number in range(4):
        Tracker(store, RUN, "experiment", 1.0, None).record(f"{number}", metrics_of(number))
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: sqlite_tracker(store, database).forward(), range(4)))
    assert sqlite_tracker(store, database).forward().pending == 0
    assert sum(result.sent for result in results) >= 4
    assert rows(database, "select count(*) from runs where lifecycle_stage = 'active'") == [(1,)]
    kept = "select count(*) from metrics m join runs r on r.run_uuid = m.run_uuid where lifecycle_stage = 'active'"
    assert rows(database, kept) == [(8,)]


def test_two_training_runs_have_two_mlflow_runs(store: Store, database: Path) -> None:
    for run_id in ("one", "two"):
        tracker = sqlite_tracker(store, database, run_id)
        tracker.record("a", metrics_of(1))
        tracker.forward()
    found = rows(database, "select value from tags where key = 'moerl.run_id' order by value")
    assert found == [("one",), ("two",)]


def test_an_alias_follows_the_newest_version_and_never_goes_back(store: Store, database: Path) -> None:
    tracker = sqlite_tracker(store, database)
    tracker.record("1", [published(1, "candidate", "champion")])
    tracker.record("2", [published(2, "candidate")])
    tracker.forward()
    store.delete([f"{spool_prefix(RUN)}/sent/1"])
    tracker.forward()
    assert rows(database, "select alias, version from registered_model_aliases order by alias") == [
        ("candidate", 2),
        ("champion", 1),
    ]
    tags = rows(database, "select version, value from model_version_tags where key = 'moerl.source' order by version")
    assert tags == [(1, published(1).source), (2, published(2).source)]


def test_what_the_server_will_never_take_is_named_and_not_sent_again(store: Store, database: Path) -> None:
    tracker = sqlite_tracker(store, database)
    tracker.record("1", [Params(values={"seed": "0"})])
    tracker.record("2", [Params(values={"seed": "1"}), *metrics_of(2)])
    result = tracker.forward()
    assert (result.sent, result.pending) == (2, 0)
    assert "refused" in result.reason and "seed" in result.reason and "\n" not in result.reason
    assert rows(database, "select count(*) from metrics") == [(2,)]
    assert tracker.forward().sent == 0


def test_many_metrics_arrive(store: Store, database: Path) -> None:
    tracker = sqlite_tracker(store, database)
    events = [Metric(key="loss", value=float(step), step=step, timestamp_ms=START_MS) for step in range(2500)]
    tracker.record("1", events)
    assert tracker.forward().pending == 0
    assert rows(database, "select count(*) from metrics") == [(2500,)]


def test_without_a_server_everything_stays_pending(store: Store) -> None:
    tracker = Tracker(store, RUN, "experiment", 1.0, "")
    tracker.record("a", metrics_of(1))
    result = tracker.forward()
    assert (result.sent, result.pending, result.run_url) == (0, 1, None)
    assert "MLFLOW_TRACKING_URI" in result.reason


def test_a_refusing_server_costs_no_mlflow_import(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from steps.adapters.spool import Tags\n"
        "from steps.adapters.store import open_store\n"
        "from steps.adapters.tracking import Tracker\n"
        "tracker = Tracker(open_store(sys.argv[1]), 'r', 'e', 3.0, sys.argv[2])\n"
        "tracker.record('a', [Tags(values={'a': 'b'})])\n"
        "print(tracker.forward(), 'mlflow' in sys.modules)\n"
    )
    uri = f"http://me:secret@127.0.0.1:{free_port()}"
    answer = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), uri],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
    ).stdout
    assert "sent=0, pending=1" in answer and "Connection refused" in answer and answer.endswith("False\n")
    assert "secret" not in answer


@contextmanager
def black_hole(accepts: bool) -> Iterator[int]:
    """A port where connections are accepted and never answered, or (full backlog) never accepted."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(128 if accepts else 0)
        port = int(server.getsockname()[1])
        clients = []
        if not accepts:
            for _ in range(4):
                client = socket.socket()
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
                clients.append(client)
        try:
            yield port
        finally:
            for client in clients:
                client.close()


@pytest.mark.parametrize("accepts", [True, False])
def test_a_silent_server_costs_the_budget_and_loses_nothing(store: Store, database: Path, accepts: bool) -> None:
    with black_hole(accepts) as port:
        tracker = Tracker(store, RUN, "experiment", 0.5, f"http://127.0.0.1:{port}")
        tracker.record("a", metrics_of(1))
        result = tracker.forward()
    assert (result.sent, result.pending) == (0, 1) and f":{port}" in result.reason
    assert sqlite_tracker(store, database).forward().sent == 1
    assert rows(database, "select count(*) from metrics") == [(2,)]


def test_an_abandoned_forward_does_not_keep_the_process(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "import steps.adapters.mlflow_run\n"
        "from steps.adapters.spool import Tags\n"
        "from steps.adapters.store import open_store\n"
        "from steps.adapters.tracking import Tracker\n"
        "tracker = Tracker(open_store(sys.argv[1]), 'r', 'e', 0.2, sys.argv[2])\n"
        "tracker.record('a', [Tags(values={'a': 'b'})])\n"
        "print(tracker.forward().pending, flush=True)\n"
    )
    with black_hole(accepts=True) as port:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), f"http://127.0.0.1:{port}"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "MLFLOW_HTTP_REQUEST_TIMEOUT": "600"},
        )
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        assert process.wait(timeout=60) == 0


@contextmanager
def mlflow_server(port: int, folder: Path) -> Iterator[str]:
    """`mlflow server` on a SQLite backend; killed at the end of the block."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder}/server.db",
        "--artifacts-destination",
        f"{folder}/artifacts",
    ]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1"}
    with open(folder / "server.log", "a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while not _answers(f"{url}/health"):
            assert process.poll() is None and time.monotonic() < deadline, (folder / "server.log").read_text()
            time.sleep(0.1)
        yield url
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_a_server_that_dies_and_returns_gets_everything(store: Store, tmp_path: Path, empty_database: bytes) -> None:
    (tmp_path / "server.db").write_bytes(empty_database)
    port = free_port()
    tracker = Tracker(store, RUN, "experiment", LONG_BUDGET_S, f"http://127.0.0.1:{port}")
    with mlflow_server(port, tmp_path) as url:
        tracker.record("1", [*first_events(), published(1, "candidate")])
        first = tracker.forward()
        assert (first.sent, first.pending, first.reason) == (1, 0, "")
        assert first.run_url is not None and first.run_url.startswith(f"{url}/#/experiments/")
    tracker.record("2", [*metrics_of(2), Artifact(name="reports/2.html", text="<p>2</p>")])
    tracker.record("3", [*metrics_of(3), published(3, "candidate")])
    down = tracker.forward()
    assert (down.sent, down.pending) == (0, 2) and "Connection refused" in down.reason
    with mlflow_server(port, tmp_path):
        again = tracker.forward()
        assert (again.sent, again.pending, again.reason, again.run_url) == (2, 0, "", first.run_url)
    found = rows(tmp_path / "server.db", "select step, timestamp from metrics where key = 'reward mean_' order by step")
    assert found == [(1, START_MS + 1), (2, START_MS + 2), (3, START_MS + 3)]
    assert rows(tmp_path / "server.db", "select count(*) from runs") == [(1,)]
    assert rows(tmp_path / "server.db", "select alias, version from registered_model_aliases") == [("candidate", 2)]
    assert [path.read_text() for path in (tmp_path / "artifacts").rglob("2.html")] == ["<p>2</p>"]


def test_a_malformed_spool_line_is_named(store: Store) -> None:
    store.put_bytes(f"{spool_prefix(RUN)}/a.jsonl", b'{"kind": "metric", "key": 1}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1: not a tracking event"):
        Spool(store, spool_prefix(RUN)).read("a")


def test_a_malformed_record_is_a_reason_and_stops_what_follows(store: Store, database: Path) -> None:
    tracker = sqlite_tracker(store, database)
    tracker.record("1", metrics_of(1))
    store.put_bytes(f"{spool_prefix(RUN)}/2.jsonl", b"{")
    tracker.record("3", metrics_of(3))
    result = tracker.forward()
    assert (result.sent, result.pending) == (1, 2) and "2.jsonl:1: not a tracking event" in result.reason


def test_a_run_that_goes_on_is_running_until_it_finishes_again(store: Store, database: Path) -> None:
    tracker = sqlite_tracker(store, database)

    def status_after(name: str, *events: RunStatus) -> tuple[object, ...]:
        tracker.record(name, events)
        assert tracker.forward().reason == ""
        [row] = rows(database, "select status, end_time from runs")
        return row

    assert status_after("00000-run", RunStatus(state="RUNNING", timestamp_ms=START_MS)) == ("RUNNING", None)
    finished = RunStatus(state="FINISHED", timestamp_ms=START_MS + 10)
    assert status_after("00002-run-end", finished) == ("FINISHED", START_MS + 10)
    assert status_after("00002-start", RunStatus(state="RUNNING", timestamp_ms=START_MS + 20))[0] == "RUNNING"
    finished = RunStatus(state="FINISHED", timestamp_ms=START_MS + 30)
    assert status_after("00004-run-end", finished) == ("FINISHED", START_MS + 30)
    assert rows(database, "select count(*) from runs") == [(1,)]


def test_the_database_may_be_created_twice_at_once(tmp_path: Path) -> None:
    from steps.adapters.mlflow_run import create_sqlite_file

    path = tmp_path / "mlflow.db"
    threads = [threading.Thread(target=create_sqlite_file, args=(path,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry.name for entry in tmp_path.iterdir()] == ["mlflow.db"]


@given(st.text(max_size=300))
def test_every_name_becomes_one_that_mlflow_takes(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    from steps.adapters.mlflow_run import valid_name

    _validate_metric_name(valid_name(name))


@given(
    st.lists(
        st.builds(
            Metric,
            key=st.text(),
            value=st.floats(allow_nan=False),
            step=st.integers(0, 2**40),
            timestamp_ms=st.integers(0, 2**50),
        )
    )
)
def test_metrics_survive_the_spool(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> None:
    spool = Spool(open_store(str(tmp_path_factory.mktemp("spool"))), "runs/r/tracking")
    spool.write("a", events)
    assert spool.read("a") == events
