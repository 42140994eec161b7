"""steps/adapters/buffer.py, on SQLite and on PostgreSQL."""

import struct
from collections.abc import Sequence
from dataclasses import replace

import pytest

from steps.adapters.buffer import (
    CommitOutcome,
    batch_samples,
    commit_groups,
    complete_reward,
    finish_batch,
    get_batch,
    select_batch,
    unit_samples,
)
from steps.adapters.database import Database
from steps.adapters.lease_history import list_unit_leases
from steps.adapters.leases import outstanding
from steps.adapters.ledger import list_draws
from steps.errors import DataError
from steps.records import Reward, RewardStatus, Sample, SampleRouting
from tests.experience import (
    commit_samples_and_die,
    complete_lease,
    complete_next_reward,
    complete_next_rollout,
    complete_rollout,
    die_in_reward,
    die_in_rollout,
    die_in_selection,
    end_without_samples,
    fates,
    in_processes,
    make_reward,
    make_sample,
    plan,
    roll_out,
    run_until_killed,
    select_with_staleness,
    take,
)
from tests.unit_rows import list_units


def test_samples_come_back_as_they_were(db: Database) -> None:
    plan(db, [["b", "a"]])
    lease = take(db, "rollout")
    odd = replace(
        make_sample("a", 1, (3, 3, 4, 3)),
        seed=2**63,
        response_text="中文 🙂\n\t'\"%s",
        logprobs_T=(0.0, -1e-45, float("-inf"), -3.4028234663852886e38),
        finish_reason="length",
        prompt_ids=(),
    )
    plain = replace(make_sample("a", 0), prompt_ids=())
    drawn = [make_sample("b", 0), odd, plain]
    assert complete_rollout(db, lease, drawn)
    stored = unit_samples(db, "run-1", 1, ["a", "b"])
    assert [(sample.prompt_uid, sample.sample_index) for sample in stored] == [("a", 0), ("a", 1), ("b", 0)]
    assert stored[0] == plain
    assert replace(stored[1], logprobs_T=odd.logprobs_T) == odd
    assert stored[1].logprobs_T == pytest.approx(odd.logprobs_T, abs=1e-44)
    assert unit_samples(db, "run-1", 1, ["b"]) == [make_sample("b", 0)]
    assert unit_samples(db, "run-1", 1, []) == []


def test_a_completed_rollout_unit_creates_its_reward_unit(db: Database) -> None:
    plan(db, [["a"], ["c", "b"]])
    first, second = take(db, "rollout"), take(db, "rollout")
    assert complete_rollout(db, second, roll_out(second))
    assert [(unit.kind, unit.unit, unit.state) for unit in list_units(db, "run-1", 1)] == [
        ("rollout", 0, "leased"),
        ("rollout", 1, "done"),
        ("reward", 1, "pending"),
    ]
    assert take(db, "reward").unit.prompt_uids == ("c", "b")
    assert complete_rollout(db, first, roll_out(first))


def test_completing_twice_stores_once(db: Database) -> None:
    plan(db, [["a"]])
    lease = complete_next_rollout(db)
    assert commit_groups(db, lease, roll_out(lease)) == CommitOutcome(
        committed=2, duplicates=0, unit_done=True, lost=False
    )
    assert len(unit_samples(db, "run-1", 1, ["a"])) == 2
    reward = complete_next_reward(db)
    assert complete_reward(db, reward, [make_reward("a", 0, "error"), make_reward("a", 1, "error")])
    assert {row.samples for row in list_unit_leases(db, "run-1")} == {2}
    assert outstanding(db, "run-1", 1, "reward") == 0


def test_processes_that_complete_one_unit_store_one_outcome(db: Database, database_url: str) -> None:
    plan(db, [["a"]])
    lease = take(db, "rollout")
    results = in_processes(complete_lease, [(database_url, lease, version) for version in range(4)])
    assert results == [True] * 4, "one lease, so each call is a repetition of the first"
    samples = unit_samples(db, "run-1", 1, ["a"])
    assert len({sample.versions_T for sample in samples}) == 1
    assert len(samples) == 2


def test_a_late_owner_stores_nothing(db: Database) -> None:
    plan(db, [["a"]])
    late = take(db, "rollout", lease_s=0.0)
    owner = take(db, "rollout")
    assert not complete_rollout(db, late, roll_out(late, (9,)))
    assert unit_samples(db, "run-1", 1, ["a"]) == []
    assert complete_rollout(db, owner, roll_out(owner))

    late_reward = take(db, "reward", lease_s=0.0)
    take(db, "reward")
    assert not complete_reward(db, late_reward, [make_reward("a", 0), make_reward("a", 1)])
    with pytest.raises(DataError, match="iteration 1: 1 reward unit is not done yet; run rollout and reward"):
        select_batch(db, "run-1", 1, 0, 0)


