"""A database that restarts, is locked, gives up on a transaction or loses its answer, under real steps."""

import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select, text, update

from steps.adapters import database as database_module
from steps.adapters import ledger, retries
from steps.adapters.database import Database, migrate, open_database
from steps.adapters.database_errors import is_passing
from steps.adapters.retries import Outage, retried
from steps.adapters.tables import evaluations, interruptions, publications, runs, step_attempts
from steps.errors import ServiceUnavailable
from steps.records import Evaluation, Publication
from tests.fixtures_postgres import SETTINGS, PostgresServer, start_postgres
from tests.fixtures_steps import RUN, STAGES, StepRunner, stage_argv

PUBLICATION = Publication(
    run_id="r",
    policy_version=1,
    parent_version=0,
    uri="file:///p",
    manifest_sha256="m",
    weights_sha256="w",
    size_bytes=1,
)
NEXT = replace(PUBLICATION, policy_version=2, parent_version=1)
EVALUATION = Evaluation(run_id="r", policy_version=1, reward_eval=0.5, num_prompts=4, validated=True, reason="better")


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server of this test's own, to be restarted."""
    # Without fsync: the machine stays up. What was committed must be in the log, though.
    server = start_postgres(tuple(setting for setting in SETTINGS if not setting.startswith("synchronous_commit")))
    yield server
    server.stop()


@pytest.fixture
def on_own_server(own_server: PostgresServer, steps: StepRunner, monkeypatch: pytest.MonkeyPatch) -> StepRunner:
    monkeypatch.setenv("MOERL_SERVICE_DEADLINE_S", "60")
    steps.database_url = own_server.create_database("moerl")
    steps.env["MOERL_DATABASE_URL"] = steps.database_url
    return steps


@contextmanager
def restarted_again_and_again(server: PostgresServer) -> Iterator[list[int]]:
    """Restart the server as often as possible; the list grows by one for each time."""
    restarts: list[int] = []
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.5):
            server.restart()
            restarts.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield restarts
    finally:
        ended.set()
        thread.join()


def test_postgresql_restarts_all_the_time_and_nothing_is_lost(
    own_server: PostgresServer, on_own_server: StepRunner, undisturbed_weights: str
) -> None:
    steps = on_own_server
    assert steps.init().code == 0
    with restarted_again_and_again(own_server) as restarts:
        for stage in STAGES:
            workers = (0, 1) if stage in ("rollout", "reward") else (0,)
            for result in steps.run_together([stage_argv(stage, worker=worker) for worker in workers]):
                assert result.code == 0, result.log
    steps.iterate(2)
    assert len(restarts) >= 3
    assert steps.final_weights() == undisturbed_weights
    attempts = ledger.list_attempts(steps.database, RUN)
    assert [row.exit_code for row in attempts] == [0] * (1 + len(STAGES) + 2 + len(STAGES))


def test_a_step_that_waits_for_the_database_says_so_and_stops_when_it_is_told_to(
    own_server: PostgresServer, on_own_server: StepRunner, tmp_path: Path
) -> None:
    steps = on_own_server
    assert steps.init().code == 0
    own_server.halt()

    def waits() -> bool:
        return any("plan: trying again for" in log.read_text() for log in tmp_path.glob("step-*/log"))

    (result,) = steps.run_together([stage_argv("plan")], signal_when=(waits, signal.SIGTERM))
    assert result.code == 75, result.log
    assert "plan: interrupted by SIGTERM while waiting: database postgresql+psycopg://postgres:***@" in result.log
    assert "Traceback" not in result.log and own_server.password not in result.log
    own_server.resume()
    assert steps.step("plan").code == 0


