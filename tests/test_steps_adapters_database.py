"""steps/adapters/database.py and its migrations, on SQLite and on PostgreSQL."""

import time
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import func, inspect, select, text
from sqlalchemy.exc import DBAPIError

from steps.adapters import database, migrations
from steps.adapters.attempts import list_attempts
from steps.adapters.database import Database, database_clock, migrate, open_database
from steps.adapters.tables import SCHEMA_REVISION, metadata, runs
from steps.errors import ConfigError, ServiceUnavailable
from tests.experience import in_processes, migrate_database
from tests.fixtures_postgres import PostgresServer


def add_run(db: Database, run_id: str = "run-1") -> None:
    with db.transaction() as connection:
        values = {"run_id": run_id, "config_json": "{}", "config_hash": "h", "created_at": database_clock()}
        connection.execute(runs.insert().values(values))


def count_runs(db: Database) -> int:
    with db.read() as connection:
        return int(connection.execute(select(func.count()).select_from(runs)).scalar_one())


def assert_one_line(error: pytest.ExceptionInfo[Exception], *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_transaction_commits_at_its_end(db: Database) -> None:
    add_run(db)
    assert count_runs(db) == 1


def test_a_transaction_that_raises_leaves_nothing(db: Database) -> None:
    with pytest.raises(RuntimeError), db.transaction() as connection:
        connection.execute(runs.insert().values(run_id="r", config_json="{}", config_hash="h", created_at=0.0))
        raise RuntimeError
    assert count_runs(db) == 0


def test_a_reader_neither_waits_for_a_writer_nor_sees_its_open_transaction(db: Database) -> None:
    with db.transaction() as connection:
        connection.execute(runs.insert().values(run_id="r", config_json="{}", config_hash="h", created_at=0.0))
        assert count_runs(db) == 0
    assert count_runs(db) == 1


def test_the_clock_is_utc_seconds_since_the_epoch(db: Database) -> None:
    before = db.now()
    assert abs(before - time.time()) < 1800  # half an hour: it tells a time zone from UTC
    assert db.now() >= before


def test_foreign_keys_are_enforced(db: Database) -> None:
    with pytest.raises(DBAPIError), db.transaction() as connection:
        connection.execute(
            text("INSERT INTO iteration_metrics (run_id, iteration, phase, metrics_json) VALUES ('no', 1, 'p', '{}')")
        )


def test_migrating_twice_changes_nothing(empty_database_url: str) -> None:
    migrate(empty_database_url)
    db = open_database(empty_database_url)
    add_run(db)
    migrate(empty_database_url)
    assert count_runs(db) == 1
    db.close()


def test_processes_that_migrate_at_once_all_succeed(empty_database_url: str) -> None:
    in_processes(migrate_database, [(empty_database_url,)] * 4)
    db = open_database(empty_database_url)
    assert db.schema_revision() == SCHEMA_REVISION
    add_run(db)
    db.close()


def test_the_migrations_create_exactly_the_tables_of_the_code(db: Database) -> None:
    with db.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        inspector = inspect(connection)
        for table in metadata.tables.values():
            declared = {constraint.name for constraint in table.constraints if "ck_" in str(constraint.name)}
            assert {check["name"] for check in inspector.get_check_constraints(table.name)} == declared


def test_a_database_of_the_first_release_is_upgraded_with_what_is_in_it(empty_database_url: str) -> None:
    if empty_database_url.startswith("sqlite"):
        Path(empty_database_url.removeprefix("sqlite:///")).touch()
    db = open_database(empty_database_url)
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    names = "run_id, step, pod, node, capacity_type, started_at, detail, provenance_json, metrics_json"
    with db.transaction() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.execute(
            text(
                f"INSERT INTO step_attempts ({names}) VALUES ('r', 'train', 'p', 'n', 'spot', 1.0, '', '{{}}', '{{}}')"
            )
        )
    migrate(empty_database_url)
    (attempt,) = list_attempts(db, "r")
    assert (attempt.step, attempt.transport) == ("train", {})
    db.close()


def test_the_known_revision_is_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    assert ScriptDirectory.from_config(config).get_heads() == [SCHEMA_REVISION]


def test_a_database_that_was_never_migrated_says_so(empty_database_url: str) -> None:
    if empty_database_url.startswith("sqlite"):
        Path(empty_database_url.removeprefix("sqlite:///")).touch()
    db = open_database(empty_database_url)
    with pytest.raises(ConfigError) as error:
        count_runs(db)
    assert_one_line(error, "no tables of ours", "python -m steps.init_run")
    db.close()


def test_a_database_of_a_newer_version_is_refused_and_unharmed(db: Database, database_url: str) -> None:
    add_run(db)
    with db.transaction() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConfigError) as error:
        migrate(database_url)
    assert_one_line(error, "newer version", "9999")
    assert count_runs(db) == 1