@pytest.mark.parametrize("statement", ["INSERT INTO samples", "INSERT INTO work_units"])
def test_a_worker_killed_inside_its_completion_leaves_nothing(db: Database, database_url: str, statement: str) -> None:
    plan(db, [["a"]])
    lease = take(db, "rollout")
    run_until_killed(die_in_rollout, database_url, lease, statement)
    assert unit_samples(db, "run-1", 1, ["a"]) == []
    assert [(unit.kind, unit.state) for unit in list_units(db, "run-1", 1)] == [("rollout", "leased")]
    assert complete_rollout(db, lease, roll_out(lease))


def test_a_worker_killed_after_its_completion_loses_nothing(db: Database, database_url: str) -> None:
    plan(db, [["a"]])
    run_until_killed(commit_samples_and_die, database_url)
    assert len(unit_samples(db, "run-1", 1, ["a"])) == 2
    assert outstanding(db, "run-1", 1, "rollout") == 0


def test_a_scorer_killed_inside_its_completion_loses_nothing(db: Database, database_url: str) -> None:
    plan(db, [["a"]])
    complete_next_rollout(db)
    run_until_killed(die_in_reward, database_url, "INSERT INTO rewards")
    assert outstanding(db, "run-1", 1, "reward") == 1
    assert complete_next_reward(db).attempt == 2


@pytest.mark.parametrize("statement", ["INSERT INTO batches", "UPDATE prompt_draws"])
def test_a_selection_that_is_killed_leaves_nothing(db: Database, database_url: str, statement: str) -> None:
    plan(db, [["a"], ["b"]])
    for statuses in (("ok", "ok"), ("ok", "error")):
        complete_next_rollout(db)
        complete_next_reward(db, statuses)
    run_until_killed(die_in_selection, database_url, statement)
    assert fates(db) == {"a": "drawn", "b": "drawn"}
    with pytest.raises(DataError, match="no batch is selected yet"):
        get_batch(db, "run-1", 1)
    assert select_batch(db, "run-1", 1, 0, 0).num_groups == 1


def test_an_iteration_without_samples_has_no_batch(db: Database) -> None:
    plan(db, [["a"]])
    end_without_samples(db, take(db, "rollout"))
    with pytest.raises(DataError, match="no group to train on .none is fully scored."):
        select_batch(db, "run-1", 1, 0, 0)


def test_no_batch_is_frozen_before_every_unit_is_done(db: Database) -> None:
    plan(db, [["a"], ["b"]])
    steps = [
        ("2 rollout units are", complete_next_rollout),
        ("1 rollout unit and 1 reward unit are", complete_next_reward),
        ("1 rollout unit is", complete_next_rollout),
        ("1 reward unit is", complete_next_reward),
    ]
    for reason, complete in steps:
        with pytest.raises(DataError, match=f"run run-1, iteration 1: {reason} not done yet; run rollout and reward"):
            select_batch(db, "run-1", 1, 0, 0)
        with pytest.raises(DataError, match="no batch is selected yet"):
            get_batch(db, "run-1", 1)
        assert set(fates(db).values()) == {"drawn"}
        complete(db)
    assert select_batch(db, "run-1", 1, 0, 0).num_groups == 2


def test_wrong_samples_are_refused_and_leave_the_lease(db: Database) -> None:
    plan(db, [["a"]])
    lease = take(db, "rollout")
    wrong = [
        make_sample("b", 0),
        make_sample("a", 0, ()),
        replace(make_sample("a", 0), logprobs_T=(0.0,)),
        replace(make_sample("a", 0), versions_T=(0,)),
    ]
    for sample in wrong:
        with pytest.raises(ValueError):
            complete_rollout(db, lease, [sample])
    with pytest.raises(ValueError, match="different prompt_ids"):
        complete_rollout(db, lease, [make_sample("a", 0), replace(make_sample("a", 1), prompt_ids=(1,))])
    with pytest.raises(ValueError, match="reward lease"):
        complete_reward(db, lease, [])
    assert complete_rollout(db, lease, roll_out(lease))
    with pytest.raises(ValueError, match="rollout lease"):
        complete_rollout(db, take(db, "reward"), [])


