"""One database, SQLite or PostgreSQL, behind the same transactions, the same clock and the same errors.

SQLite runs in WAL mode with synchronous=FULL: every commit is synced. With NORMAL a SIGKILL loses nothing either, but a
power cut could undo commits of steps that already reported success; one sync a commit is what PostgreSQL pays too. Only
leases and heartbeats don't wait for the disk: a power cut ends their owners as well.
Writers take the lock at BEGIN (BEGIN IMMEDIATE), so that nobody fails half-way through a transaction; readers see one
snapshot and block nobody.
"""

import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Double, Engine, Table, create_engine, event, make_url, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import QueuePool
from sqlalchemy.sql.functions import FunctionElement

from steps.adapters.database_errors import is_missing_object, is_passing, is_refusal, remedy
from steps.adapters.retries import Outage, retried
from steps.adapters.tables import SCHEMA_REVISION
from steps.errors import ConfigError, ServiceUnavailable, StepError

LOCK_TIMEOUT_S = 5.0
"""Longest wait inside the driver, which no signal ends; who is told that it was in vain tries again (`retries`)."""
CONNECT_TIMEOUT_S = 10
MIGRATION_LOCK = 7_283_649_102
"""Any fixed number: the key of PostgreSQL's advisory lock around a migration."""

DURABLE, VOLATILE = "durable", "volatile"
"""Whether the commit of a writing transaction waits for the disk."""

URL_HELP = "use sqlite:////absolute/file.db or postgresql+psycopg://user:password@host:5432/name"


class database_clock(FunctionElement[float]):
    """The database's clock in an SQL expression: UTC seconds since the epoch, float64."""

    type = Double()
    inherit_cache = True


