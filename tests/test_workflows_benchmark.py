"""policy-benchmark: what is probed, what is compared, and what comes out."""

from typing import Any

import pytest
import yaml

from workflows import catalog
from workflows.local.expressions import WHEN, evaluate_bool

SPEC: dict[str, Any] = yaml.safe_load(catalog.render_all()["policy-benchmark.yaml"])["spec"]
TEMPLATES: dict[str, dict[str, Any]] = {template["name"]: template for template in SPEC["templates"]}
TASKS: dict[str, dict[str, Any]] = {task["name"]: task for task in TEMPLATES["benchmark"]["dag"]["tasks"]}


def test_probes_run_one_after_the_other_and_the_comparison_last() -> None:
    assert {name: task.get("depends") for name, task in TASKS.items()} == {
        "probe-first": None,
        "probe-second": "probe-first",
        "rollout-comparison": "probe-second",
    }


@pytest.mark.parametrize(("dispatcher", "probed"), [("local", False), ("all_to_all", True), ("deepep", True)])
def test_only_a_dispatcher_that_exchanges_tokens_is_probed(dispatcher: str, probed: bool) -> None:
    for position in ("first", "second"):
        task = TASKS[f"probe-{position}"]
        condition = task["when"].replace(f"{{{{workflow.parameters.{position}-dispatcher}}}}", dispatcher)
        assert evaluate_bool(condition, {}, WHEN) is probed
        arguments = {argument["name"]: argument["value"] for argument in task["arguments"]["parameters"]}
        assert arguments["dispatcher"] == f"{{{{workflow.parameters.{position}-dispatcher}}}}"


def test_outcome_is_in_the_workflows_own_outputs() -> None:
    outputs = TEMPLATES["benchmark"]["outputs"]["parameters"]
    assert [output["name"] for output in outputs] == ["summary", "ratio", "report"]
    assert all(output["valueFrom"]["default"] == "" for output in outputs)


def test_it_neither_holds_nor_waits_for_the_lock_of_a_campaign() -> None:
    (mutex,) = SPEC["synchronization"]["mutexes"]
    assert mutex["name"] == "moerl-benchmark-{{workflow.parameters.run}}"
