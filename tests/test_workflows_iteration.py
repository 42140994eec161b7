"""policy-iteration: the DAG, its fan-out, what survives lost workers, and what the workflow hands out."""

from typing import Any

import yaml

from workflows import catalog, iteration
from workflows.local.expressions import WHEN, evaluate_bool

DOCUMENT: dict[str, Any] = yaml.safe_load(catalog.render_all()["policy-iteration.yaml"])
SPEC: dict[str, Any] = DOCUMENT["spec"]
TEMPLATES: dict[str, dict[str, Any]] = {template["name"]: template for template in SPEC["templates"]}
TASKS: dict[str, dict[str, Any]] = {task["name"]: task for task in TEMPLATES["iteration"]["dag"]["tasks"]}


def test_stages_run_in_the_order_of_the_pipeline() -> None:
    assert {name: task.get("depends") for name, task in TASKS.items()} == {
        "plan": None,
        "rollout": "plan",
        "reward": "rollout.AnySucceeded",
        "flush": "reward.AnySucceeded",
        "train": "flush",
        "train-gang": "flush",
        "publish": "train.Succeeded || train-gang.Succeeded",
        "evaluate": "publish",
        "report": "evaluate",
    }


def test_one_node_trains_in_a_pod_and_several_in_a_gang_never_both() -> None:
    for nodes, runs in (("1", {"train"}), ("2", {"train-gang"}), ("16", {"train-gang"})):
        conditions = {
            name: TASKS[name]["when"].replace("{{workflow.parameters.training-nodes}}", nodes)
            for name in ("train", "train-gang")
        }
        assert {name for name, condition in conditions.items() if evaluate_bool(condition, {}, WHEN)} == runs


def test_exit_handler_deletes_the_gang_by_its_fixed_name_and_only_where_there_may_be_one() -> None:
    assert SPEC["onExit"] == "exit"
    ((step,),) = TEMPLATES["exit"]["steps"]
    assert step["when"] == "{{workflow.parameters.training-nodes}} > 1"
    deletion = TEMPLATES[step["template"]]
    assert deletion["resource"] == {
        "action": "delete",
        "flags": ["jobsets.jobset.x-k8s.io", "t-{{workflow.name}}", "--wait=false"],
    }
    assert deletion["serviceAccountName"] == TEMPLATES["train-gang"]["serviceAccountName"] == "moerl-gang"


def test_rollout_ends_at_a_deadline_that_the_submission_may_set_and_the_iteration_at_its_own() -> None:
    assert TEMPLATES["rollout"]["activeDeadlineSeconds"] == "{{workflow.parameters.rollout-deadline}}"
    assert SPEC["activeDeadlineSeconds"] == 2 * 86400


def test_fan_outs_take_their_width_from_the_workflow_parameters() -> None:
    for name in ("rollout", "reward"):
        assert TASKS[name]["withSequence"] == {"count": f"{{{{workflow.parameters.{name}-workers}}}}"}
        assert TASKS[name]["arguments"]["parameters"] == [{"name": "worker", "value": "{{item}}"}]


def test_no_stage_consumes_the_outputs_of_a_fan_out() -> None:
    for fan_out in ("rollout", "reward"):
        assert f"tasks.{fan_out}.outputs" not in str(SPEC)


def test_dag_leaves_both_fail_fast_switches_alone() -> None:
    assert "failFast" not in TEMPLATES["iteration"]
    assert "failFast" not in TEMPLATES["iteration"]["dag"]


def test_dag_outputs_have_defaults_and_the_same_values_are_outputs_of_the_workflow() -> None:
    outputs = TEMPLATES["iteration"]["outputs"]["parameters"]
    assert [output["name"] for output in outputs] == [
        *("policy-version", "reward-eval", "validated", "summary", "mlflow-url")
    ]
    assert all(output["valueFrom"]["default"] == "" for output in outputs)
    published = {
        parameter["globalName"]
        for template in TEMPLATES.values()
        for parameter in template.get("outputs", {}).get("parameters", [])
        if "globalName" in parameter
    }
    assert published == {output["name"] for output in outputs}


def test_only_rollout_and_reward_run_on_capacity_that_may_go_away() -> None:
    def capacity(template: dict[str, Any]) -> str:
        return next(e["value"] for e in template["container"]["env"] if e["name"] == "MOERL_CAPACITY_TYPE")

    leaves = {name: capacity(template) for name, template in TEMPLATES.items() if "container" in template}
    assert {name for name, kind in leaves.items() if "spot" in kind} == {"rollout", "reward"}
    assert {kind for name, kind in leaves.items() if "spot" not in kind} == {"on-demand"}


def test_spot_stages_end_within_the_two_minutes_notice_and_the_trainer_has_longer() -> None:
    grace_s = {
        name: yaml.safe_load(template["podSpecPatch"])["terminationGracePeriodSeconds"]
        for name, template in TEMPLATES.items()
        if "container" in template
    }
    assert grace_s["rollout"] == grace_s["reward"] == 90
    assert grace_s["train"] > 110


def test_submission_must_name_run_and_iteration_and_every_parameter_is_described() -> None:
    parameters = {parameter["name"]: parameter for parameter in SPEC["arguments"]["parameters"]}
    assert list(parameters) == [
        *("run", "iteration", "rollout-workers", "reward-workers", "training-nodes", "ranks-per-node"),
        "engine-pods",
        *("rollout-capacity", "reward-capacity", "rollout-deadline", "straggler-deadline"),
        *("queue", "image", "environment", "credentials"),
    ]
    assert [name for name, parameter in parameters.items() if "value" not in parameter] == ["run", "iteration"]
    assert all(parameter["description"] for parameter in parameters.values())


def test_report_is_shown_by_the_ui_as_a_page() -> None:
    (artifact,) = TEMPLATES["report"]["outputs"]["artifacts"]
    assert artifact["path"] == "/tmp/moerl/outputs/report.html"
    assert artifact["archive"] == {"none": {}}
    assert artifact["optional"] is True
    assert artifact["s3"]["key"].endswith(".html")
    assert "artifactGC" not in str(SPEC)


def test_stage_names_are_those_of_the_dag() -> None:
    assert [stage.name for stage in iteration.STAGES] == [name for name in TASKS if name != "train-gang"]
