"""Groups of a rollout unit that are stored one after the other, on SQLite and on PostgreSQL."""

from steps.adapters.buffer import CommitOutcome, commit_groups, stored_prompts, unit_samples
from steps.adapters.database import Database
from steps.adapters.lease_history import list_unit_leases
from steps.adapters.leases import outstanding
from tests.experience import plan, roll_out, take


def test_groups_that_are_stored_stay_when_their_unit_is_not_complete(db: Database) -> None:
    plan(db, [["a", "b", "c"]])
    first = take(db, "rollout", lease_s=0.0)
    half = [sample for sample in roll_out(first, (1,)) if sample.prompt_uid == "b"]
    assert commit_groups(db, first, half) == CommitOutcome(committed=2, duplicates=0, unit_done=False, lost=False)
    assert outstanding(db, "run-1", 1, "reward") == 0
    second = take(db, "rollout")
    assert stored_prompts(db, second.unit) == {"b"}
    assert commit_groups(db, second, roll_out(second, (2,))) == CommitOutcome(
        committed=4, duplicates=2, unit_done=True, lost=False
    )
    stored = unit_samples(db, "run-1", 1, ["a", "b", "c"])
    assert [sample.versions_T for sample in stored] == [(2,), (2,), (1,), (1,), (2,), (2,)]
    assert take(db, "reward").unit.prompt_uids == ("a", "b", "c")
    counts = [(row.outcome, row.samples, row.tokens, row.duplicate_samples) for row in list_unit_leases(db, "run-1")]
    assert counts[:2] == [("expired", 2, 2, 0), ("done", 4, 4, 2)]


def test_a_late_owner_learns_what_was_its_own_and_what_is_refused(db: Database) -> None:
    plan(db, [["a", "b"]])
    late = take(db, "rollout", lease_s=0.0)
    drawn = roll_out(late, (1,))
    assert commit_groups(db, late, drawn[:2]).committed == 2
    owner = take(db, "rollout")
    assert commit_groups(db, late, drawn) == CommitOutcome(committed=2, duplicates=0, unit_done=False, lost=True)
    assert commit_groups(db, owner, roll_out(owner, (2,))).unit_done
    assert commit_groups(db, late, drawn) == CommitOutcome(committed=2, duplicates=2, unit_done=True, lost=True)
    (row,) = [row for row in list_unit_leases(db, "run-1") if row.token == late.token]
    assert (row.samples, row.tokens, row.duplicate_samples, row.abandoned_tokens) == (2, 2, 2, 2)
