"""The report's numbers, from a real database."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steps.adapters import ledger
from steps.adapters.database import Database, migrate, open_database
from steps.adapters.ledger import AttemptRow
from steps.adapters.runs import drop_open_prompts
from steps.config import RunConfig
from steps.config_loader import config_hash, config_json
from steps.errors import DataError
from steps.records import Evaluation, Publication
from steps.report_attempts import covered_seconds, label_attempts, span_seconds
from steps.report_html import render_iteration_html, render_run_html
from steps.reporting import build_run_report

RUN = "reverse-digits-1"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path / 'database.sqlite'}"
    migrate(url)
    db = open_database(url)
    config = RunConfig(iterations=1)
    ledger.create_run(db, RUN, config_json(config), config_hash(config))
    yield db


def attempt(db: Database, step: str, code: int | None, iteration: int | None = 1, **changes: Any) -> int:
    where = {"worker": None, "pod": "p", "node": "n", "capacity_type": "local"} | {
        key: value for key, value in changes.items() if key != "metrics"
    }
    provenance = json.dumps({"versions": {"torch": "2.13.0"}})
    attempt_id = ledger.begin_attempt(db, RUN, iteration, step, **where, provenance_json=provenance)
    if code is not None:
        ledger.end_attempt(db, attempt_id, code, "why" if code else "", json.dumps(changes.get("metrics", {})))
    return attempt_id


def publish(db: Database, version: int, reward: float, validated: bool = True) -> None:
    ledger.record_publication(
        db,
        Publication(
            run_id=RUN, policy_version=version, parent_version=version - 1 if version else None, uri=f"/p/{version}",
            manifest_sha256="a", weights_sha256=f"weights-{version}", size_bytes=1,
        ),
    )  # fmt: skip
    ledger.record_evaluation(
        db,
        Evaluation(
            run_id=RUN, policy_version=version, reward_eval=reward, num_prompts=8, validated=validated, reason="r"
        ),
    )


def whole_iteration(db: Database) -> None:
    """Version 0, then an iteration in which rollout worker 1 was interrupted once."""
    attempt(db, "init_run", 0, None)
    publish(db, 0, 0.25)
    ledger.plan_iteration(db, RUN, 1, 0, [("u1", 0), ("u2", 1)], [["u1"], ["u2"]], 0, 2)
    attempt(db, "plan", 0)
    attempt(db, "rollout", 0, worker="0", metrics={"samples": 8, "tokens": 40, "seconds": 2.0})
    lost = attempt(db, "rollout", 75, worker="1", metrics={"samples": 0, "tokens": 0, "seconds": 0.5})
    ledger.record_interruption(db, lost, "sigterm")
    attempt(db, "rollout", 0, worker="1", metrics={"samples": 8, "tokens": 40, "seconds": 1.0})
    with db.transaction() as connection:
        drop_open_prompts(connection, RUN, 1, {"u2": "no usable reward"})
    flush = {"samples": 8, "tokens": 40, "reward_mean": 0.5}
    ledger.set_iteration_metrics(db, RUN, 1, "flush", flush)
    train = {"samples_per_s": 99.0, "expert_max_violation": 0.2, "expert_load": [[1, 2], [3, 4]]}
    ledger.set_iteration_metrics(db, RUN, 1, "train", train)
    attempt(db, "train", 0)
    publish(db, 1, 0.75)


def test_report_has_the_documented_keys(database: Database) -> None:
    whole_iteration(database)
    report = build_run_report(database, RUN)
    assert report["final_weights_sha256"] == "weights-1"
    assert report["config_hash"] == config_hash(RunConfig(iterations=1))
    assert report["versions"] == {"torch": "2.13.0"}
    assert report["state"] == "finished"
    assert report["wall_seconds"] >= 0
    (row,) = report["iterations"]
    expected = {
        "policy_version": 1, "sampled_from": 0, "reward_mean": 0.5, "reward_eval": 0.75, "validated": True,
        "samples": 16, "tokens": 80, "rollout_tokens_per_s": 40.0, "train_samples_per_s": 99.0,
        "expert_max_violation": 0.2, "interruptions": 1, "retries": 1, "dropped": {"no usable reward": 1},
    }  # fmt: skip
    assert {key: row[key] for key in expected} == expected
    account = {name: value for name, value in row["accounting"].items() if value}
    assert account == {"drawn": 2, "dropped": 1, "open": 1}  # the samples of this run are its attempts' word only
    assert list(row["phase_seconds"]) == ["plan", "rollout", "train"]
    assert json.loads(json.dumps(report)) == report


def test_initial_is_the_policy_before_the_first_update(database: Database) -> None:
    whole_iteration(database)
    initial = build_run_report(database, RUN)["initial"]
    assert (initial["policy_version"], initial["reward_eval"], initial["validated"]) == (0, 0.25, True)
    assert list(initial["phase_seconds"]) == ["init_run"]


def test_an_iteration_under_way_has_none_for_what_is_not_known(database: Database) -> None:
    publish(database, 0, 0.25)
    ledger.plan_iteration(database, RUN, 1, 0, [("u1", 0)], [["u1"]], 0, 1)
    attempt(database, "plan", None)
    report = build_run_report(database, RUN)
    (row,) = report["iterations"]
    assert report["state"] == "0 of 1 iterations done"
    assert report["final_weights_sha256"] == "weights-0"
    assert row["reward_mean"] is row["reward_eval"] is row["validated"] is row["tokens"] is None
    assert (row["interruptions"], row["retries"]) == (0, 0)


def test_pages_are_made_from_the_report_of_a_real_database(database: Database) -> None:
    whole_iteration(database)
    report = build_run_report(database, RUN)
    assert "0.250 → 0.750" in render_run_html(report)
    assert "Policy version 0 → 1" in render_iteration_html(report, 1)


def test_a_run_that_is_not_there_is_named(database: Database) -> None:
    with pytest.raises(DataError, match="no-such-run"):
        build_run_report(database, "no-such-run")


def row(number: int, start_s: float, end_s: float | None, code: int | None, worker: str | None = None) -> AttemptRow:
    return AttemptRow(
        attempt_id=number, run_id=RUN, iteration=1, step="rollout", worker=worker, pod="", node="", capacity_type="",
        started_at=start_s, ended_at=end_s, exit_code=code, detail="", provenance={}, metrics={},
        transport={},
    )  # fmt: skip


def test_a_killed_attempt_is_known_by_the_one_that_followed() -> None:
    killed, again = label_attempts([row(1, 0.0, None, None), row(2, 5.0, 6.0, 0)], set())
    assert (killed.state, killed.interrupted, killed.is_retry) == ("interrupted", True, False)
    assert (again.state, again.attempt, again.is_retry) == ("ok", 2, True)


def test_a_step_that_ran_again_after_it_succeeded_is_no_retry() -> None:
    _, again = label_attempts([row(1, 0.0, 1.0, 0), row(2, 5.0, 6.0, 0)], set())
    assert not again.is_retry


def test_a_drained_attempt_that_ended_well_counts_as_interrupted() -> None:
    (drained,) = label_attempts([row(1, 0.0, 1.0, 0)], {1})
    assert drained.state == "ok" and drained.interrupted


def test_workers_side_by_side_and_pauses_are_not_counted_twice() -> None:
    attempts = label_attempts(
        [row(1, 0.0, 4.0, 0, "0"), row(2, 1.0, 5.0, 75, "1"), row(3, 100.0, 101.0, 0, "1"), row(4, 2.0, None, None)],
        set(),
    )
    assert covered_seconds(attempts) == pytest.approx(6.0)
    assert span_seconds(attempts) == pytest.approx(101.0)
