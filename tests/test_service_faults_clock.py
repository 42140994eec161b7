"""The database's clock is set by days while leases are held: no work is stored twice, and no unit waits for days."""

import pytest
from sqlalchemy import event, text

from steps.adapters import leases
from steps.adapters.database import Database, open_database
from steps.adapters.lease_history import list_unit_leases
from tests.experience import complete_rollout, plan, roll_out, worker

LEASE_S = 60.0
DAY_S = 86400.0


def set_clock(db: Database, days: int) -> None:
    """Let the database's own functions of time be off by so much, from the next connection on."""
    if db.engine.dialect.name == "sqlite":

        @event.listens_for(db.engine, "connect")
        def shift(connection, record) -> None:
            real = connection.execute("SELECT julianday('now')").fetchone()[0]
            connection.create_function("julianday", 1, lambda _: real + days)
    else:
        with db.transaction() as connection:
            connection.execute(text("CREATE SCHEMA shifted"))
            connection.execute(
                text(
                    "CREATE FUNCTION shifted.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS "
                    f"$$ SELECT pg_catalog.clock_timestamp() + interval '{days} days' $$"
                )
            )
            name = connection.execute(text("SELECT current_database()")).scalar_one()
            connection.execute(text(f'ALTER DATABASE "{name}" SET search_path = shifted, pg_catalog, public'))
    db.engine.dispose()


@pytest.mark.parametrize("days", [3, -3])
def test_a_unit_is_leased_again_and_its_late_owner_is_fenced(db: Database, database_url: str, days: int) -> None:
    plan(db, [["a"]])
    first = leases.lease_unit(db, "run-1", 1, "rollout", worker(1), LEASE_S)
    before_s = db.now()
    set_clock(db, days)
    assert abs(db.now() - before_s - days * DAY_S) < DAY_S
    second = leases.lease_unit(db, "run-1", 1, "rollout", worker(2), LEASE_S)
    assert first is not None and second is not None and second.unit == first.unit
    assert not leases.heartbeat(db, first, LEASE_S)
    assert not complete_rollout(db, first, roll_out(first))
    assert complete_rollout(db, second, roll_out(second))
    db.engine.dispose()
    reopened = open_database(database_url)
    assert [row.outcome for row in list_unit_leases(reopened, "run-1")].count("done") == 1
    reopened.close()


@pytest.mark.parametrize("days", [3, -3])
def test_an_owner_whom_nobody_has_replaced_goes_on(db: Database, days: int) -> None:
    plan(db, [["a"]])
    lease = leases.lease_unit(db, "run-1", 1, "rollout", worker(1), LEASE_S)
    set_clock(db, days)
    assert lease is not None and leases.heartbeat(db, lease, LEASE_S)
    assert leases.lease_unit(db, "run-1", 1, "rollout", worker(2), LEASE_S) is None
    assert complete_rollout(db, lease, roll_out(lease))
