"""Selection of a batch, against its rules written down once more: on SQLite and on PostgreSQL."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steps.adapters.buffer import batch_samples, complete_reward, select_batch
from steps.adapters.database import Database
from steps.errors import DataError
from steps.records import RewardStatus
from tests.experience import complete_rollout, end_without_samples, fates, make_reward, make_sample, plan, take


@dataclass(frozen=True)
class Case:
    """A group as the property test makes it; `statuses` is empty while it isn't scored."""

    iteration: int
    uid: str
    version: int
    statuses: tuple[RewardStatus, ...]


CASES = st.lists(
    st.builds(
        Case,
        iteration=st.integers(1, 3),
        uid=st.sampled_from("abc"),
        version=st.integers(0, 4),
        statuses=st.sampled_from([(), ("ok", "ok"), ("ok", "ok"), ("ok", "error"), ("timeout", "error")]),
    ),
    max_size=8,
    unique_by=lambda case: (case.iteration, case.uid),
)
RUN_NUMBERS = count()


def store(db: Database, run_id: str, cases: Sequence[Case]) -> None:
    """Each iteration has one unit of the groups that get scored and one of those that don't."""
    plan(db, [["filler"]], run_id=run_id, iteration=4)
    end_without_samples(db, take(db, "rollout", run_id=run_id, iteration=4))
    for iteration in {case.iteration for case in cases}:
        groups = {case.uid: case for case in cases if case.iteration == iteration}
        units = [[uid for uid, case in groups.items() if bool(case.statuses) is scored] for scored in (True, False)]
        plan(db, [unit for unit in units if unit], run_id=run_id, iteration=iteration)
        for uids in filter(None, units):
            lease = take(db, "rollout", run_id=run_id, iteration=iteration)
            drawn = [make_sample(uid, index, [groups[uid].version]) for uid in uids for index in range(2)]
            assert complete_rollout(db, lease, drawn)
        if units[0]:
            lease = take(db, "reward", run_id=run_id, iteration=iteration)
            scores = [make_reward(uid, index, groups[uid].statuses[index]) for uid in units[0] for index in range(2)]
            assert complete_reward(db, lease, scores)


def expected_fate(case: Case, cases: Sequence[Case], policy_version: int, max_staleness: int) -> str:
    def fit(other: Case) -> bool:
        return other.statuses == ("ok", "ok") and 0 <= policy_version - other.version <= max_staleness

    if not case.statuses:
        return "drawn"
    if not 0 <= policy_version - case.version <= max_staleness:
        return "stale"
    if case.statuses != ("ok", "ok"):
        return "no usable reward"
    newer = any(fit(other) and other.uid == case.uid and other.iteration > case.iteration for other in cases)
    return "superseded" if newer else "consumed"


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(cases=CASES, policy_version=st.integers(0, 4), max_staleness=st.integers(0, 3))
def test_every_group_meets_the_fate_that_the_rules_give_it(
    db: Database, cases: list[Case], policy_version: int, max_staleness: int
) -> None:
    run_id = f"run-{next(RUN_NUMBERS)}"
    store(db, run_id, cases)
    expected = {case: expected_fate(case, cases, policy_version, max_staleness) for case in cases}
    if "consumed" not in expected.values():
        with pytest.raises(DataError):
            select_batch(db, run_id, 4, policy_version, max_staleness)
        return
    batch = select_batch(db, run_id, 4, policy_version, max_staleness)
    assert {case: fates(db, case.iteration, run_id)[case.uid] for case in cases} == expected
    consumed = sorted(case.uid for case, fate in expected.items() if fate == "consumed")
    keys = [(item.sample.prompt_uid, item.sample.sample_index) for item in batch_samples(db, run_id, 4)]
    assert keys == [(uid, index) for uid in consumed for index in range(2)]
    assert batch.num_groups == len(consumed)
    assert batch.num_dropped == len(cases) - len(consumed) - list(expected.values()).count("drawn")
