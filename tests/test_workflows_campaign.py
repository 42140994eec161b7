"""policy-campaign and policy-retraining: the loop of child Workflows, re-attachment, mutexes, the schedule."""

import re
from typing import Any

import pytest
import yaml

from workflows import campaign, catalog
from workflows.local.expressions import evaluate_bool
from workflows.platform import quantity_bytes

RENDERED = {name: yaml.safe_load(text) for name, text in catalog.render_all().items()}
SPEC: dict[str, Any] = RENDERED["policy-campaign.yaml"]["spec"]
ITERATION_SPEC: dict[str, Any] = RENDERED["policy-iteration.yaml"]["spec"]
CRON: dict[str, Any] = RENDERED["policy-retraining.yaml"]
TEMPLATES: dict[str, dict[str, Any]] = {template["name"]: template for template in SPEC["templates"]}


def steps(name: str) -> list[dict[str, Any]]:
    """The steps of a Steps template whose groups hold one step each."""
    groups = TEMPLATES[name]["steps"]
    assert all(len(group) == 1 for group in groups)
    return [group[0] for group in groups]


def test_campaign_is_init_then_engines_then_loop_then_summary() -> None:
    assert SPEC["entrypoint"] == "campaign"
    assert [(step["name"], step["template"]) for step in steps("campaign")] == [
        ("init", "init"),
        ("engines", "engines"),
        ("loop", "loop"),
        ("summary", "summary"),
    ]


def test_loop_runs_one_iteration_at_a_time_and_stops_at_a_failure() -> None:
    assert TEMPLATES["loop"]["parallelism"] == 1
    assert TEMPLATES["loop"]["failFast"] is True


def test_loop_counts_from_the_first_iteration_as_far_as_init_says() -> None:
    (step,) = steps("loop")
    assert step["withSequence"] == {
        "start": "{{inputs.parameters.first-iteration}}",
        "count": "{{inputs.parameters.iterations}}",
        "format": "%05d",
    }
    arguments = steps("campaign")[2]["arguments"]["parameters"]
    assert {argument["name"]: argument["value"] for argument in arguments} == {
        "first-iteration": "{{steps.init.outputs.parameters.first-iteration}}",
        "iterations": "{{steps.init.outputs.parameters.iterations}}",
        "rollout-workers": "{{steps.init.outputs.parameters.rollout-workers}}",
        "reward-workers": "{{steps.init.outputs.parameters.reward-workers}}",
        "training-nodes": "{{steps.init.outputs.parameters.training-nodes}}",
        "ranks-per-node": "{{steps.init.outputs.parameters.ranks-per-node}}",
        "engine-pods": "{{steps.init.outputs.parameters.engine-pods}}",
    }


def test_direct_child_of_the_loop_is_an_unretried_wrapper() -> None:
    (step,) = steps("loop")
    wrapper = TEMPLATES[step["template"]]
    assert "retryStrategy" not in wrapper
    assert "failFast" not in wrapper
    assert [inner["template"] for inner in steps(step["template"])] == ["child"]
    assert "retryStrategy" in TEMPLATES["child"]


def test_child_is_applied_with_a_fixed_name_and_nothing_but_a_reference_and_arguments() -> None:
    resource = TEMPLATES["child"]["resource"]
    assert resource["action"] == "apply"
    assert resource["setOwnerReference"] is True
    child = yaml.safe_load(resource["manifest"])
    assert child["metadata"]["name"] == "{{workflow.name}}-{{inputs.parameters.iteration}}"
    assert "generateName" not in child["metadata"]
    assert set(child["spec"]) == {"workflowTemplateRef", "arguments"}
    assert child["spec"]["workflowTemplateRef"] == {"name": "policy-iteration"}


def test_child_gets_exactly_the_arguments_that_policy_iteration_declares() -> None:
    child = yaml.safe_load(campaign.child_manifest())
    passed = {parameter["name"] for parameter in child["spec"]["arguments"]["parameters"]}
    assert passed == {parameter["name"] for parameter in ITERATION_SPEC["arguments"]["parameters"]}


def test_child_carries_labels_by_which_its_campaign_and_its_iteration_are_found() -> None:
    labels = yaml.safe_load(campaign.child_manifest())["metadata"]["labels"]
    assert labels == {"moerl/campaign": "{{workflow.name}}", "moerl/iteration": "{{inputs.parameters.iteration}}"}


