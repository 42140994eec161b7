"""The stages together: what an iteration leaves behind, twice, at the same time, and killed on the way."""

import json
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from steps import paths
from steps.adapters import buffer, leases, ledger
from steps.adapters.publications import read_pointer
from steps.adapters.store import Store
from steps.records import Evaluation
from tests.experience import worker
from tests.fixtures_s3 import use_server
from tests.fixtures_steps import RUN, STAGES, TINY_CONFIG, StepRunner, stage_argv


def stored(store: Store) -> dict[str, str]:
    """Every object with its etag, but the reports and the notes that a campaign started."""
    objects = {info.key: info.etag for info in store.list("") if "/reports/" not in info.key}
    return {key: etag for key, etag in objects.items() if not key.endswith("-start.jsonl")}


def began(steps: StepRunner, stage: str, iteration: int = 1) -> Callable[[], bool]:
    """Holds once an attempt of the stage is in the ledger: its SIGTERM handler is installed then."""
    database = steps.database

    def check() -> bool:
        return any(row.step == stage for row in ledger.list_attempts(database, RUN, iteration))

    return check


def test_an_iteration_trains_publishes_and_judges_a_new_version(steps: StepRunner) -> None:
    started = steps.init()
    assert started.code == 0, started.log
    assert started.outputs == {
        "first-iteration": "1",
        "iterations": "2",
        "policy-version": "0",
        "rollout-workers": "2",
        "reward-workers": "1",
        "training-nodes": "1",
        "ranks-per-node": "1",
        "engine-pods": "0",
    }
    steps.iterate()
    first, second = ledger.list_publications(steps.database, RUN)
    assert (first.policy_version, second.policy_version, second.parent_version) == (0, 1, 0)
    assert first.weights_sha256 != second.weights_sha256
    assert read_pointer(steps.store, paths.latest_key(RUN))["policy_version"] == 1
    assert [row.policy_version for row in ledger.list_evaluations(steps.database, RUN)] == [0, 1]
    report = json.loads(steps.store.get_bytes(paths.run_report_key(RUN, "json")))
    assert report["iterations"][0]["samples"] == 32
    draws = ledger.list_draws(steps.database, RUN, 1)
    assert {draw.status for draw in draws} == {"consumed"}
    assert len(draws) == 8


def test_every_step_run_again_after_it_finished_changes_nothing(steps: StepRunner) -> None:
    steps.init()
    outputs = {}
    for stage in STAGES:
        outputs[stage] = steps.step(stage).outputs
    before = stored(steps.store)
    for stage in STAGES:
        again = steps.step(stage)
        assert again.code == 0, again.log
        if stage not in ("rollout", "reward", "report"):  # these say what this attempt did
            assert again.outputs == outputs[stage]
    assert steps.init().outputs["first-iteration"] == "2"
    assert stored(steps.store) == before


@pytest.mark.parametrize("stage", STAGES)
def test_two_attempts_of_a_step_at_the_same_time_have_one_outcome(
    steps: StepRunner, stage: str, undisturbed_weights: str
) -> None:
    steps.init()
    for iteration in (1, 2):
        for current in STAGES:
            argv = stage_argv(current, iteration)
            results = steps.run_together([argv, argv] if current == stage else [argv])
            assert [result.code for result in results] == [0] * len(results), results[0].log
    assert steps.final_weights() == undisturbed_weights


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_killed_at_a_random_moment_and_run_again_ends_with_the_same_weights(
    steps: StepRunner, stage: str, number: signal.Signals, undisturbed_weights: str
) -> None:
    assert steps.init().code == 0
    moment = random.Random(f"{stage}{number}")
    for iteration in (1, 2):
        for current in STAGES:
            argv = stage_argv(current, iteration)
            if current == stage:
                due = time.monotonic() + moment.uniform(0.0, 0.3)
                killed = steps.run_together([argv], signal_when=(lambda due=due: time.monotonic() > due, number))[0]
                assert killed.code in (0, 75, 128 + number), killed.log
            result = steps.run(argv)
            assert result.code == 0, result.log
    assert steps.final_weights() == undisturbed_weights
    assert {draw.status for draw in ledger.list_draws(steps.database, RUN, 2)} == {"consumed"}


def test_workers_share_the_units_and_their_number_changes_nothing(steps: StepRunner, undisturbed_weights: str) -> None:
    steps.init()
    for iteration in (1, 2):
        for stage in STAGES:
            workers = 3 if stage in ("rollout", "reward") else 1
            results = steps.run_together([stage_argv(stage, iteration, worker) for worker in range(workers)])
            assert {result.code for result in results} == {0}
    assert steps.final_weights() == undisturbed_weights


