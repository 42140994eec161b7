"""steps/adapters/leases.py, on SQLite and on PostgreSQL."""

import threading

import pytest
from sqlalchemy import select, update

from steps.adapters.buffer import complete_rollout
from steps.adapters.database import Database, database_clock
from steps.adapters.leases import heartbeat, lease_unit, mark_done, outstanding, return_lease
from steps.adapters.tables import work_units
from tests.experience import (
    complete_next_rollout,
    in_processes,
    lease_and_complete_all,
    lease_and_die,
    plan,
    roll_out,
    run_until_killed,
    take,
)
from tests.unit_rows import list_units

EXPIRED_S = 0.0
LONG_S = 3600.0


def test_units_are_leased_in_order_with_their_prompts_in_order(db: Database) -> None:
    plan(db, [["b", "a"], ["c"]])
    first, second = take(db, "rollout"), take(db, "rollout")
    assert (first.unit.unit, first.unit.prompt_uids, first.attempt) == (0, ("b", "a"), 1)
    assert (second.unit.unit, second.unit.prompt_uids, second.unit.kind) == (1, ("c",), "rollout")
    assert first.token != second.token
    assert lease_unit(db, "run-1", 1, "rollout", "worker-1", LONG_S) is None


def test_leases_keep_to_their_run_iteration_and_kind(db: Database) -> None:
    plan(db, [["a"]])
    plan(db, [["a"]], run_id="run-2")
    plan(db, [["a"]], iteration=2)
    assert lease_unit(db, "run-1", 1, "reward", "w", LONG_S) is None
    assert lease_unit(db, "run-1", 3, "rollout", "w", LONG_S) is None
    assert take(db, "rollout", iteration=2).unit.iteration == 2
    assert take(db, "rollout", run_id="run-2").unit.run_id == "run-2"
    assert outstanding(db, "run-1", 1, "rollout") == 1


def test_outstanding_counts_pending_and_leased_units(db: Database) -> None:
    plan(db, [["a"], ["b"]])
    assert outstanding(db, "run-1", 1, "rollout") == 2
    lease = take(db, "rollout")
    assert outstanding(db, "run-1", 1, "rollout") == 2
    complete_rollout(db, lease, roll_out(lease))
    assert outstanding(db, "run-1", 1, "rollout") == 1
    assert outstanding(db, "run-1", 1, "reward") == 1


def test_an_expired_lease_goes_to_another_worker_and_fences_the_first(db: Database) -> None:
    plan(db, [["a"]])
    late = take(db, "rollout", lease_s=EXPIRED_S)
    owner = take(db, "rollout", lease_s=LONG_S)
    assert (owner.unit, owner.attempt) == (late.unit, 2)
    assert not heartbeat(db, late, LONG_S)
    assert not return_lease(db, late)
    assert not complete_rollout(db, late, roll_out(late))
    assert heartbeat(db, owner, LONG_S)
    assert complete_rollout(db, owner, roll_out(owner))


def test_an_expired_lease_that_nobody_took_is_still_good(db: Database) -> None:
    plan(db, [["a"], ["b"]])
    first = take(db, "rollout", lease_s=EXPIRED_S)
    assert heartbeat(db, first, LONG_S)
    second = take(db, "rollout", lease_s=EXPIRED_S)
    assert (first.unit.unit, second.unit.unit) == (0, 1)
    assert complete_rollout(db, second, roll_out(second))


def test_a_heartbeat_extends_a_lease(db: Database) -> None:
    plan(db, [["a"]])
    lease = take(db, "rollout", lease_s=60.0)
    before = list_units(db, "run-1", 1)[0].expires_at
    assert heartbeat(db, lease, LONG_S)
    after = list_units(db, "run-1", 1)[0].expires_at
    assert before is not None and after is not None and after > before + 60.0


def test_a_returned_lease_is_free_at_once(db: Database) -> None:
    plan(db, [["a"]])
    returned = take(db, "rollout", lease_s=LONG_S)
    assert return_lease(db, returned)
    assert not return_lease(db, returned)
    assert not heartbeat(db, returned, LONG_S)
    assert not complete_rollout(db, returned, roll_out(returned))
    assert take(db, "rollout").attempt == 2


def test_nothing_touches_a_unit_that_is_done(db: Database) -> None:
    plan(db, [["a"]])
    lease = complete_next_rollout(db, lease_s=EXPIRED_S)
    assert lease_unit(db, "run-1", 1, "rollout", "w", LONG_S) is None
    assert not heartbeat(db, lease, LONG_S)
    assert not return_lease(db, lease)
    unit = list_units(db, "run-1", 1)[0]
    assert (unit.state, unit.attempts, unit.worker) == ("done", 1, "worker-0")
    assert unit.leased_at is not None and unit.completed_at is not None and unit.completed_at >= unit.leased_at


def test_processes_lease_each_unit_exactly_once(db: Database, database_url: str) -> None:
    plan(db, [[f"prompt-{unit}"] for unit in range(40)])
    taken = in_processes(lease_and_complete_all, [(database_url, f"worker-{number}") for number in range(4)])
    assert sorted(unit for units in taken for unit in units) == list(range(40))
    assert {unit.attempts for unit in list_units(db, "run-1", 1) if unit.kind == "rollout"} == {1}
    assert outstanding(db, "run-1", 1, "rollout") == 0


def test_the_unit_of_a_killed_worker_is_leased_again_only_after_expiry(db: Database, database_url: str) -> None:
    plan(db, [["a"]])
    run_until_killed(lease_and_die, database_url, LONG_S)
    assert lease_unit(db, "run-1", 1, "rollout", "worker-1", LONG_S) is None
    with db.transaction() as connection:
        connection.execute(update(work_units).values(expires_at=database_clock() - 1.0))
    again = take(db, "rollout")
    assert (again.unit.prompt_uids, again.attempt) == (("a",), 2)


def test_a_unit_that_is_being_completed_is_not_leased(db: Database) -> None:
    plan(db, [["a"], ["b"]])
    held = take(db, "rollout", lease_s=EXPIRED_S)
    taken: list[int] = []
    other = threading.Thread(target=lambda: taken.append(take(db, "rollout").unit.unit))
    with db.transaction() as connection:
        assert mark_done(connection, held) == "worker-0"
        other.start()
        if connection.dialect.name == "postgresql":  # SKIP LOCKED: it need not wait for us
            other.join()
    other.join()
    assert taken == [1]


def test_a_lease_lives_by_the_database_clock(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    plan(db, [["a"]])
    monkeypatch.setattr("time.time", lambda: 0.0)
    take(db, "rollout", lease_s=LONG_S)
    expires_at = list_units(db, "run-1", 1)[0].expires_at
    with db.read() as connection:
        now = connection.execute(select(database_clock())).scalar_one()
    assert expires_at is not None and expires_at > now > 1e9