@pytest.mark.parametrize(
    "scores",
    [
        [],
        [make_reward("a", 0)],
        [make_reward("a", 0), make_reward("a", 0)],
        [make_reward("a", index) for index in range(3)],
        [make_reward("a", 0), make_reward("b", 0)],
        [make_reward("a", 0), make_reward("a", 1, value=float("nan"))],
        [make_reward("a", 0), Reward(prompt_uid="a", sample_index=1, status="ok", value=None)],
        [make_reward("a", 0), Reward(prompt_uid="a", sample_index=1, status="timeout", value=0.0)],
    ],
)
def test_wrong_scores_are_refused_and_leave_the_lease(db: Database, scores: list[Reward]) -> None:
    plan(db, [["a"]])
    complete_next_rollout(db)
    lease = take(db, "reward")
    with pytest.raises(ValueError):
        complete_reward(db, lease, scores)
    assert complete_reward(db, lease, [make_reward("a", 0), make_reward("a", 1)])


def test_a_batch_holds_whole_groups_with_their_rewards_in_order(db: Database) -> None:
    plan(db, [["b"], ["a", "Z"]])
    for statuses in (("ok", "ok"), ("ok", "ok")):
        complete_next_rollout(db)
        complete_next_reward(db, statuses)
    batch = select_batch(db, "run-1", 1, 0, 0)
    assert (batch.num_groups, batch.num_samples, batch.num_tokens, batch.num_dropped) == (3, 6, 18, 0)
    assert (batch.policy_version, batch.uri, batch.manifest_sha256) == (0, None, None)
    scored = batch_samples(db, "run-1", 1)
    assert [item.sample for item in scored] == [make_sample(uid, i) for uid in ("Z", "a", "b") for i in range(2)]
    assert [item.reward for item in scored] == [make_reward(uid, i) for uid in ("Z", "a", "b") for i in range(2)]
    assert {draw.consumed_by for draw in list_draws(db, "run-1", 1)} == {1}


def test_failed_rewards_of_a_usable_group_stay_in_the_batch(db: Database) -> None:
    plan(db, [["a"]])
    lease = take(db, "rollout")
    complete_rollout(db, lease, roll_out(lease, group_size=4))
    complete_next_reward(db, ("ok", "timeout", "ok", "error"))
    select_batch(db, "run-1", 1, 0, 0)
    rewards = [item.reward for item in batch_samples(db, "run-1", 1)]
    assert [(reward.status, reward.value, reward.detail) for reward in rewards] == [
        ("ok", 0.5, ""),
        ("timeout", None, "timeout"),
        ("ok", 0.5, ""),
        ("error", None, "error"),
    ]


def test_a_frozen_batch_ignores_what_arrives_later(db: Database) -> None:
    plan(db, [["late"]])
    plan(db, [["a"]], iteration=2)
    complete_next_rollout(db)
    complete_next_rollout(db, iteration=2)
    complete_next_reward(db, iteration=2)
    first = select_batch(db, "run-1", 2, 0, 0)
    complete_next_reward(db)
    assert select_batch(db, "run-1", 2, 7, 9) == first
    assert {item.sample.prompt_uid for item in batch_samples(db, "run-1", 2)} == {"a"}
    assert (fates(db, 2), fates(db, 1)) == ({"a": "consumed"}, {"late": "drawn"})


def test_a_late_group_goes_to_the_next_batch_while_fresh_enough(db: Database) -> None:
    plan(db, [["late"]])
    plan(db, [["a"]], iteration=2)
    complete_next_rollout(db, iteration=2)
    complete_next_reward(db, iteration=2)
    select_batch(db, "run-1", 2, 0, 1)
    complete_next_rollout(db)
    complete_next_reward(db)
    plan(db, [["c"]], iteration=3, policy_version=1)
    complete_next_rollout(db, (1, 1), iteration=3)
    complete_next_reward(db, iteration=3)
    assert select_batch(db, "run-1", 3, 1, 1).num_groups == 2
    assert {item.sample.prompt_uid for item in batch_samples(db, "run-1", 3)} == {"c", "late"}
    assert [draw.consumed_by for draw in list_draws(db, "run-1", 1)] == [3]


def test_processes_that_select_at_once_get_one_batch(db: Database, database_url: str) -> None:
    plan(db, [["a"], ["b"]])
    for versions in ((0, 1), (1, 1)):
        complete_next_rollout(db, versions)
        complete_next_reward(db)
    outcomes = in_processes(select_with_staleness, [(database_url, staleness) for staleness in (0, 1, 0, 1)])
    stored = get_batch(db, "run-1", 1)
    assert outcomes == [(stored.num_groups, stored.num_dropped)] * 4
    assert sorted(fates(db).values()).count("consumed") == stored.num_groups


