"""steps/adapters/leases.py, on SQLite and on PostgreSQL."""

import threading

import pytest
from sqlalchemy import select, update

from steps.adapters import leases
from steps.adapters.database import Database, database_clock
from steps.adapters.lease_history import list_unit_leases
from steps.adapters.leases import (
    finish_unit,
    heartbeat,
    is_owned,
    lease_unit,
    lock_unit,
    outstanding,
    record_abandoned,
    return_lease,
)
from steps.adapters.tables import unit_leases, work_units
from tests.experience import (
    complete_next_rollout,
    complete_rollout,
    die_in_lease,
    die_in_return,
    in_processes,
    lease_and_complete_all,
    lease_and_die,
    lease_once,
    plan,
    roll_out,
    run_until_killed,
    take,
    worker,
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
    assert lease_unit(db, "run-1", 1, "rollout", worker(1), LONG_S) is None


def test_leases_keep_to_their_run_iteration_and_kind(db: Database) -> None:
    plan(db, [["a"]])
    plan(db, [["a"]], run_id="run-2")
    plan(db, [["a"]], iteration=2)
    assert lease_unit(db, "run-1", 1, "reward", worker(1), LONG_S) is None
    assert lease_unit(db, "run-1", 3, "rollout", worker(1), LONG_S) is None
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
    assert return_lease(db, returned), "a call whose answer was lost may be repeated"
    assert not heartbeat(db, returned, LONG_S)
    assert not complete_rollout(db, returned, roll_out(returned))
    assert take(db, "rollout").attempt == 2


def test_nothing_touches_a_unit_that_is_done(db: Database) -> None:
    plan(db, [["a"]])
    lease = complete_next_rollout(db, lease_s=EXPIRED_S)
    assert lease_unit(db, "run-1", 1, "rollout", worker(1), LONG_S) is None
    assert not heartbeat(db, lease, LONG_S)
    assert not return_lease(db, lease)
    unit = list_units(db, "run-1", 1)[0]
    assert (unit.state, unit.attempts, unit.worker) == ("done", 1, "pod-0-1/0")
    assert unit.leased_at is not None and unit.completed_at is not None and unit.completed_at >= unit.leased_at


def test_processes_lease_each_unit_exactly_once(db: Database, database_url: str) -> None:
    plan(db, [[f"prompt-{unit}"] for unit in range(40)])
    taken = in_processes(lease_and_complete_all, [(database_url, number) for number in range(4)])
    assert sorted(unit for units in taken for unit in units) == list(range(40))
    assert {unit.attempts for unit in list_units(db, "run-1", 1) if unit.kind == "rollout"} == {1}
    assert outstanding(db, "run-1", 1, "rollout") == 0


def test_the_unit_of_a_killed_worker_is_leased_again_only_after_expiry(db: Database, database_url: str) -> None:
    plan(db, [["a"]])
    run_until_killed(lease_and_die, database_url, LONG_S)
    assert lease_unit(db, "run-1", 1, "rollout", worker(1), LONG_S) is None
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
        assert lock_unit(connection, held).is_owned
        finish_unit(connection, held)
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


def test_a_successor_takes_the_lease_of_its_predecessor_at_once(db: Database) -> None:
    plan(db, [["a"], ["b"]])
    dead = take(db, "rollout", by=worker(0, step_attempt_id=1), lease_s=LONG_S)
    other = take(db, "rollout", by=worker(1, step_attempt_id=2), lease_s=LONG_S)
    successor = take(db, "rollout", by=worker(0, step_attempt_id=3), lease_s=LONG_S)
    assert (successor.unit, successor.attempt) == (dead.unit, 2)
    assert not heartbeat(db, dead, LONG_S)
    assert heartbeat(db, other, LONG_S)
    outcomes = {row.token: row.outcome for row in list_unit_leases(db, "run-1")}
    assert outcomes == {dead.token: "lost", other.token: None, successor.token: None}


def test_a_predecessor_does_not_take_its_lease_back(db: Database) -> None:
    plan(db, [["a"]])
    take(db, "rollout", by=worker(0, step_attempt_id=1), lease_s=LONG_S)
    successor = take(db, "rollout", by=worker(0, step_attempt_id=2), lease_s=LONG_S)
    assert lease_unit(db, "run-1", 1, "rollout", worker(0, step_attempt_id=1), LONG_S) is None
    assert lease_unit(db, "run-1", 1, "rollout", worker(0, step_attempt_id=2), LONG_S) is None
    assert is_owned(db, successor)


def test_processes_that_succeed_one_worker_get_its_unit_once(db: Database, database_url: str) -> None:
    plan(db, [[f"prompt-{unit}"] for unit in range(8)])
    for number in range(8):
        take(db, "rollout", by=worker(number, step_attempt_id=1), lease_s=LONG_S)
    calls = [(database_url, number % 8, 2 + number) for number in range(16)]
    taken = [unit for unit in in_processes(lease_once, calls) if unit is not None]
    assert set(taken) == set(range(8))
    rows = [row for row in list_unit_leases(db, "run-1") if row.ended_at is None]
    assert sorted(row.unit for row in rows) == list(range(8)), "of each unit one lease is open"


def test_a_lease_whose_answer_was_lost_is_the_same_lease_when_asked_again(db: Database) -> None:
    plan(db, [["a"], ["b"]])
    arguments = (db, "run-1", 1, "rollout", worker(0), LONG_S, "my token")
    first, again = leases._lease_unit(*arguments), leases._lease_unit(*arguments)
    assert first is not None and first == again
    assert [unit.state for unit in list_units(db, "run-1", 1)] == ["leased", "pending"]


def test_a_lease_that_was_seen_after_now_is_free_since_the_clock_was_set_back(db: Database) -> None:
    plan(db, [["a"]])
    late = take(db, "rollout", lease_s=LONG_S)
    with db.transaction() as connection:
        ahead = database_clock() + 5 * 86400.0
        connection.execute(update(work_units).values(leased_at=ahead, expires_at=ahead + LONG_S))
        connection.execute(update(unit_leases).values(leased_at=ahead, last_seen_at=ahead))
    assert take(db, "rollout", by=worker(1)).unit == late.unit
    assert not heartbeat(db, late, LONG_S)


def test_a_heartbeat_mends_a_lease_after_the_clock_was_set_back(db: Database) -> None:
    plan(db, [["a"]])
    lease = take(db, "rollout", lease_s=LONG_S)
    with db.transaction() as connection:
        connection.execute(update(unit_leases).values(last_seen_at=database_clock() + 86400.0))
    assert heartbeat(db, lease, LONG_S)
    assert lease_unit(db, "run-1", 1, "rollout", worker(1), LONG_S) is None


@pytest.mark.parametrize("statement", ["UPDATE work_units", "INSERT INTO unit_leases"])
def test_a_worker_killed_while_it_leases_has_leased_nothing(db: Database, database_url: str, statement: str) -> None:
    plan(db, [["a"]])
    run_until_killed(die_in_lease, database_url, statement)
    assert [(unit.state, unit.attempts) for unit in list_units(db, "run-1", 1)] == [("pending", 0)]
    assert list_unit_leases(db, "run-1") == []
    assert take(db, "rollout").attempt == 1


@pytest.mark.parametrize("statement", ["UPDATE work_units", "UPDATE unit_leases"])
def test_a_worker_killed_while_it_returns_a_unit_still_has_it(db: Database, database_url: str, statement: str) -> None:
    plan(db, [["a"]])
    lease = take(db, "rollout", lease_s=LONG_S)
    run_until_killed(die_in_return, database_url, lease, statement)
    assert is_owned(db, lease)
    assert [row.outcome for row in list_unit_leases(db, "run-1")] == [None]
    assert return_lease(db, lease)


def test_history_says_how_each_lease_ended(db: Database) -> None:
    plan(db, [["a"]])
    returned = take(db, "rollout")
    record_abandoned(db, returned, 17)
    return_lease(db, returned)
    expired = take(db, "rollout", by=worker(1), lease_s=EXPIRED_S)
    done = take(db, "rollout", by=worker(2))
    assert complete_rollout(db, done, roll_out(done))
    rows = list_unit_leases(db, "run-1")
    assert [(row.attempt, row.worker, row.outcome) for row in rows] == [
        (1, 0, "returned"),
        (2, 1, "expired"),
        (3, 2, "done"),
    ]
    assert [row.token for row in rows] == [returned.token, expired.token, done.token]
    assert [(row.samples, row.tokens, row.abandoned_tokens) for row in rows] == [(0, 0, 17), (0, 0, 0), (2, 6, 0)]
    # The clock is read for each column: they differ by microseconds on PostgreSQL.
    assert rows[0].first_commit_at is None and rows[2].last_commit_at == pytest.approx(rows[2].first_commit_at, abs=0.1)
    assert all(row.ended_at is not None and row.ended_at >= row.leased_at for row in rows)
