"""Every rule of `moerl lint`: silent on what is rendered, and named when the manifests are tampered with."""

from collections.abc import Callable

import pytest

from tests.lint_cases_pods import CASES as PODS
from tests.lint_cases_workflow import CASES as WORKFLOWS
from tests.tampering import Case, Documents, documents, rules_that_find
from workflows.lint.linter import BUDGET, NO_SCHEMA, RULES, SCHEMA

CASES = (*WORKFLOWS, *PODS)


def _skipped_output(docs: Documents, **default: object) -> None:
    """A task reads an output of one that may be skipped; `default` says what holds then, of the input or the output."""
    docs.template("policy-iteration", "train")["outputs"]["parameters"].append(
        {"name": "note", "valueFrom": {"path": "/tmp/note", **default.get("output", {})}}  # type: ignore[dict-item]
    )
    docs.template("policy-iteration", "publish")["inputs"] = {
        "parameters": [{"name": "note", **default.get("input", {})}]  # type: ignore[dict-item]
    }
    tasks = docs.template("policy-iteration", "iteration")["dag"]["tasks"]
    publish = next(task for task in tasks if task["name"] == "publish")
    publish["arguments"] = {"parameters": [{"name": "note", "value": "{{tasks.train.outputs.parameters.note}}"}]}


def _tag_in_expression(docs: Documents) -> None:
    strategy = docs.template("policy-iteration", "plan")["retryStrategy"]
    strategy["expression"] = f"{{{{workflow.parameters.iteration}}}} >= 0 && ({strategy['expression']})"


def _read_the_child(docs: Documents) -> None:
    """`get` holds no more than what names the object."""
    reader = docs.template("policy-campaign", "child") | {"name": "reader"}
    manifest = "apiVersion: argoproj.io/v1alpha1\nkind: Workflow\nmetadata:\n  name: x\n"
    reader["resource"] = {"action": "get", "manifest": manifest}
    docs.of("policy-campaign")["spec"]["templates"].append(reader)


HARMLESS: dict[str, Callable[[Documents], object]] = {
    "skipped output with a default": lambda docs: _skipped_output(docs, output={"default": ""}),
    "skipped output for an input with a default": lambda docs: _skipped_output(docs, input={"default": ""}),
    "expression with a tag": _tag_in_expression,
    "get of a child": _read_the_child,
    "library without an entrypoint": lambda docs: docs.of("policy-benchmark")["spec"].pop("entrypoint"),
    "status in the workflow's metrics": lambda docs: docs.of("policy-benchmark")["spec"].update(
        metrics={"prometheus": [{"name": "n", "help": "h", "counter": {"value": "{{workflow.status}}"}}]}
    ),
    "all parameters as JSON": lambda docs: docs.container("plan")["args"].append("{{workflow.parameters.json}}"),
    "name of the task": lambda docs: docs.container("plan")["args"].append("{{tasks.name}}"),
}


def test_rendered_manifests_set_off_no_rule() -> None:
    assert rules_that_find(documents()) == set()


@pytest.mark.parametrize("case", CASES, ids=[f"{index}-{case.rule}" for index, case in enumerate(CASES)])
def test_trap_is_found_by_its_rule_and_no_other(case: Case) -> None:
    edited = documents()
    case.edit(edited)
    assert rules_that_find(edited) == {case.rule, *case.also}


@pytest.mark.parametrize("edit", HARMLESS.values(), ids=HARMLESS)
def test_what_argo_takes_sets_off_no_rule(edit: Callable[[Documents], object]) -> None:
    edited = documents()
    edit(edited)
    assert rules_that_find(edited) == set()


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in RULES} - {SCHEMA.name, NO_SCHEMA.name, BUDGET.name} == {case.rule for case in CASES}


def test_rules_have_names_of_their_own_and_say_in_one_line_what_to_do() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.name == rule.name.lower() and " " not in rule.name
        assert rule.advice and "\n" not in rule.advice and not rule.advice.endswith(".")
