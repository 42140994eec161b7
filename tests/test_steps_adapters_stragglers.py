"""steps/adapters/stragglers.py, on SQLite and on PostgreSQL."""

import pytest

from steps.adapters.buffer import CommitOutcome, commit_groups, complete_reward, select_batch, unit_samples
from steps.adapters.database import Database
from steps.adapters.lease_history import list_unit_leases
from steps.adapters.leases import heartbeat, is_owned, lease_unit, outstanding, return_lease
from steps.adapters.ledger import list_draws
from steps.adapters.stragglers import DROP_REASON, drop_late_units, lease_backup
from steps.records import Lease
from tests.experience import (
    back_up_once,
    commit_each,
    complete_rollout,
    die_in_backup,
    die_in_drop,
    in_processes,
    make_reward,
    plan,
    roll_out,
    run_until_killed,
    take,
    worker,
)

LONG_S = 3600.0


def test_iteration_goes_on_with_what_is_sampled_and_the_rest_is_recorded_as_dropped(db: Database) -> None:
    plan(db, [["a"], ["b"], ["c"]])
    done, late = take(db, "rollout"), take(db, "rollout")
    assert complete_rollout(db, done, roll_out(done))
    assert drop_late_units(db, "run-1", 1, 0.0) == 2
    assert outstanding(db, "run-1", 1, "rollout") == 0
    draws = {draw.prompt_uid: (draw.status, draw.drop_reason) for draw in list_draws(db, "run-1", 1)}
    assert draws == {"a": ("drawn", None), "b": ("dropped", DROP_REASON), "c": ("dropped", DROP_REASON)}
    assert not heartbeat(db, late, LONG_S)
    assert not complete_rollout(db, late, roll_out(late))
    scored = take(db, "reward")
    rewards = [make_reward("a", sample.sample_index, value=float(sample.sample_index)) for sample in roll_out(scored)]
    assert complete_reward(db, scored, rewards)
    assert outstanding(db, "run-1", 1, "reward") == 0
    assert select_batch(db, "run-1", 1, policy_version=0, max_staleness=1).num_groups == 1


def test_nothing_is_dropped_before_the_deadline_or_while_nothing_is_done(db: Database) -> None:
    plan(db, [["a"], ["b"]])
    first = take(db, "rollout")
    assert drop_late_units(db, "run-1", 1, 0.0) == 0
    assert complete_rollout(db, first, roll_out(first))
    assert drop_late_units(db, "run-1", 1, LONG_S) == 0
    assert lease_unit(db, "run-1", 1, "rollout", worker(1), LONG_S) is not None


def test_dropping_again_or_in_a_finished_iteration_changes_nothing(db: Database) -> None:
    plan(db, [["a"], ["b"]])
    plan(db, [["c"]], iteration=2)
    lease = take(db, "rollout")
    assert complete_rollout(db, lease, roll_out(lease))
    assert drop_late_units(db, "run-1", 1, 0.0) == 1
    assert drop_late_units(db, "run-1", 1, 0.0) == 0
    assert outstanding(db, "run-1", 2, "rollout") == 1


def back_up(db: Database, by: int = 5, least_wait_s: float = 0.0, after: float = 0.0) -> Lease | None:
    return lease_backup(db, "run-1", 1, worker(by, step_attempt_id=by), LONG_S, after, least_wait_s)


def one_done_and_one_slow(db: Database) -> Lease:
    plan(db, [["a"], ["b", "c"]])
    done, slow = take(db, "rollout", lease_s=LONG_S), take(db, "rollout", lease_s=LONG_S)
    assert complete_rollout(db, done, roll_out(done))
    return slow


def test_a_slow_unit_gets_one_backup_and_the_first_commit_of_a_group_wins(db: Database) -> None:
    slow = one_done_and_one_slow(db)
    backup = back_up(db)
    assert backup is not None and backup.is_backup
    assert (backup.unit, backup.attempt) == (slow.unit, 2)
    assert back_up(db, by=6) is None
    first = [sample for sample in roll_out(slow, (1,)) if sample.prompt_uid == "b"]
    assert commit_groups(db, slow, first).committed == 2
    assert commit_groups(db, backup, roll_out(backup, (2,))) == CommitOutcome(
        committed=2, duplicates=2, unit_done=True, lost=False
    )
    assert commit_groups(db, slow, roll_out(slow, (1,))) == CommitOutcome(
        committed=2, duplicates=2, unit_done=True, lost=True
    )
    stored = unit_samples(db, "run-1", 1, ["b", "c"])
    assert [sample.versions_T for sample in stored] == [(1,), (1,), (2,), (2,)]
    rows = {row.token: row for row in list_unit_leases(db, "run-1")}
    assert (rows[slow.token].outcome, rows[slow.token].samples, rows[slow.token].duplicate_samples) == ("lost", 2, 2)
    assert (rows[backup.token].outcome, rows[backup.token].is_backup) == ("done", True)
    assert not heartbeat(db, slow, LONG_S) and not heartbeat(db, backup, LONG_S)


def test_the_owner_may_finish_before_its_backup(db: Database) -> None:
    slow = one_done_and_one_slow(db)
    backup = back_up(db)
    assert backup is not None
    assert heartbeat(db, slow, LONG_S) and heartbeat(db, backup, LONG_S)
    assert complete_rollout(db, slow, roll_out(slow))
    assert not is_owned(db, backup)
    assert commit_groups(db, backup, roll_out(backup)).duplicates == 4
    assert [row.outcome for row in list_unit_leases(db, "run-1") if row.is_backup] == ["lost"]


