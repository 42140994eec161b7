"""`moerl submit` and `moerl resume` on a cluster: the objects they create, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from steps.errors import UsageError
from tests.cluster_runs import campaign, child, failed_run, half_done_run, init, node, status
from tests.doubles.kubernetes_api import KubernetesApi
from tests.fixtures_cluster import Moerl
from workflows import campaign as campaign_definition
from workflows import iteration as iteration_definition
from workflows.cluster.client import Cluster, Conflict
from workflows.cluster.runs import CAMPAIGN_LABEL, CAMPAIGN_TEMPLATE, ITERATION_TEMPLATE, RUN_LABEL
from workflows.cluster.status import CHILD_STEP
from workflows.cluster.submit import LONGEST_NAME, campaign_workflow, submit
from workflows.parameters import CAMPAIGN


def argo_submit(template: str, name: str, labels: str, parameters: list[str]) -> dict[str, Any]:
    """What `argo submit --from workflowtemplate/TEMPLATE --name N -l LABELS -p ...` sends, as Argo 4.1.2 makes it.

    NewWorkflowFromWorkflowTemplate in workflow/common/convert.go, then ApplySubmitOpts and overrideParameters in
    workflow/util/util.go.
    """
    workflow: dict[str, Any] = {
        "metadata": {"generateName": f"{template}-", "labels": {"workflows.argoproj.io/workflow-template": template}},
        "spec": {"workflowTemplateRef": {"name": template}, "arguments": {}},
    }
    workflow["metadata"]["labels"] |= dict(pair.split("=", 1) for pair in labels.split(","))
    pairs = [pair.split("=", 1) for pair in parameters]
    workflow["spec"]["arguments"]["parameters"] = [{"name": name, "value": value} for name, value in pairs]
    workflow["metadata"]["name"] = name
    return {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow"} | workflow


def sent(api: KubernetesApi, name: str) -> dict[str, Any]:
    """The object without what the server adds."""
    stored = api.get("workflows", name)
    for added in ("uid", "creationTimestamp", "generation", "namespace", "resourceVersion"):
        del stored["metadata"][added]
    return stored


def arguments(api: KubernetesApi, name: str) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in api.get("workflows", name)["spec"]["arguments"]["parameters"]}


def test_submit_creates_what_argo_submit_creates(api: KubernetesApi, moerl: Moerl) -> None:
    code, out, err = moerl("submit", "--run-id", "digits", "-p", "iterations=5", "-p", "rollout-workers=16")
    assert (code, out) == (0, "run     digits: workflow digits in namespace moerl of double\n"), err
    expected = argo_submit(
        "policy-campaign", "digits", "moerl/run=digits", ["run=digits", "iterations=5", "rollout-workers=16"]
    )
    assert sent(api, "digits") == expected


def test_the_configuration_travels_as_resolved_text(api: KubernetesApi, moerl: Moerl) -> None:
    code, out, err = moerl("submit", "sort-digits", "--set", "seed=7", "--run-id", "digits", "--json")
    assert code == 0, err
    assert json.loads(out) == {"run_id": "digits", "workflow": "digits", "namespace": "moerl", "context": "double"}
    text = arguments(api, "digits")["config"]
    assert "seed = 7" in text and 'name = "sort-digits"' in text


def test_an_uri_of_a_configuration_travels_as_it_is(api: KubernetesApi, moerl: Moerl) -> None:
    code, out, _ = moerl("submit", "s3://bucket/configs/Big_Run.toml", "--json")
    assert code == 0
    run = json.loads(out)["run_id"]
    assert run.startswith("big-run-")
    assert arguments(api, run) == {"run": run, "config": "s3://bucket/configs/Big_Run.toml"}


def test_a_dry_run_prints_the_object_and_asks_no_cluster(api: KubernetesApi, moerl: Moerl) -> None:
    code, out, _ = moerl("submit", "--run-id", "digits", "-p", "iterations=5", "--dry-run")
    assert code == 0
    assert yaml.safe_load(out) == campaign_workflow("digits", "digits", {"iterations": "5"})
    assert api.calls == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "rollout-wrkers=3"], ["no parameter 'rollout-wrkers'", "rollout-workers"]),
        (["-p", "dispatcher=deepp"], ["dispatcher = 'deepp'", "deepep"]),
        (["-p", "iterations"], ["write NAME=VALUE"]),
        (["--run-id", "Upper_Case"], ["run id 'Upper_Case'"]),
        (["--set", "seed=1"], ["--set", "moerl submit sort-digits"]),
        (["no-such-config"], ["no configuration 'no-such-config'"]),
    ],
)
def test_a_wrong_argument_is_one_line_and_creates_nothing(
    api: KubernetesApi, moerl: Moerl, arguments: list[str], words: list[str]
) -> None:
    code, out, err = moerl("submit", *arguments)
    assert (code, out, err.count("\n")) == (64, "", 1)
    assert all(word in err for word in words), err
    assert api.names("workflows") == []


def test_a_parameter_without_a_default_must_be_given(api: KubernetesApi, cluster: Cluster) -> None:
    template = api.get("workflowtemplates", "policy-campaign")
    declared = template["spec"]["arguments"]["parameters"]
    api.patch(
        "workflowtemplates",
        "policy-campaign",
        {"spec": {"arguments": {"parameters": [*declared, {"name": "team", "description": "Who pays"}]}}},
    )
    with pytest.raises(UsageError, match=r"parameter team is missing \(Who pays\): give it with -p team="):
        submit(cluster, "digits", {})


def test_a_cluster_without_our_templates_is_told(api: KubernetesApi, moerl: Moerl) -> None:
    api.store.delete(api.kind("workflowtemplates"), "moerl", "policy-campaign")
    code, _, err = moerl("submit", "--run-id", "digits")
    assert code == 78 and "kubectl apply -k templates/" in err


def test_a_run_that_is_being_driven_is_not_submitted_again(api: KubernetesApi, moerl: Moerl) -> None:
    api.add("workflows", campaign("digits", status("Running")))
    code, _, err = moerl("submit", "--run-id", "digits")
    assert code == 64 and "watch digits" in err


def test_a_run_that_failed_is_to_be_resumed(api: KubernetesApi, moerl: Moerl) -> None:
    failed_run(api)
    code, _, err = moerl("submit", "--run-id", "digits")
    assert code == 64 and "resume digits" in err


def test_a_finished_run_gets_more_iterations_by_another_campaign(api: KubernetesApi, moerl: Moerl) -> None:
    api.add("workflows", campaign("digits", status("Succeeded")))
    assert moerl("submit", "--run-id", "digits", "-p", "iterations=2")[0] == 0
    api.patch("workflows", "digits-2", {"status": {"phase": "Succeeded"}})
    code, out, _ = moerl("submit", "--run-id", "digits", "-p", "iterations=2")
    assert code == 0 and "workflow digits-3" in out
    assert arguments(api, "digits-3") == {"run": "digits", "iterations": "2"}


def test_a_name_that_is_another_runs_is_passed_over(api: KubernetesApi, moerl: Moerl) -> None:
    api.add("workflows", campaign("digits", status("Succeeded")))
    api.add("workflows", campaign("digits-2", status("Running")))
    code, out, _ = moerl("submit", "--run-id", "digits")
    assert code == 0 and "workflow digits-3" in out


def test_a_name_that_leaves_no_room_for_its_pods_is_refused(api: KubernetesApi, moerl: Moerl) -> None:
    run = "r" * 40
    for name in (run, *(f"{run}-{number}" for number in range(2, 10))):
        api.add("workflows", campaign(run, status("Succeeded"), name))
    code, _, err = moerl("submit", "--run-id", run)
    assert code == 64 and "too long" in err and "shorter --run-id" in err


def test_of_two_submissions_at_once_one_wins(
    api: KubernetesApi, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workflows.cluster.submit.find_campaigns", lambda cluster, run_id: [])
    submit(cluster, "digits", {})
    with pytest.raises(Conflict, match="workflow digits exists in namespace moerl, started a moment ago"):
        submit(cluster, "digits", {})


def test_resume_of_a_failed_run_does_what_is_left(api: KubernetesApi, moerl: Moerl) -> None:
    failed_run(api, iterations="3", config="x = 1", queue="gpu")
    code, out, err = moerl("resume", "digits", "-p", "image=example.com/moerl:2")
    assert code == 0, err
    assert "workflow digits-2" in out
    assert arguments(api, "digits-2") == {
        "run": "digits",
        "iterations": "2",
        "config": "x = 1",
        "queue": "gpu",
        "image": "example.com/moerl:2",
    }
    labels = api.get("workflows", "digits-2")["metadata"]["labels"]
    assert labels["workflows.argoproj.io/resubmitted-from-workflow"] == "digits"


def test_resume_does_not_repeat_an_iteration_that_outlived_its_watcher(api: KubernetesApi, moerl: Moerl) -> None:
    failed_run(api, iterations="3")
    api.patch("workflows", "digits-00002", {"metadata": {"labels": {"workflows.argoproj.io/phase": "Succeeded"}}})
    assert moerl("resume", "digits")[0] == 0
    assert arguments(api, "digits-2")["iterations"] == "1"


def test_resume_keeps_the_count_when_the_run_ended_before_it_was_known(api: KubernetesApi, moerl: Moerl) -> None:
    api.add("workflows", campaign("digits", status("Error", node("init", "init", "Error")), iterations="0"))
    assert moerl("resume", "digits")[0] == 0
    assert arguments(api, "digits-2")["iterations"] == "0"


def test_resume_leaves_out_what_a_newer_template_no_longer_takes(api: KubernetesApi, moerl: Moerl) -> None:
    failed_run(api, retired_parameter="1")
    assert moerl("resume", "digits")[0] == 0
    assert "retired-parameter" not in arguments(api, "digits-2")


def test_resume_reads_nodes_that_argo_packed(api: KubernetesApi, moerl: Moerl) -> None:
    nodes = (init(5), child(1, "Succeeded", "0.5"), child(2, "Failed"))
    api.add("workflows", campaign("digits", status("Failed", *nodes, packed=True)))
    assert moerl("resume", "digits")[0] == 0
    assert arguments(api, "digits-2")["iterations"] == "4"


def test_resume_asks_for_the_count_where_argo_keeps_the_nodes_elsewhere(api: KubernetesApi, moerl: Moerl) -> None:
    api.add("workflows", campaign("digits", {"phase": "Failed", "offloadNodeStatusVersion": "v1"}, iterations="3"))
    code, _, err = moerl("resume", "digits")
    assert code == 64 and "-p iterations=N" in err
    assert moerl("resume", "digits", "-p", "iterations=2")[0] == 0
    assert arguments(api, "digits-2")["iterations"] == "2"


def test_a_suspended_campaign_takes_no_other_parameters(api: KubernetesApi, moerl: Moerl) -> None:
    api.add("workflows", campaign("digits", status("Running")))
    api.patch("workflows", "digits", {"spec": {"suspend": True}})
    code, _, err = moerl("resume", "digits", "-p", "image=example.com/moerl:2")
    assert code == 64 and "goes on with its own parameters" in err and "moerl stop digits" in err
    assert api.get("workflows", "digits")["spec"]["suspend"] is True


def test_a_parameter_that_names_another_run_is_refused(api: KubernetesApi, moerl: Moerl) -> None:
    failed_run(api)
    for command in (("submit", "--run-id", "digits"), ("resume", "digits")):
        code, _, err = moerl(*command, "-p", "run=other")
        assert code == 64 and "parameter run = 'other'" in err
    assert api.names("workflows") == ["digits", "digits-00002"]


def test_resume_wakes_a_suspended_iteration(api: KubernetesApi, moerl: Moerl) -> None:
    half_done_run(api)
    api.patch("workflows", "digits-00002", {"spec": {"suspend": True}})
    assert "suspended" in moerl("status", "digits")[1]
    code, _, err = moerl("resume", "digits")
    assert code == 0, err
    assert "suspend" not in api.get("workflows", "digits-00002")["spec"]
    assert "suspended" not in moerl("status", "digits")[1]


def test_resume_wakes_a_suspended_campaign(api: KubernetesApi, moerl: Moerl) -> None:
    api.add("workflows", campaign("digits", status("Running")))
    api.patch("workflows", "digits", {"spec": {"suspend": True}})
    assert moerl("resume", "digits")[0] == 0
    assert "suspend" not in api.get("workflows", "digits")["spec"]
    assert api.names("workflows") == ["digits"]


@pytest.mark.parametrize(
    ("spec", "phase", "words"),
    [
        ({}, "Running", "nothing to resume"),
        ({"shutdown": "Stop"}, "Running", "still stopping"),
        ({}, "Succeeded", "finished"),
    ],
)
def test_resume_of_a_run_that_needs_none_is_refused(
    api: KubernetesApi, moerl: Moerl, spec: dict[str, str], phase: str, words: str
) -> None:
    api.add("workflows", campaign("digits", status(phase)))
    api.patch("workflows", "digits", {"spec": spec})
    code, _, err = moerl("resume", "digits")
    assert code == 64 and words in err


def test_resume_of_a_run_whose_summary_failed_names_the_way(api: KubernetesApi, moerl: Moerl) -> None:
    nodes = (init(1), child(1, "Succeeded", "0.5"), node("summary", "summary", "Failed"))
    api.add("workflows", campaign("digits", status("Failed", *nodes)))
    code, _, err = moerl("resume", "digits")
    assert code == 64 and "argo retry digits" in err


def test_resume_takes_the_run_here_unless_the_cluster_is_meant(
    api: KubernetesApi, moerl: Moerl, tmp_path: Path
) -> None:
    failed_run(api)
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    (tmp_path / "runs" / "digits" / "run.json").write_text("{}")
    code, _, err = moerl("resume", "digits")
    assert code == 65 and "run.json can't be understood" in err
    assert moerl("resume", "digits", "--context", "double")[0] == 0
    assert "digits-2" in api.names("workflows")


def test_resume_of_a_run_that_is_nowhere_says_both(moerl: Moerl) -> None:
    code, _, err = moerl("resume", "absent")
    assert code == 65
    assert "no run 'absent' in runs" in err and "no run 'absent' in namespace moerl of double" in err


def test_names_here_are_those_of_the_definitions() -> None:
    assert (CAMPAIGN_TEMPLATE, ITERATION_TEMPLATE) == (campaign_definition.NAME, iteration_definition.NAME)
    assert CHILD_STEP == campaign_definition.CHILD_TEMPLATE
    assert LONGEST_NAME == campaign_definition.LONGEST_NAME
    manifest = yaml.safe_load(campaign_definition.child_manifest())
    assert CAMPAIGN_LABEL in manifest["metadata"]["labels"]
    assert RUN_LABEL == "moerl/run"
    assert {"run", "config", "iterations"} <= {parameter.name for parameter in CAMPAIGN}
