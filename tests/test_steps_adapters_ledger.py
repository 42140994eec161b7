"""steps/adapters/ledger.py (runs, publications, attempts), on SQLite and on PostgreSQL."""

import json
from dataclasses import replace

import pytest

from steps.adapters import ledger
from steps.adapters.database import Database
from steps.adapters.runs import drop_open_prompts
from steps.errors import ConfigError, DataError
from steps.records import Evaluation, Publication
from tests.experience import die_in_plan, in_processes, plan, plan_with_version, run_until_killed
from tests.unit_rows import list_units


def publication(version: int, parent: int | None = None) -> Publication:
    return Publication(
        run_id="run-1",
        policy_version=version,
        parent_version=parent,
        uri=f"s3://bucket/runs/run-1/publications/{version:05d}",
        manifest_sha256=f"manifest-{version}",
        weights_sha256=f"weights-{version}",
        size_bytes=2**40,
    )


def verdict(version: int, validated: bool = True) -> Evaluation:
    return Evaluation(
        run_id="run-1", policy_version=version, reward_eval=0.5, num_prompts=256, validated=validated, reason="gate"
    )


def begin(db: Database, step: str = "rollout", iteration: int | None = 1) -> int:
    return ledger.begin_attempt(db, "run-1", iteration, step, "0", "pod-0", "node-0", "spot", '{"torch": "2.13"}')


def test_creating_a_run_twice_returns_the_first(db: Database) -> None:
    first = ledger.create_run(db, "run-1", '{"seed": 0}', "hash")
    assert ledger.create_run(db, "run-1", '{"seed": 0}', "hash") == first
    assert ledger.get_run(db, "run-1") == first
    assert first.config_json == '{"seed": 0}'


def test_a_run_with_another_configuration_is_refused(db: Database) -> None:
    ledger.create_run(db, "run-1", "{}", "hash")
    with pytest.raises(ConfigError, match="run run-1: .*another configuration"):
        ledger.create_run(db, "run-1", '{"seed": 1}', "other")
    assert ledger.get_run(db, "run-1").config_hash == "hash"


def test_runs_are_listed_oldest_first(db: Database) -> None:
    for run_id in ("b", "a", "c"):
        ledger.create_run(db, run_id, "{}", "hash")
    assert [run.run_id for run in ledger.list_runs(db)] == ["b", "a", "c"]


def test_what_is_missing_is_named(db: Database) -> None:
    with pytest.raises(DataError, match="run nobody"):
        ledger.get_run(db, "nobody")
    with pytest.raises(DataError, match="run nobody"):
        ledger.plan_iteration(db, "nobody", 1, 0, [("a", 0)], [["a"]], 0, 1)
    with pytest.raises(DataError, match="run nobody"):
        ledger.set_iteration_metrics(db, "nobody", 1, "train", {})
    with pytest.raises(DataError, match="iteration 7: not planned"):
        ledger.get_iteration(db, "run-1", 7)
    with pytest.raises(DataError, match="policy version 7"):
        ledger.get_publication(db, "run-1", 7)
    with pytest.raises(DataError, match="policy version 7"):
        ledger.record_evaluation(db, verdict(7))


def test_a_plan_is_frozen(db: Database) -> None:
    first = plan(db, [["b", "a"], ["c"]], policy_version=4)
    assert plan(db, [["x"]], policy_version=5) == first
    assert ledger.get_iteration(db, "run-1", 1) == first
    assert (first.policy_version, first.num_prompts, first.num_units) == (4, 3, 2)
    assert [(draw.prompt_uid, draw.position, draw.unit) for draw in ledger.list_draws(db, "run-1", 1)] == [
        ("b", 0, 0),
        ("a", 1, 0),
        ("c", 2, 1),
    ]
    assert {(unit.kind, unit.unit, unit.state) for unit in list_units(db, "run-1", 1)} == {
        ("rollout", 0, "pending"),
        ("rollout", 1, "pending"),
    }


def test_processes_that_plan_at_once_get_one_plan(db: Database, database_url: str) -> None:
    ledger.create_run(db, "run-1", "{}", "hash")
    versions = in_processes(plan_with_version, [(database_url, version) for version in range(4)])
    stored = ledger.get_iteration(db, "run-1", 1).policy_version
    assert versions == [stored] * 4
    assert [draw.prompt_uid for draw in ledger.list_draws(db, "run-1", 1)] == [f"p{stored}"]
    assert len(list_units(db, "run-1", 1)) == 1


@pytest.mark.parametrize("statement", ["INSERT INTO prompt_draws", "INSERT INTO work_units"])
def test_a_plan_that_is_killed_leaves_nothing(db: Database, database_url: str, statement: str) -> None:
    run_until_killed(die_in_plan, database_url, statement)
    assert ledger.list_iterations(db, "run-1") == []
    assert plan(db, [["a"], ["b"]]).num_prompts == 2


def test_a_prompt_drawn_twice_in_one_iteration_is_refused(db: Database) -> None:
    with pytest.raises(DataError, match="prompt a is drawn twice.*prompts_per_iteration"):
        plan(db, [["a", "b"], ["a"]])


@pytest.mark.parametrize("units", [[], [["a"]], [["a", "b"], []], [["a", "b"], ["c"]]])
def test_units_must_hold_each_prompt_once(db: Database, units: list[list[str]]) -> None:
    ledger.create_run(db, "run-1", "{}", "hash")
    with pytest.raises(ValueError, match="each of the 2 prompts once"):
        ledger.plan_iteration(db, "run-1", 1, 0, [("a", 0), ("b", 1)], units, 0, 2)