def test_a_backup_that_is_returned_or_whose_worker_was_replaced_makes_room_for_another(db: Database) -> None:
    slow = one_done_and_one_slow(db)
    first = back_up(db)
    assert first is not None and return_lease(db, first)
    second = back_up(db, by=6)
    assert second is not None
    replaced = lease_backup(db, "run-1", 1, worker(6, step_attempt_id=7), LONG_S, 0.0, 0.0)
    assert replaced is not None
    assert not is_owned(db, second) and is_owned(db, replaced) and is_owned(db, slow)


def test_a_unit_that_its_owner_returns_is_still_done_by_the_backup(db: Database) -> None:
    slow = one_done_and_one_slow(db)
    backup = back_up(db)
    assert backup is not None and return_lease(db, slow)
    assert complete_rollout(db, backup, roll_out(backup))
    assert outstanding(db, "run-1", 1, "rollout") == 0


def test_no_backup_before_a_unit_is_slow(db: Database) -> None:
    plan(db, [["a"], ["b"]])
    done = take(db, "rollout", lease_s=LONG_S)
    assert back_up(db) is None, "nothing is done that would say what is slow"
    take(db, "rollout", lease_s=LONG_S)
    assert complete_rollout(db, done, roll_out(done))
    assert back_up(db, least_wait_s=LONG_S) is None
    assert back_up(db, after=1e9) is None
    assert back_up(db, by=1) is None, "the worker's own unit"
    assert back_up(db) is not None


def test_processes_that_look_for_a_slow_unit_get_one_backup(db: Database, database_url: str) -> None:
    slow = one_done_and_one_slow(db)
    taken = in_processes(back_up_once, [(database_url, number) for number in range(10, 16)])
    assert [unit for unit in taken if unit is not None] == [slow.unit.unit]


def test_an_owner_and_a_backup_that_commit_at_the_same_time_store_each_group_once(
    db: Database, database_url: str
) -> None:
    plan(db, [["first"], *([f"a{unit}", f"b{unit}"] for unit in range(60))])
    done = take(db, "rollout")
    assert complete_rollout(db, done, roll_out(done, [0]))
    owners = [take(db, "rollout", lease_s=LONG_S) for _ in range(60)]
    backups = [lease for number in range(60) if (lease := back_up(db, by=10 + number)) is not None]
    assert sorted(lease.unit.unit for lease in backups) == [lease.unit.unit for lease in owners]
    backups.sort(key=lambda lease: lease.unit.unit)
    first, second = in_processes(commit_each, [(database_url, owners, 1), (database_url, backups, 2)])
    for one, other, lease in zip(first, second, owners, strict=True):
        assert sorted([one, other]) == [(0, 4), (4, 0)]
        drawn = unit_samples(db, "run-1", 1, lease.unit.prompt_uids)
        assert {sample.versions_T for sample in drawn} == {(1,) if one == (4, 0) else (2,)}
    rows = [row for row in list_unit_leases(db, "run-1") if row.unit != done.unit.unit]
    assert sum(row.samples for row in rows) == sum(row.duplicate_samples for row in rows) == 240
    assert sorted(row.outcome or "" for row in rows) == ["done"] * 60 + ["lost"] * 60
    assert outstanding(db, "run-1", 1, "reward") == 61


@pytest.mark.parametrize("statement", ["UPDATE work_units", "INSERT INTO unit_leases"])
def test_a_worker_killed_while_it_leases_a_backup_has_leased_nothing(
    db: Database, database_url: str, statement: str
) -> None:
    slow = one_done_and_one_slow(db)
    run_until_killed(die_in_backup, database_url, statement)
    assert not [row for row in list_unit_leases(db, "run-1") if row.is_backup]
    assert back_up(db) is not None and is_owned(db, slow)


@pytest.mark.parametrize("statement", ["UPDATE work_units", "UPDATE prompt_draws", "UPDATE unit_leases"])
def test_a_worker_killed_while_it_drops_units_has_dropped_nothing(
    db: Database, database_url: str, statement: str
) -> None:
    slow = one_done_and_one_slow(db)
    run_until_killed(die_in_drop, database_url, statement)
    assert is_owned(db, slow)
    assert {draw.status for draw in list_draws(db, "run-1", 1)} == {"drawn"}
    assert drop_late_units(db, "run-1", 1, 0.0) == 1


def test_what_was_sampled_of_a_late_unit_goes_on_to_be_scored(db: Database) -> None:
    slow = one_done_and_one_slow(db)
    part = [sample for sample in roll_out(slow) if sample.prompt_uid == "c"]
    assert commit_groups(db, slow, part).committed == 2
    assert drop_late_units(db, "run-1", 1, 0.0) == 1
    draws = {draw.prompt_uid: (draw.status, draw.drop_reason) for draw in list_draws(db, "run-1", 1)}
    assert draws == {"a": ("drawn", None), "b": ("dropped", DROP_REASON), "c": ("drawn", None)}
    assert [take(db, "reward").unit.prompt_uids for _ in range(2)] == [("a",), ("c",)]
    assert commit_groups(db, slow, roll_out(slow)).lost
    assert {row.outcome for row in list_unit_leases(db, "run-1") if row.kind == "rollout"} == {"done", "lost"}