def test_the_unit_of_a_killed_worker_is_sampled_by_another(steps: StepRunner) -> None:
    steps.init()
    steps.step("plan")
    lost = leases.lease_unit(steps.database, RUN, 1, "rollout", worker(9), lease_s=0.2)
    assert lost is not None
    result = steps.step("rollout")
    assert result.code == 0, result.log
    assert result.outputs["samples"] == "32"
    assert buffer.commit_groups(steps.database, lost, []).lost


def test_sigterm_returns_the_lease_and_exits_75(steps: StepRunner) -> None:
    steps.init(TINY_CONFIG.replace("lease_s = 2.0", "lease_s = 600.0"))
    steps.step("plan")
    result = steps.run_together([stage_argv("rollout")], signal_when=(began(steps, "rollout"), signal.SIGTERM))[0]
    assert result.code == 75
    assert "interrupted by SIGTERM; run the same command again" in result.log
    assert "Traceback" not in result.log
    (interruption,) = ledger.list_interruptions(steps.database, RUN)
    assert (interruption.step, interruption.reason) == ("rollout", "SIGTERM")
    # Had it kept a lease of 600 s, this would wait for ever.
    assert steps.step("rollout").code == 0


def test_an_interrupted_update_continues_after_its_last_optimizer_step(
    steps: StepRunner, undisturbed_weights: str
) -> None:
    steps.init()
    for iteration in (1, 2):
        for stage in STAGES:
            argv = stage_argv(stage, iteration)
            if stage == "train":
                when = began(steps, "train", iteration)
                stopped = steps.run_together([argv], signal_when=(when, signal.SIGTERM))[0]
                assert stopped.code == 75, stopped.log
                saved = re.search(r"state saved after optimizer step (\d) of the batch", stopped.log)
                resumed = steps.run(argv)
                assert saved and f"continuing after optimizer step {saved[1]} " in resumed.log
                assert resumed.code == 0
            assert steps.run(argv).code == 0
    assert steps.final_weights() == undisturbed_weights
    assert not [info for info in steps.store.list("") if "-partial" in info.key]


def test_on_postgresql_and_s3_the_weights_are_the_same(
    warm_server,
    tmp_path: Path,
    postgres_url: str,
    radosgw_server,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed_weights: str,
) -> None:
    uri = f"s3://{use_server(radosgw_server, monkeypatch)}/runs-here"
    runner = StepRunner(warm_server, tmp_path, uri, postgres_url)
    started = runner.init()
    assert started.code == 0, started.log
    runner.iterate(1)
    runner.iterate(2)
    assert runner.final_weights() == undisturbed_weights


def test_old_trainer_states_are_deleted_but_never_the_newest(steps: StepRunner) -> None:
    steps.init(f"{TINY_CONFIG}\n[train]\nkeep_checkpoints = 1\n".replace("[train.optimizer]\nlearning_rate = 1e-2", ""))
    for iteration in (1, 2, 3):
        steps.iterate(iteration)
    kept = {info.key.split("/")[3] for info in steps.store.list(f"runs/{RUN}/checkpoints")}
    assert {"00000", "00003"} <= kept
    assert "00001" not in kept


def test_a_rejected_version_is_kept_but_not_sampled_from_when_the_gate_rolls_back(steps: StepRunner) -> None:
    gate = '\n[evaluate.gate]\nmin_reward = 1.0\non_reject = "rollback"\n'
    steps.init(TINY_CONFIG + gate)
    steps.iterate(1)
    assert steps.step("evaluate").outputs["validated"] == "false"
    assert read_pointer(steps.store, paths.validated_key(RUN)) is None
    # Nothing was ever validated: there is nothing to go back to.
    assert steps.step("plan", 2).outputs["policy-version"] == "1"
    assert len(ledger.list_publications(steps.database, RUN)) == 2


def test_the_iteration_after_a_rejected_version_samples_from_the_last_validated_one(steps: StepRunner) -> None:
    steps.init(TINY_CONFIG + '\n[evaluate.gate]\non_reject = "rollback"\n')
    for stage in STAGES[:6]:
        assert steps.step(stage).code == 0
    rejected = Evaluation(run_id=RUN, policy_version=1, reward_eval=0.0, num_prompts=16, validated=False, reason="test")
    ledger.record_evaluation(steps.database, rejected)
    assert steps.step("evaluate").outputs["validated"] == "false"
    assert steps.step("plan", 2).outputs["policy-version"] == "0"
    for stage in STAGES[1:]:
        result = steps.step(stage, 2)
        assert result.code == 0, result.log
    assert ledger.get_publication(steps.database, RUN, 2).parent_version == 0