@compiles(database_clock, "sqlite")
def _sqlite_clock(element: Any, compiler: Any, **options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(database_clock, "postgresql")
def _postgres_clock(element: Any, compiler: Any, **options: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"


@dataclass(frozen=True, slots=True)
class Database:
    """Transactions on one database. Connects at the first use, so that a process may fork after opening."""

    engine: Engine
    url: URL

    @property
    def name(self) -> str:
        """The URL without secrets, for messages."""
        return self.url.set(query={}).render_as_string(hide_password=True)

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[Connection]:
        """All or nothing: commits at the end, rolls back on any exception.

        Args:
            durable: the commit waits for the disk. Without it a power cut may undo the commit, a kill can't; and a
                later durable commit makes this one durable too.

        Raises:
            Outage: the database can't be reached, stops, is locked for too long or has undone the transaction; whether
                a commit was done before the connection broke isn't known. For a function decorated as `retried`.
            ServiceUnavailable: it refuses to serve.
            ConfigError: the database was never migrated, or by another version.
        """
        with self._explained_errors(), self.engine.connect() as connection:
            connection.execution_options(moerl_begin=DURABLE if durable else VOLATILE)
            with connection.begin():
                yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction for reading, on SQLite one snapshot; raises as `transaction` does."""
        with self._explained_errors(), self.engine.connect() as connection, connection.begin():
            yield connection

    @retried
    def now(self) -> float:
        """Seconds since the epoch, UTC, by the database's clock."""
        with self.read() as connection:
            return float(connection.execute(select(database_clock())).scalar_one())

    @retried
    def schema_revision(self) -> str | None:
        """The migration that the database is at; None when it was never migrated."""
        try:
            with self.engine.connect() as connection:
                return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
        except DBAPIError as error:
            if is_missing_object(error.orig):
                return None
            explanation = self._explain(error)
            if explanation is None:
                raise
            raise explanation from error

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            explanation = self._explain(error)
            if explanation is None:
                raise
            raise explanation from error

    def _explain(self, error: DBAPIError) -> StepError | None:
        """The user's error behind a driver's error; None for a bug."""
        if is_missing_object(error.orig):
            return self._explain_schema()
        passing = error.connection_invalidated or is_passing(error.orig)
        if not passing and not is_refusal(error.orig):
            return None
        reason = self._without_secrets(" ".join(str(error.orig).split()))
        line = f"database {self.name}: {reason}; {remedy(error.orig)}"
        return Outage(line) if passing else ServiceUnavailable(line)

    def _explain_schema(self) -> ConfigError | None:
        revision = self.schema_revision()
        if revision == SCHEMA_REVISION:
            return None
        if revision is None:
            return ConfigError(
                f"database {self.name}: it has no tables of ours; check MOERL_DATABASE_URL, "
                "or create them with python -m steps.init_run"
            )
        return ConfigError(
            f"database {self.name}: its tables are at revision {revision}, this version needs {SCHEMA_REVISION}; "
            "use the matching image, or upgrade with python -m steps.init_run"
        )

    def _without_secrets(self, message: str) -> str:
        for secret in (self.url.password, *_query_secrets(self.url)):
            if secret:
                message = message.replace(str(secret), "***")
        return message


def open_database(url: str) -> Database:
    """Prepare access to the database; the first transaction connects.

    Raises:
        ConfigError: the URL is malformed or of another kind than SQLite and PostgreSQL.
    """
    return _open(_parse(url), create=False)


def migrate(url: str) -> None:
    """Bring the database to the newest schema, creating a SQLite file and its folder when there is none.

    Safe when several processes do it at once: one migrates, the others wait and find it done.

    Raises:
        ConfigError: the URL is malformed, or the database belongs to a newer version of this program.
        ServiceUnavailable: the database can't be reached or written.
    """
    parsed = _parse(url)
    if parsed.drivername == "sqlite":
        _create_folder(Path(parsed.database or ""))
    database = _open(parsed, create=True)
    try:
        _bring_to_head(database)
    finally:
        database.close()


def insert_into(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that knows ON CONFLICT, which the two dialects spell alike."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def insert_if_absent(connection: Connection, table: Table, values: Mapping[str, Any]) -> bool:
    """Insert one row unless its key is taken; says whether it was inserted."""
    statement = insert_into(connection, table).values(**values).on_conflict_do_nothing()
    return connection.execute(statement).rowcount == 1


@retried
def _bring_to_head(database: Database) -> None:
    if database.schema_revision() != SCHEMA_REVISION:
        _upgrade(database)


def _upgrade(database: Database) -> None:
    from alembic.util.exc import CommandError

    from steps.adapters.migrations.upgrade import upgrade_to_head

    with database.transaction() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))
        try:
            upgrade_to_head(connection)
        except CommandError as error:
            raise ConfigError(
                f"database {database.name}: made by a newer version of this program ({error}); use that version"
            ) from error


def _create_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServiceUnavailable(
            f"database {path}: can't create its folder ({error.strerror}); choose another MOERL_DATABASE_URL"
        ) from error


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise ConfigError(f"MOERL_DATABASE_URL: not a database URL; {URL_HELP}") from error
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise ConfigError(f"MOERL_DATABASE_URL: steps are processes and need a file; {URL_HELP}")
        return parsed.set(drivername="sqlite")
    if url.partition("?")[0].count("@") > 1:  # read otherwise than it was meant, a part of the password would be shown
        raise ConfigError("MOERL_DATABASE_URL: write @ in its password as %40, and / as %2F")
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise ConfigError(f"MOERL_DATABASE_URL: {backend!r} is not supported; {URL_HELP}")


def _open(url: URL, *, create: bool) -> Database:
    engine = _sqlite_engine(url, create) if url.drivername == "sqlite" else _postgres_engine(url)
    return Database(engine, url)


def _sqlite_engine(url: URL, create: bool) -> Engine:
    file_uri = f"file:{quote(str(Path(url.database or '').absolute()))}?mode={'rwc' if create else 'rw'}"

    def connect() -> sqlite3.Connection:
        # isolation_level None: the driver begins nothing by itself, the listener below does.
        connection = sqlite3.connect(
            file_uri, uri=True, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        if create:
            _enter_wal_mode(connection)
        connection.execute("PRAGMA foreign_keys=ON")
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, hide_parameters=True)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        kind = connection.get_execution_options().get("moerl_begin")
        if kind is None:
            connection.exec_driver_sql("BEGIN")
            return
        connection.exec_driver_sql(f"PRAGMA synchronous={'FULL' if kind == DURABLE else 'NORMAL'}")
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _enter_wal_mode(connection: sqlite3.Connection) -> None:
    """The mode stays in the file; SQLite doesn't wait by itself when two processes change it at once."""
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def _postgres_engine(url: URL) -> Engine:
    arguments: dict[str, Any] = {"application_name": "moerl"}
    if "connect_timeout" not in url.query:
        arguments["connect_timeout"] = CONNECT_TIMEOUT_S
    engine = create_engine(
        url, connect_args=arguments, pool_pre_ping=True, hide_parameters=True, use_native_hstore=False
    )

    @event.listens_for(engine, "connect")
    def bound_waiting(connection: Any, record: Any) -> None:
        # A statement, not a start-up option: connection poolers refuse those.
        connection.autocommit = True
        connection.execute(f"SET lock_timeout = {int(LOCK_TIMEOUT_S * 1000)}")
        connection.autocommit = False

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get("moerl_begin") == VOLATILE:
            connection.exec_driver_sql("SET LOCAL synchronous_commit TO OFF")

    return engine


def _query_secrets(url: URL) -> list[str]:
    values = (url.query.get(key, "") for key in ("password", "sslpassword"))
    return [value for entry in values for value in ([entry] if isinstance(entry, str) else entry)]
