"""steps/adapters/stragglers.py, on SQLite and on PostgreSQL."""

from steps.adapters.buffer import complete_reward, complete_rollout, select_batch
from steps.adapters.database import Database
from steps.adapters.leases import heartbeat, lease_unit, outstanding
from steps.adapters.ledger import list_draws
from steps.adapters.stragglers import DROP_REASON, drop_late_units
from tests.experience import make_reward, plan, roll_out, take

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
    assert lease_unit(db, "run-1", 1, "rollout", "w", LONG_S) is not None


def test_dropping_again_or_in_a_finished_iteration_changes_nothing(db: Database) -> None:
    plan(db, [["a"], ["b"]])
    plan(db, [["c"]], iteration=2)
    lease = take(db, "rollout")
    assert complete_rollout(db, lease, roll_out(lease))
    assert drop_late_units(db, "run-1", 1, 0.0) == 1
    assert drop_late_units(db, "run-1", 1, 0.0) == 0
    assert outstanding(db, "run-1", 2, "rollout") == 1
