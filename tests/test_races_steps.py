"""Each step of a run, done by two or three processes at the same time: there is one outcome, also of noisy numbers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe.consolidate import consolidate
from moe.publication import weights_sha256
from steps import paths
from steps.adapters import ledger
from steps.adapters.publications import read_pointer
from steps.adapters.publications_cache import fetch_folder
from steps.audit import audit_run
from tests.fixtures_s3 import use_server
from tests.fixtures_steps import REPOSITORY, RUN, STAGES, TINY_CONFIG, StepResult, StepRunner, stage_argv
from workflows.local.warm_client import DEFAULT_PRELOAD, Preload, WarmServer

KINDS = ("directory and SQLite", "S3 and PostgreSQL")
CONFIG = TINY_CONFIG + "\n[train]\ncheckpoint_every = 2\n[evaluate.gate]\nmin_reward = 0.5\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmServer]:
    preload = Preload(first=(*DEFAULT_PRELOAD.first, "tests.noisy_steps"))
    server = WarmServer(log=tmp_path_factory.mktemp("warm") / "server.log", cwd=REPOSITORY, preload=preload)
    yield server
    server.close()


@pytest.fixture(params=KINDS)
def runner(
    request: pytest.FixtureRequest, server: WarmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StepRunner:
    if request.param == KINDS[0]:
        return StepRunner(server, tmp_path, f"{tmp_path}/store", f"sqlite:///{tmp_path}/moerl.sqlite")
    bucket = use_server(request.getfixturevalue("radosgw_server"), monkeypatch)
    return StepRunner(server, tmp_path, f"s3://{bucket}/races", request.getfixturevalue("empty_postgres_url"))


def contest(runner: StepRunner, argvs: list[list[str]], noise: str = "") -> list[StepResult]:
    runner.env["NOISE"] = noise
    results = runner.run_together(argvs)
    assert [result.code for result in results] == [0] * len(argvs), [result.log for result in results]
    return results


def contestants(stage: str, iteration: int) -> list[list[str]]:
    """Two, and where workers share a step the one of another number."""
    argv = stage_argv(stage, iteration)
    return [argv, argv, stage_argv(stage, iteration, 1)] if stage in ("rollout", "reward") else [argv, argv]


def check_audit(runner: StepRunner) -> None:
    audit = audit_run(runner.database, runner.store, RUN, deep=True)
    assert audit.clean, [str(failed) for failed in audit.findings.failed]


def test_every_step_done_by_several_at_the_same_time_has_one_outcome(
    runner: StepRunner, undisturbed_weights: str
) -> None:
    init = ["steps.init_run", "--run", RUN, "--config", TINY_CONFIG]
    contest(runner, [init, init])
    for iteration in (1, 2):
        for stage in STAGES:
            results = contest(runner, contestants(stage, iteration))
            if stage not in ("rollout", "reward", "report"):  # these say what one attempt did
                assert results[0].outputs == results[1].outputs
    contest(runner, [["steps.report", "--run", RUN]] * 2)
    assert runner.final_weights() == undisturbed_weights
    check_audit(runner)


def test_trainers_publishers_and_judges_of_noisy_numbers_leave_one_policy_and_one_verdict(runner: StepRunner) -> None:
    assert runner.init(CONFIG).code == 0
    for iteration in (1, 2):
        for stage in STAGES:
            argv = stage_argv(stage, iteration)
            is_noisy = stage in ("train", "publish", "evaluate")
            contest(runner, [argv, argv] if is_noisy else [argv], "update,probe,score" if is_noisy else "")
    check_audit(runner)
    pointer = read_pointer(runner.store, paths.latest_key(RUN))
    publication = ledger.get_publication(runner.database, RUN, 2)
    assert pointer is not None and pointer["manifest_sha256"] == publication.manifest_sha256
    verdicts = {row.policy_version: row.validated for row in ledger.list_evaluations(runner.database, RUN)}
    validated = read_pointer(runner.store, paths.validated_key(RUN))
    assert (validated or {"version": -1})["version"] == max((v for v, good in verdicts.items() if good), default=-1)
    report = json.loads(runner.store.get_bytes(paths.run_report_key(RUN, "json")))
    assert [row["validated"] for row in report["iterations"]] == [verdicts[1], verdicts[2]]


def test_two_starts_with_noisy_warm_ups_publish_the_weights_that_the_run_trains_from(
    runner: StepRunner, tmp_path: Path
) -> None:
    warmup = "\n[warmup]\nmax_steps = 2\nbatch_size = 8\n"
    init = ["steps.init_run", "--run", RUN, "--config", TINY_CONFIG + warmup]
    contest(runner, [init, init], "update")
    check_audit(runner)
    state = fetch_folder(runner.store, paths.checkpoint_prefix(RUN, 0), tmp_path / "copies")
    policy = fetch_folder(runner.store, paths.publication_prefix(RUN, 0), tmp_path / "copies")
    (tmp_path / "trained").mkdir()
    consolidate(state, policy, tmp_path / "trained", "float32")
    assert weights_sha256(tmp_path / "trained") == ledger.get_publication(runner.database, RUN, 0).weights_sha256
