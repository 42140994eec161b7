"""Reports and the tracking mirror: a dead tracking server costs nothing, and what it missed arrives later, once."""

from pathlib import Path

from mlflow import MlflowClient

from steps import paths
from tests.fixtures_steps import RUN, TINY_CONFIG, StepRunner

PATIENT = TINY_CONFIG + "[tracking]\nbudget_s = 60.0\n"
"""On a busy machine MLflow's first connection to a new database may take longer than the default budget."""


def tracked_run(uri: str) -> tuple[MlflowClient, str]:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("argo-moe-rl")
    (run,) = client.search_runs([experiment.experiment_id], "")
    return client, run.info.run_id


def test_training_goes_on_without_a_tracking_server_and_the_spool_is_replayed_later(
    steps: StepRunner, tmp_path: Path
) -> None:
    steps.env["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9"
    steps.init(PATIENT)
    steps.iterate(1)
    assert "3 records wait in the spool" in steps.step("report").log
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    steps.env["MLFLOW_TRACKING_URI"] = uri
    steps.iterate(2)
    client, run_id = tracked_run(uri)
    history = client.get_metric_history(run_id, "val-core/reward_mean")
    assert [metric.step for metric in history] == [0, 1, 2]
    assert [metric.timestamp for metric in history] == sorted({metric.timestamp for metric in history})
    assert [metric.step for metric in client.get_metric_history(run_id, "critic/rewards/mean")] == [1, 2]


def test_one_run_holds_parameters_once_and_a_resumed_campaign_goes_on_in_it(steps: StepRunner, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    steps.env["MLFLOW_TRACKING_URI"] = uri
    steps.init(PATIENT)
    steps.iterate(1)
    assert steps.run(["steps.report", "--run", RUN]).code == 0
    steps.iterate(2)
    assert steps.run(["steps.report", "--run", RUN]).code == 0
    client, run_id = tracked_run(uri)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["train.optimizer.learning_rate"] == "0.01"
    assert run.data.tags["moerl.run_id"] == RUN
    assert run.data.tags["publication"].endswith(paths.publication_prefix(RUN, 2))
    names = list(run.data.metrics)
    assert not [name for name in names if any(other.startswith(f"{name}/") for other in names)]
    assert client.get_model_version_by_alias(RUN, "candidate").tags["policy_version"] == "2"


def test_the_report_is_static_and_tells_the_iteration(steps: StepRunner) -> None:
    steps.init()
    steps.iterate(1)
    result = steps.step("report")
    html = result.outputs["report.html"]
    assert "<script" not in html and "http://" not in html.replace("http://www.w3.org", "")
    assert result.outputs["summary"].startswith("iteration 1: held-out reward")
    stored = steps.store.get_bytes(paths.iteration_report_key(RUN, 1, "html")).decode()
    assert "Policy" in stored or "iteration" in stored


def test_a_run_report_without_an_iteration_shows_the_warm_start(steps: StepRunner) -> None:
    steps.init()
    result = steps.run(["steps.report", "--run", RUN])
    assert result.code == 0, result.log
    assert result.outputs["summary"].startswith("0 iterations, 0 validated")


def test_a_run_report_while_an_iteration_is_under_way_does_not_end_the_run(steps: StepRunner, tmp_path: Path) -> None:
    steps.init()
    steps.iterate(1)
    steps.step("plan", 2)
    result = steps.run(["steps.report", "--run", RUN])
    assert result.code == 0, result.log
    assert result.outputs["summary"].startswith("1 iterations")
    assert not [info for info in steps.store.list(paths.spool_prefix(RUN)) if "run-end" in info.key]