def test_the_cursor_follows_the_last_iteration_of_its_run(db: Database) -> None:
    assert ledger.last_cursor(db, "run-1") == 0
    plan(db, [["a", "b"]])
    plan(db, [["c"]], iteration=2)
    plan(db, [["c"] * 1, ["d"]], run_id="run-2")
    assert ledger.last_cursor(db, "run-1") == 1001
    assert [row.iteration for row in ledger.list_iterations(db, "run-1")] == [1, 2]


def test_dropping_prompts_keeps_the_first_reason(db: Database) -> None:
    plan(db, [["a", "b"]])
    with db.transaction() as connection:
        for reasons in ({"a": "prompt too long"}, {"a": "again"}, {}):
            drop_open_prompts(connection, "run-1", 1, reasons)
    assert [(draw.status, draw.drop_reason) for draw in ledger.list_draws(db, "run-1", 1)] == [
        ("dropped", "prompt too long"),
        ("drawn", None),
    ]


def test_metrics_are_kept_by_phase_and_replaced_by_a_later_attempt(db: Database) -> None:
    plan(db, [["a"]])
    ledger.set_iteration_metrics(db, "run-1", 1, "train", {"loss": 1.0})
    ledger.set_iteration_metrics(db, "run-1", 1, "train", {"loss": 0.5, "steps": [1, 2]})
    ledger.set_iteration_metrics(db, "run-1", 1, "rollout", {"tokens": 7})
    assert ledger.get_iteration_metrics(db, "run-1", 1) == {
        "rollout": {"tokens": 7},
        "train": {"loss": 0.5, "steps": [1, 2]},
    }
    assert ledger.get_iteration_metrics(db, "run-1", 2) == {}


def test_recording_a_publication_twice_changes_nothing(db: Database) -> None:
    ledger.create_run(db, "run-1", "{}", "hash")
    first = publication(0)
    assert ledger.record_publication(db, first) == first
    assert ledger.record_publication(db, first) == first
    ledger.record_publication(db, publication(2, parent=0))
    assert ledger.get_publication(db, "run-1", 0) == first
    assert ledger.list_publications(db, "run-1") == [first, publication(2, parent=0)]


def test_a_publication_with_other_weights_is_refused(db: Database) -> None:
    ledger.create_run(db, "run-1", "{}", "hash")
    ledger.record_publication(db, publication(0))
    with pytest.raises(DataError, match="policy version 0: already recorded"):
        ledger.record_publication(db, replace(publication(0), weights_sha256="other"))
    assert ledger.list_publications(db, "run-1") == [publication(0)]


def test_the_first_verdict_stands(db: Database) -> None:
    ledger.create_run(db, "run-1", "{}", "hash")
    ledger.record_publication(db, publication(0))
    assert ledger.record_evaluation(db, verdict(0)) == verdict(0)
    assert ledger.record_evaluation(db, verdict(0, validated=False)) == verdict(0)
    assert ledger.list_evaluations(db, "run-1") == [verdict(0)]


def test_the_last_validated_publication_is_the_newest_that_passed(db: Database) -> None:
    ledger.create_run(db, "run-1", "{}", "hash")
    assert ledger.last_validated(db, "run-1") is None
    for version, passed in enumerate([True, True, False]):
        ledger.record_publication(db, publication(version))
        ledger.record_evaluation(db, verdict(version, passed))
    assert ledger.last_validated(db, "run-1") == publication(1)


def test_an_attempt_is_recorded_from_start_to_end(db: Database) -> None:
    first = begin(db, "init_run", None)
    second = begin(db)
    ledger.end_attempt(db, first, 0, "done", json.dumps({"tokens": 9}), json.dumps({"observed": "all_to_all"}))
    ledger.end_attempt(db, first, 1, "late")
    done, running = ledger.list_attempts(db, "run-1")
    assert (done.attempt_id, done.step, done.iteration, done.exit_code, done.detail) == (
        first,
        "init_run",
        None,
        0,
        "done",
    )
    assert (done.metrics, done.provenance) == ({"tokens": 9}, {"torch": "2.13"})
    assert (done.transport, running.transport) == ({"observed": "all_to_all"}, {})
    assert done.ended_at is not None and done.ended_at >= done.started_at
    assert (running.attempt_id, running.ended_at, running.exit_code, running.capacity_type) == (
        second,
        None,
        None,
        "spot",
    )
    assert [attempt.attempt_id for attempt in ledger.list_attempts(db, "run-1", 1)] == [second]
    assert ledger.list_attempts(db, "run-2") == []


def test_an_interruption_is_recorded_once_for_each_reason(db: Database) -> None:
    attempt = begin(db)
    ledger.record_interruption(db, attempt, "sigterm", "drained in 2 s")
    ledger.record_interruption(db, attempt, "sigterm", "again")
    ledger.record_interruption(db, attempt, "spot")
    found = ledger.list_interruptions(db, "run-1")
    assert [(row.reason, row.detail, row.step, row.node) for row in found] == [
        ("sigterm", "drained in 2 s", "rollout", "node-0"),
        ("spot", "", "rollout", "node-0"),
    ]


def test_text_that_one_database_cannot_hold_is_stored_alike(db: Database) -> None:
    attempt = begin(db)
    ledger.end_attempt(db, attempt, 1, "nul \0, half a pair \ud83d, 中文 🙂")
    assert ledger.list_attempts(db, "run-1")[0].detail == "nul \ufffd, half a pair \ufffd, 中文 🙂"