def test_without_a_usable_group_the_selection_fails_and_drops_nothing(db: Database) -> None:
    plan(db, [["a"], ["b"], ["c"]])
    for versions, statuses in (((0,), ("ok", "ok")), ((3,), ("ok", "timeout")), ((3,), ("error", "timeout"))):
        complete_next_rollout(db, versions)
        complete_next_reward(db, statuses)
    with pytest.raises(DataError, match="iteration 1: no group to train on .2 no usable reward, 1 stale.") as error:
        select_batch(db, "run-1", 1, 3, 1)
    assert "\n" not in str(error.value)
    assert set(fates(db).values()) == {"drawn"}
    with pytest.raises(DataError, match="iteration 9: not planned"):
        select_batch(db, "run-1", 9, 3, 1)
    with pytest.raises(DataError, match="no batch is selected yet"):
        batch_samples(db, "run-1", 1)


def test_the_reasons_say_what_happened(db: Database) -> None:
    plan(db, [["few"], ["good"], ["late"], ["old"]])
    cases: list[tuple[Sequence[int], tuple[RewardStatus, RewardStatus]]] = [
        ((2,), ("ok", "timeout")),
        ((2,), ("ok", "ok")),
        ((4,), ("ok", "ok")),
        ((0, 3), ("ok", "ok")),
    ]
    for versions, statuses in cases:
        complete_next_rollout(db, versions)
        complete_next_reward(db, statuses)
    select_batch(db, "run-1", 1, 3, 1)
    assert {draw.prompt_uid: draw.drop_reason for draw in list_draws(db, "run-1", 1)} == {
        "few": "no usable reward: 1 ok of 2 (1 timeouts, 0 errors), at least 2 needed",
        "good": None,
        "late": "stale: version 4 is later than 3, which is trained",
        "old": "stale: version 0 is 3 behind 3, at most 1",
    }


def test_finishing_a_batch_twice_changes_nothing(db: Database) -> None:
    plan(db, [["a"]])
    with pytest.raises(DataError, match="no batch is selected yet"):
        finish_batch(db, "run-1", 1, "s3://bucket/batch", "sha")
    complete_next_rollout(db)
    complete_next_reward(db)
    select_batch(db, "run-1", 1, 0, 0)
    finished = finish_batch(db, "run-1", 1, "s3://bucket/batch", "sha")
    assert (finished.uri, finished.manifest_sha256) == ("s3://bucket/batch", "sha")
    assert finish_batch(db, "run-1", 1, "s3://bucket/batch", "sha") == finished == get_batch(db, "run-1", 1)
    with pytest.raises(DataError, match="a batch never changes"):
        finish_batch(db, "run-1", 1, "s3://bucket/batch", "other")
    assert get_batch(db, "run-1", 1) == finished


def with_routing(uid: str, index: int, uri: str = "") -> Sample:
    """Three prompt and three response tokens, two layers, two experts a token."""
    sample = make_sample(uid, index)
    ids = struct.pack("<24h", *range(22), -1, -1)
    return replace(sample, routing=SampleRouting(num_layers=2, top_k=2, ids=b"" if uri else ids, uri=uri))


def test_routing_comes_back_inline_or_as_a_uri_beside_samples_without(db: Database) -> None:
    plan(db, [["a"]])
    lease = take(db, "rollout")
    drawn = [with_routing("a", 0), with_routing("a", 1, "s3://bucket/routing/0123.bin"), make_sample("a", 2)]
    assert complete_rollout(db, lease, drawn)
    assert unit_samples(db, "run-1", 1, ["a"]) == drawn


def test_routing_of_another_length_is_refused_and_nothing_is_stored(db: Database) -> None:
    plan(db, [["a"]])
    lease = take(db, "rollout")
    sample = with_routing("a", 0)
    assert sample.routing is not None
    for routing in (
        replace(sample.routing, num_layers=3),
        replace(sample.routing, ids=sample.routing.ids[:-2]),
        replace(sample.routing, uri="s3://bucket/both.bin"),
    ):
        with pytest.raises(ValueError, match="sample a/0: routing has"):
            complete_rollout(db, lease, [replace(sample, routing=routing)])
    assert unit_samples(db, "run-1", 1, ["a"]) == []