def test_tables_of_another_revision_are_named_when_they_do_not_fit(db: Database) -> None:
    with db.transaction() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0000'"))
        connection.execute(text("DROP TABLE iteration_metrics"))
    with pytest.raises(ConfigError) as error, db.read() as connection:
        connection.execute(text("SELECT * FROM iteration_metrics"))
    assert_one_line(error, "revision 0000", SCHEMA_REVISION)


def test_wrong_sql_is_a_bug_and_keeps_its_traceback(db: Database) -> None:
    with pytest.raises(DBAPIError), db.read() as connection:
        connection.execute(text("SELEKT 1"))
    with pytest.raises(DBAPIError), db.read() as connection:
        connection.execute(text("SELECT * FROM nothing_of_ours"))


def test_a_lock_that_is_held_too_long_is_a_service_error(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LOCK_TIMEOUT_S", 0.1)
    db = open_database(database_url)
    add_run(db)
    change = text("UPDATE runs SET config_hash = 'other'")
    with db.transaction() as first:
        first.execute(change)
        with pytest.raises(ServiceUnavailable) as error, db.transaction() as second:
            second.execute(change)
    assert_one_line(error, "lock", "another process holds it")
    db.close()


def test_a_full_disk_is_a_service_error_and_leaves_nothing(db: Database) -> None:
    with pytest.raises(ServiceUnavailable) as error, db.transaction() as connection:
        connection.execute(runs.insert().values(run_id="r", config_json="{}", config_hash="h", created_at=0.0))
        if connection.dialect.name == "sqlite":
            connection.execute(text("PRAGMA max_page_count = 1"))  # SQLite raises it to the present size
            connection.execute(
                runs.insert().values(run_id="s", config_json="x" * 10**6, config_hash="h", created_at=0.0)
            )
        else:
            connection.execute(
                text(
                    "DO $$ BEGIN RAISE 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$"
                )
            )
    assert_one_line(error, "free some space")
    db.engine.dispose()
    assert count_runs(db) == 0


def test_an_unreachable_server_is_a_service_error_without_the_password() -> None:
    db = open_database("postgresql+psycopg://moerl:s3cret-word@127.0.0.1:1/moerl")
    with pytest.raises(ServiceUnavailable) as error:
        db.now()
    assert_one_line(error, "postgresql+psycopg://moerl:***@127.0.0.1:1/moerl", "refused")
    assert "s3cret-word" not in str(error.value)


def test_a_wrong_password_is_a_service_error_that_shows_neither(postgres_server: PostgresServer) -> None:
    url = postgres_server.url("postgres").replace(postgres_server.password, "s3cret-word")
    with pytest.raises(ServiceUnavailable) as error:
        migrate(url)
    assert_one_line(error, "password authentication failed")
    assert "s3cret-word" not in str(error.value)


def test_a_missing_database_is_a_service_error(postgres_server: PostgresServer, tmp_path: Path) -> None:
    for url in (postgres_server.url("nowhere"), f"sqlite:///{tmp_path}/nowhere.db"):
        with pytest.raises(ServiceUnavailable) as error:
            open_database(url).now()
        assert_one_line(error, "nowhere", "check MOERL_DATABASE_URL")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_a_service_error(tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("not a database, " * 100)
    for action in (lambda url: count_runs(open_database(url)), migrate):
        with pytest.raises(ServiceUnavailable) as error:
            action(f"sqlite:///{tmp_path}/notes.db")
        assert_one_line(error, "notes.db", "not a database")


def test_a_folder_that_cannot_be_made_is_a_service_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServiceUnavailable) as error:
        migrate(f"sqlite:///{tmp_path}/file/moerl.db")
    assert_one_line(error, str(tmp_path / "file"))


def test_a_wrong_connection_option_is_explained() -> None:
    with pytest.raises(ServiceUnavailable) as error:
        open_database("postgresql://127.0.0.1:1/moerl?no_such_option=1").now()
    assert_one_line(error, "no_such_option")


@pytest.mark.parametrize(
    "url",
    ["", "moerl.db", "sqlite://", "sqlite:///:memory:", "mysql://u:s3cret@h/d", "postgresql://u:s3cret@h:port/d"],
)
def test_a_malformed_url_is_a_configuration_error_that_shows_no_password(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_database(url)
    assert_one_line(error, "MOERL_DATABASE_URL", "sqlite:////")
    assert "s3cret" not in str(error.value)


def test_opening_does_not_connect() -> None:
    open_database("postgresql://moerl@127.0.0.1:1/moerl").close()
    open_database("sqlite:////nowhere/moerl.db").close()
