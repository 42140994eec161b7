"""A real PostgreSQL server for the tests, and a fresh database on SQLite and on PostgreSQL for each test.

One server serves all xdist workers: the first that needs it starts it, the last that ends stops it.
"""

import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psycopg
import pytest

from steps.adapters.database import Database, migrate, open_database

SETTINGS = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "autovacuum=off", "shared_buffers=64MB")
MIGRATED = "migrated"
"""The database that tests get copies of: quicker than migrating an empty one each time."""


@dataclass(frozen=True)
class PostgresServer:
    """A running server that this machine's tests share; `folder` holds its data and its log."""

    port: int
    password: str
    folder: str

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres:{self.password}@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str, template: str = "template1") -> str:
        self._administer(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY FILE_COPY')
        return self.url(name)

    def drop_database(self, name: str) -> None:
        self._administer(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def is_up(self) -> bool:
        try:
            self._administer("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def stop(self) -> None:
        _run([_program("pg_ctl"), "stop", "-m", "immediate", "-D", f"{self.folder}/data"])
        shutil.rmtree(self.folder)

    def restart(self) -> None:
        """As after a crash: every connection breaks, and the log is replayed."""
        self.halt()
        self.resume()

    def halt(self) -> None:
        _check([_program("pg_ctl"), "stop", "-m", "immediate", "-D", f"{self.folder}/data"])

    def resume(self) -> None:
        """Go on after `halt` with the same port and settings."""
        options = Path(self.folder, "options").read_text()
        _check(
            [_program("pg_ctl"), "start", "-w", "-D", f"{self.folder}/data", "-l", f"{self.folder}/log", "-o", options]
        )

    def _administer(self, statement: str) -> None:
        conninfo = f"host=127.0.0.1 port={self.port} user=postgres password={self.password} dbname=postgres"
        with psycopg.connect(conninfo, autocommit=True, connect_timeout=5) as connection:
            connection.execute(statement)  # type: ignore[call-overload]


def start_postgres(settings: tuple[str, ...] = SETTINGS) -> PostgresServer:
    """Start a server on a free port of the loopback interface, with password authentication."""
    folder = Path(tempfile.mkdtemp(prefix="moerl-postgres-"))
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres", "postgres")
    password = secrets.token_hex(8)
    password_file = folder / "password"
    password_file.write_text(password)
    password_file.chmod(0o644)  # the folder itself is private
    _check(
        [_program("initdb"), "-D", f"{folder}/data", "-U", "postgres", "--pwfile", str(password_file)]
        + ["--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C.UTF-8", "--no-sync"]
    )
    for _ in range(5):
        port = _free_port()
        options = f"-h 127.0.0.1 -p {port} -k {folder} " + " ".join(f"-c {setting}" for setting in settings)
        started = _run(
            [_program("pg_ctl"), "start", "-w", "-D", f"{folder}/data", "-l", f"{folder}/log", "-o", options]
        )
        if started.returncode == 0:  # else another process took the port in between
            (folder / "options").write_text(options)
            return PostgresServer(port, password, str(folder))
    raise RuntimeError(f"PostgreSQL didn't start: {started.stdout}{(folder / 'log').read_text()}")


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """The server that all workers of this test run share."""
    basetemp = tmp_path_factory.getbasetemp()
    folder = basetemp.parent if "PYTEST_XDIST_WORKER" in os.environ else basetemp
    with _shared_state(folder) as state:
        server = PostgresServer(**state["server"]) if state.get("server") else None
        if server is None or not server.is_up():
            server = start_postgres()
            migrate(server.create_database(MIGRATED))
        state.update(server=asdict(server), users=[*_living(state), os.getpid()])
    yield server
    with _shared_state(folder) as state:
        state["users"] = [pid for pid in _living(state) if pid != os.getpid()]
        if not state["users"]:
            state["server"] = None
            server.stop()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """URL of a migrated PostgreSQL database of this test's own."""
    name = f"test_{secrets.token_hex(8)}"
    yield postgres_server.create_database(name, MIGRATED)
    postgres_server.drop_database(name)


@pytest.fixture
def empty_postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """URL of an empty PostgreSQL database of this test's own."""
    name = f"test_{secrets.token_hex(8)}"
    yield postgres_server.create_database(name)
    postgres_server.drop_database(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a migrated database of this test's own; the test runs once on each kind."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_url"))
    url = f"sqlite:///{tmp_path}/moerl.db"
    migrate(url)
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database without tables of this test's own, a missing file on SQLite; once on each kind."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("empty_postgres_url"))
    return f"sqlite:///{tmp_path}/moerl.db"


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    """A migrated database of this test's own, on each kind."""
    database = open_database(database_url)
    yield database
    database.close()


def _program(name: str) -> str:
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
    path = str(found[-1]) if found else shutil.which(name)
    if path is None:
        pytest.fail("PostgreSQL's server is not installed; run: apt-get install --yes postgresql", pytrace=False)
    return path


def _as_server_user(command: list[str]) -> list[str]:
    """PostgreSQL refuses to run as root."""
    return ["runuser", "-u", "postgres", "--", *command] if os.geteuid() == 0 else command


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    # stdout goes to a file: the server inherits it and would keep a pipe open.
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(_as_server_user(command), cwd="/", stdout=output, stderr=subprocess.STDOUT, text=True)
        output.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, output.read())


def _check(command: list[str]) -> None:
    done = _run(command)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stdout}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _shared_state(folder: Path) -> Iterator[dict]:
    """JSON that the workers share, one at a time."""
    with open(folder / "postgres.json", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        state = json.loads(file.read() or "{}")
        yield state
        file.seek(0)
        file.truncate()
        file.write(json.dumps(state))
        file.flush()


def _living(state: dict) -> list[int]:
    return [pid for pid in state.get("users", []) if Path(f"/proc/{pid}").exists()]