def test_a_transaction_that_a_deadlock_ended_is_done_again(postgres_url: str) -> None:
    db = open_database(postgres_url)
    with db.transaction() as connection:
        for name in ("a", "b"):
            connection.execute(runs.insert().values(run_id=name, config_json="{}", config_hash="", created_at=0.0))
    both_hold_one = threading.Barrier(2)
    tries: list[str] = []

    @retried
    def touch(first: str, second: str) -> None:
        tries.append(first)
        with db.transaction() as connection:
            mark(connection, first)
            if len(tries) <= 2:
                both_hold_one.wait()
            mark(connection, second)

    def mark(connection: Connection, name: str) -> None:
        connection.execute(update(runs).where(runs.c.run_id == name).values(config_hash=runs.c.config_hash + "x"))

    threads = [threading.Thread(target=touch, args=pair) for pair in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with db.read() as connection:
        assert list(connection.execute(select(runs.c.config_hash)).scalars()) == ["xx", "xx"]
    assert len(tries) == 3
    db.close()


def test_a_lock_that_is_held_for_long_is_waited_for(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "LOCK_TIMEOUT_S", 0.02)
    monkeypatch.setenv("MOERL_SERVICE_DEADLINE_S", "60")
    db, holder = open_database(database_url), open_database(database_url)
    ledger.create_run(db, "r", "{}", "hash")
    change = text("UPDATE runs SET config_hash = 'other'")
    tried = threading.Event()
    monkeypatch.setattr(retries._Wait, "pause", lambda self, seconds: tried.set() or time.sleep(0.01))
    waiting = threading.Thread(target=retried(lambda: _execute(db, change)))
    with holder.transaction() as connection:
        connection.execute(change)
        waiting.start()
        assert tried.wait(30)
    waiting.join()
    with db.read() as connection:
        assert connection.execute(select(runs.c.config_hash)).scalar_one() == "other"
    db.close()
    holder.close()


def _execute(db: Database, statement: Any) -> None:
    with db.transaction() as connection:
        connection.execute(statement)


@contextmanager
def lost_answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The first commit of each function is done, and its answer lost."""
    real, lost = Database.transaction, []

    @contextmanager
    def transaction(self: Database, *, durable: bool = True) -> Iterator[Connection]:
        with real(self, durable=durable) as connection:
            yield connection
        if not lost:
            lost.append(1)
            raise Outage("database: the connection was lost while committing")

    monkeypatch.setattr(Database, "transaction", transaction)
    yield lost
    monkeypatch.setattr(Database, "transaction", real)


ATTEMPT = dict(run_id="r", iteration=None, step="plan", worker=None, pod="p", node="n", capacity_type="spot")
WRITES: dict[str, tuple[Callable[[Database], Any], Any]] = {
    "begin_attempt": (lambda db: ledger.begin_attempt(db, **ATTEMPT), step_attempts),
    "record_interruption": (lambda db: ledger.record_interruption(db, 1, "SIGTERM"), interruptions),
    "create_run": (lambda db: ledger.create_run(db, "s", "{}", "hash"), runs),
    "record_publication": (
        lambda db: ledger.record_publication(db, NEXT),
        publications,
    ),
    "record_evaluation": (lambda db: ledger.record_evaluation(db, EVALUATION), evaluations),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_commit_whose_answer_is_lost_is_recognised_and_not_done_twice(
    db: Database, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, table = WRITES[name]
    ledger.create_run(db, "r", "{}", "hash")
    ledger.record_publication(db, PUBLICATION)
    if table is interruptions:
        ledger.begin_attempt(db, **ATTEMPT)
    before = _count(db, table)
    with lost_answers(monkeypatch) as lost:
        write(db)
    assert lost and _count(db, table) == before + 1


def test_an_attempt_keeps_its_first_end_when_the_answer_is_lost(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = ledger.begin_attempt(db, **ATTEMPT)
    with lost_answers(monkeypatch) as lost:
        ledger.end_attempt(db, attempt, exit_code=0, detail="first")
    (row,) = ledger.list_attempts(db, "r")
    assert lost and (row.attempt_id, row.exit_code, row.detail) == (attempt, 0, "first")


def _count(db: Database, table: Any) -> int:
    with db.read() as connection:
        return len(connection.execute(select(table)).all())


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, seconds: float) -> None:
        raise AssertionError("it waited")

    monkeypatch.setenv("MOERL_SERVICE_DEADLINE_S", "60")
    monkeypatch.setattr(retries._Wait, "pause", fail)


def test_what_no_waiting_mends_is_said_at_once(postgres_server: PostgresServer, no_waiting: None) -> None:
    url = postgres_server.url("postgres")
    for wrong in (url.replace(postgres_server.password, "wrong"), postgres_server.url("nowhere"), url + "?nothing=1"):
        with pytest.raises(ServiceUnavailable):
            open_database(wrong).now()


def test_a_full_or_broken_disk_is_said_at_once(tmp_path: Path, no_waiting: None) -> None:
    migrate(f"sqlite:///{tmp_path}/moerl.db")
    db = open_database(f"sqlite:///{tmp_path}/moerl.db")
    for code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_READONLY):

        @retried
        def fail(code: int = code) -> None:
            with db.transaction():
                error = sqlite3.OperationalError("the disk refuses")
                error.sqlite_errorcode = code
                raise database_module.DBAPIError("INSERT", None, error)

        with pytest.raises(ServiceUnavailable, match="the disk refuses"):
            fail()
    db.close()


def test_a_server_that_starts_up_or_shuts_down_is_waited_for() -> None:
    class OperationalError(Exception):
        sqlstate = None

    for passing in ("the database system is starting up", "Connection refused", "sorry, too many clients already"):
        assert is_passing(OperationalError(f"connection failed: FATAL:  {passing}"))
    for final in ('password authentication failed for user "m"', 'database "m" does not exist', "no pg_hba.conf entry"):
        assert not is_passing(OperationalError(f"connection failed: FATAL:  {final}"))