def test_exit_handler_deletes_the_running_child_unless_the_campaign_succeeded() -> None:
    assert SPEC["onExit"] == "exit"
    ((step, _),) = TEMPLATES["exit"]["steps"]
    assert step["when"] == "{{workflow.status}} != Succeeded"
    deletion = TEMPLATES[step["template"]]
    assert deletion["resource"]["action"] == "delete"
    kind, selector, wait = deletion["resource"]["flags"]
    assert kind == "workflows.argoproj.io"
    assert selector == "--selector=moerl/campaign={{workflow.name}},workflows.argoproj.io/completed!=true"
    assert wait == "--wait=false"
    assert deletion["serviceAccountName"] == campaign.CAMPAIGN_SERVICE_ACCOUNT


def test_values_of_the_child_stay_strings_once_argo_has_replaced_the_placeholders() -> None:
    manifest = re.sub(r"\{\{[^}]+\}\}", "00001", campaign.child_manifest())
    child = yaml.safe_load(manifest)
    assert all(parameter["value"] == "00001" for parameter in child["spec"]["arguments"]["parameters"])
    assert child["metadata"]["name"] == "00001-00001"


def test_watcher_has_no_deadline_of_its_own_and_runs_on_stable_capacity_as_its_own_account() -> None:
    child = TEMPLATES["child"]
    assert "activeDeadlineSeconds" not in child
    assert child["serviceAccountName"] == campaign.CAMPAIGN_SERVICE_ACCOUNT
    assert "on-demand" in str(child["affinity"])
    (container,) = yaml.safe_load(child["podSpecPatch"])["containers"]
    assert container["name"] == "main"
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    assert requests["cpu"] and quantity_bytes(requests["memory"]) >= 128 << 20
    assert quantity_bytes(limits["memory"]) >= 1 << 30, "kubectl reads the schemas of all kinds of the cluster"


@pytest.mark.parametrize(
    ("message", "attached_again"),
    [
        ("pod deleted", True),
        ("Pod was terminated in response to imminent node shutdown.", True),
        ("main: Error (exit code 64): context canceled", True),
        ("main: Error (exit code 64): failure condition 'status.phase in (Error,Failed)' evaluated true", False),
        ('main: Error (exit code 64): workflows.argoproj.io "x" is forbidden: User ... cannot get', False),
        ('main: Error (exit code 64): The Workflow "x" is invalid: metadata.name', False),
        ('main: Error (exit code 64): admission webhook "v.x" denied the request: no', False),
        ('main: Error (exit code 64): the server doesn\'t have a resource type "jobsets"', False),
    ],
)
def test_lost_watcher_attaches_again_and_a_failed_child_is_final(message: str, attached_again: bool) -> None:
    expression = TEMPLATES["child"]["retryStrategy"]["expression"]
    last_retry = {"exitCode": "64", "status": "Failed", "duration": "60", "message": message}
    assert evaluate_bool(expression, {"lastRetry": last_retry, "retries": "0"}) is attached_again


def test_campaign_and_its_iteration_hold_mutexes_of_the_run_that_cannot_block_each_other() -> None:
    (outer,) = SPEC["synchronization"]["mutexes"]
    (inner,) = ITERATION_SPEC["synchronization"]["mutexes"]
    assert outer["name"] != inner["name"]
    assert all(mutex["name"].endswith("-{{workflow.parameters.run}}") for mutex in (outer, inner))


def test_submission_must_name_the_run_and_every_parameter_is_described() -> None:
    parameters = {parameter["name"]: parameter for parameter in SPEC["arguments"]["parameters"]}
    assert list(parameters) == [
        *("run", "config", "iterations", "rollout-workers", "reward-workers", "dispatcher", "training-nodes"),
        *("rollout-engine", "engine-pods", "engine-image"),
        *("rollout-capacity", "reward-capacity", "rollout-deadline", "straggler-deadline"),
        *("queue", "image", "environment", "credentials"),
    ]
    assert [name for name, parameter in parameters.items() if "value" not in parameter] == ["run"]
    assert all(parameter["description"] for parameter in parameters.values())


def test_schedule_neither_overlaps_nor_loses_a_late_start_nor_repeats_failures_for_ever() -> None:
    spec = CRON["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    assert spec["startingDeadlineSeconds"] > 0
    assert spec["stopStrategy"] == {"expression": "cronworkflow.failed >= 3"}
    assert spec["timezone"] == "Etc/UTC"
    assert len(spec["schedules"]) == 1
    assert spec["suspend"] is True


def test_schedule_starts_the_campaign_with_declared_parameters() -> None:
    workflow = CRON["spec"]["workflowSpec"]
    assert set(workflow) == {"workflowTemplateRef", "arguments"}
    assert workflow["workflowTemplateRef"] == {"name": "policy-campaign"}
    declared = {parameter["name"]: "value" in parameter for parameter in SPEC["arguments"]["parameters"]}
    given = {parameter["name"] for parameter in workflow["arguments"]["parameters"]}
    assert given <= set(declared)
    assert given >= {name for name, has_default in declared.items() if not has_default}
