"""Every generated manifest under templates/: the published schemas, closed references, names, retries."""

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from workflows import campaign, jobset
from workflows.lint.schemas import close

REPOSITORY = Path(__file__).resolve().parent.parent
TEMPLATES = REPOSITORY / "templates"
SCHEMAS = Path(os.environ.get("MOERL_SCHEMAS", REPOSITORY.parent / "shared" / "schemas"))
ARGO_SCHEMA = SCHEMAS / "argo-workflows-4.1.2.schema.json"
DEFINITIONS = "io.argoproj.workflow.v1alpha1."
DISPLAY_NAME = "workflows.argoproj.io/display-name"
DISPLAY_NAME_PATTERN = re.compile(r"^[a-zA-Z0-9][a-zA-Z0-9-.]{0,61}[a-zA-Z0-9]$")
LONGEST_RUN_ID = "r" * 40
LAST_ITERATION = "99999"

REFERENCE = re.compile(r"\{\{([^{}]*)\}\}")

DOCUMENTS: dict[str, dict[str, Any]] = {
    str(path.relative_to(TEMPLATES)): document
    for path in sorted(TEMPLATES.rglob("policy-*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}
WORKFLOW_TEMPLATES = {name: doc for name, doc in DOCUMENTS.items() if doc["kind"] == "WorkflowTemplate"}
each_document = pytest.mark.parametrize("document", DOCUMENTS.values(), ids=list(DOCUMENTS))
each_workflow_template = pytest.mark.parametrize("document", WORKFLOW_TEMPLATES.values(), ids=list(WORKFLOW_TEMPLATES))


@cache
def argo_validator(kind: str) -> Draft202012Validator:
    """Argo's schema with unknown fields refused: the published one accepts any."""
    if not ARGO_SCHEMA.is_file():
        pytest.skip(f"{ARGO_SCHEMA} is absent; set MOERL_SCHEMAS to the folder that holds it")
    definitions = json.loads(ARGO_SCHEMA.read_text())["definitions"]
    for definition in definitions.values():
        close(definition)
    return Draft202012Validator({"$ref": f"#/definitions/{DEFINITIONS}{kind}", "definitions": definitions})


def problems(document: dict[str, Any]) -> list[str]:
    validator = argo_validator(document["kind"])
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def templates_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {template["name"]: template for template in document["spec"]["templates"]}


def calls_of(template: dict[str, Any]) -> list[dict[str, Any]]:
    """The tasks of a DAG or the steps of a Steps template."""
    if "dag" in template:
        return list(template["dag"]["tasks"])
    return [step for group in template.get("steps", []) for step in group]


def is_leaf(template: dict[str, Any]) -> bool:
    return "container" in template or "resource" in template


# --- the published schema -------------------------------------------------------------------------------------------


@each_document
def test_manifest_passes_argos_schema_with_unknown_fields_refused(document: dict[str, Any]) -> None:
    assert problems(document) == []


def embedded_manifests() -> dict[str, str]:
    """Every manifest inside a resource template, as Argo hands it to kubectl: its tags replaced."""
    return {
        f"{name}: {template['name']}": filled_in(template["resource"]["manifest"])
        for name, document in WORKFLOW_TEMPLATES.items()
        for template in document["spec"]["templates"]
        if "manifest" in template.get("resource", {})
    }


def filled_in(manifest: str) -> str:
    """For a run on three nodes; the label of the queue has its key by an expression."""
    return REFERENCE.sub(lambda tag: {"workflow.name": "run-1-00001"}.get(tag[1], "3"), manifest).replace(
        '"3": ', "kueue.x-k8s.io/queue-name: "
    )


@cache
def jobset_validator() -> Draft202012Validator:
    path = SCHEMAS / "jobset.x-k8s.io_jobsets.crd.yaml"
    if not path.is_file():
        pytest.skip(f"{path} is absent; set MOERL_SCHEMAS to the folder that holds it")
    (version,) = yaml.safe_load(path.read_text())["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    close(schema)
    allow_int_or_string(schema)
    return Draft202012Validator(schema)


def allow_int_or_string(schema: Any) -> None:
    """Quantities and ports: the CRD says so by an extension that JSON Schema does not know."""
    if isinstance(schema, dict):
        if schema.get("x-kubernetes-int-or-string"):
            schema.pop("anyOf", None)
            schema["type"] = ["integer", "string"]
        for part in schema.values():
            allow_int_or_string(part)
    elif isinstance(schema, list):
        for part in schema:
            allow_int_or_string(part)


def test_embedded_jobsets_pass_the_crds_schema_with_unknown_fields_refused() -> None:
    gangs = {name: yaml.safe_load(text) for name, text in embedded_manifests().items() if "kind: JobSet" in text}
    assert {name.split(": ")[1] for name in gangs} == {"train-gang"}
    for name, gang in gangs.items():
        assert [f"{error.json_path}: {error.message}" for error in jobset_validator().iter_errors(gang)] == [], name


@pytest.mark.parametrize(
    "path", [("spec", "retries"), ("spec", "failurePolicy", "restarts"), ("spec", "network", "dns")]
)
def test_closed_jobset_schema_refuses_what_jobset_does_not_know(path: tuple[str, ...]) -> None:
    text = next(text for text in embedded_manifests().values() if "kind: JobSet" in text)
    gang = yaml.safe_load(text)
    target = gang
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = 3
    assert list(jobset_validator().iter_errors(gang)) != []


def test_embedded_child_workflow_passes_argos_schema_with_unknown_fields_refused() -> None:
    embedded = templates_of(DOCUMENTS["policy-campaign.yaml"])["child"]["resource"]["manifest"]
    assert embedded == campaign.child_manifest()
    assert problems(yaml.safe_load(embedded)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "retries"), 3),
        (("spec", "templates", 0, "retryStrategy", "maxRetries"), "3"),
        (("spec", "templates", 0, "retryStrategy", "limit"), 3),
        (("spec", "templates", 0, "container", "resources", "request"), {}),
        (("spec", "templates", 0, "container", "env", 0, "valueFrom", "configMapKeyRef", "keys"), "x"),
        (("spec", "podGC", "delay"), "1m"),
        (("metadata", "title"), "x"),
    ],
)
def test_closed_schema_refuses_what_argo_does_not_know(path: tuple[str | int, ...], value: object) -> None:
    document = json.loads(json.dumps(DOCUMENTS["policy-iteration.yaml"]))
    target: Any = document
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    assert problems(document) != []


# --- Argo's traps ---------------------------------------------------------------------------------------------------


@each_workflow_template
def test_retries_sit_on_leaf_templates_only(document: dict[str, Any]) -> None:
    assert "retryStrategy" not in document["spec"]
    assert "templateDefaults" not in document["spec"]
    for template in document["spec"]["templates"]:
        assert ("retryStrategy" in template) == is_leaf(template), template["name"]


@each_workflow_template
def test_every_retry_has_a_limit_a_capped_backoff_and_no_wall_time(document: dict[str, Any]) -> None:
    for template in filter(is_leaf, document["spec"]["templates"]):
        strategy = template["retryStrategy"]
        assert strategy["retryPolicy"] == "Always"
        assert strategy["limit"].isdigit()
        assert set(strategy["backoff"]) == {"duration", "factor", "cap"}
        assert all(isinstance(value, str) for value in strategy["backoff"].values())


@each_workflow_template
def test_template_fail_fast_and_parallelism_are_the_loops_alone(document: dict[str, Any]) -> None:
    for template in document["spec"]["templates"]:
        special = "failFast" in template or "parallelism" in template
        assert special == (template["name"] == "loop"), template["name"]


@each_document
def test_every_kind_has_a_title_and_a_description(document: dict[str, Any]) -> None:
    annotations = document["metadata"]["annotations"]
    assert annotations["workflows.argoproj.io/title"]
    assert annotations["workflows.argoproj.io/description"]


@each_workflow_template
def test_display_names_are_where_argo_reads_them_and_match_its_pattern(document: dict[str, Any]) -> None:
    longest = {"item": LAST_ITERATION, "inputs.parameters.worker": "9999", "inputs.parameters.position": "second"}
    for template in document["spec"]["templates"]:
        assert DISPLAY_NAME not in str(template.get("metadata", {}))
        if not is_leaf(template):
            continue
        display_name = template["annotations"][DISPLAY_NAME]
        substituted = REFERENCE.sub(lambda match: longest.get(match[1], LAST_ITERATION), display_name)
        assert DISPLAY_NAME_PATTERN.match(substituted), display_name


@each_workflow_template
def test_containers_have_a_deadline_and_a_grace_period(document: dict[str, Any]) -> None:
    for template in document["spec"]["templates"]:
        if "container" in template:
            deadline = template["activeDeadlineSeconds"]
            assert deadline == "{{workflow.parameters.rollout-deadline}}" or int(deadline) > 0
            (grace_s,) = re.findall(r"^terminationGracePeriodSeconds: (\d+)$", template["podSpecPatch"], re.MULTILINE)
            assert int(grace_s) >= 30


@each_workflow_template
def test_pods_and_workflows_are_cleaned_up_and_no_pdb_blocks_a_drain(document: dict[str, Any]) -> None:
    spec = document["spec"]
    assert spec["podGC"]["strategy"] == "OnPodSuccess"
    assert spec["podGC"]["deleteDelayDuration"]
    assert set(spec["ttlStrategy"]) == {"secondsAfterSuccess", "secondsAfterFailure"}
    assert "podDisruptionBudget" not in spec


# --- references -----------------------------------------------------------------------------------------------------


@each_workflow_template
def test_every_template_that_is_called_exists_and_gets_its_inputs(document: dict[str, Any]) -> None:
    templates = templates_of(document)
    assert document["spec"]["entrypoint"] in templates
    called = {document["spec"]["entrypoint"], document["spec"].get("onExit", document["spec"]["entrypoint"])}
    for template in templates.values():
        for call in calls_of(template):
            called.add(call["template"])
            given = {parameter["name"] for parameter in call.get("arguments", {}).get("parameters", [])}
            inputs = templates[call["template"]].get("inputs", {}).get("parameters", [])
            assert given == {parameter["name"] for parameter in inputs}, call["name"]
    assert called == set(templates)
    assert document["spec"].get("onExit", "exit") == "exit"


@each_workflow_template
def test_every_task_that_depends_names_exists(document: dict[str, Any]) -> None:
    for template in templates_of(document).values():
        names = {call["name"] for call in calls_of(template)}
        for call in calls_of(template):
            for name in re.findall(r"[a-z][a-z0-9-]*", re.sub(r"\.[A-Z]\w+", "", call.get("depends", ""))):
                assert name in names - {call["name"]}


IN_EXPRESSION = re.compile(r"workflow\.parameters(?:\.(\w+)|\['([\w-]+)'\])|\b(retries)\b")


def references_of(value: object) -> set[str]:
    """Every variable in the tags of `value`, those of expressions as well."""
    found = set()
    for tag in REFERENCE.findall(json.dumps(value)):
        if not tag.startswith("="):
            found.add(tag)
            continue
        names = IN_EXPRESSION.findall(tag)
        assert names, tag
        found |= {
            f"workflow.parameters.{dotted or indexed}" if dotted or indexed else r for dotted, indexed, r in names
        }
    return found


def known_references(document: dict[str, Any], template: dict[str, Any]) -> Iterator[str]:
    """Every variable that Argo resolves inside `template`."""
    yield "workflow.name"
    for parameter in document["spec"]["arguments"]["parameters"]:
        yield f"workflow.parameters.{parameter['name']}"
    for parameter in template.get("inputs", {}).get("parameters", []):
        yield f"inputs.parameters.{parameter['name']}"
    if "retryStrategy" in template:
        yield "retries"
    if template["name"] == document["spec"].get("onExit"):
        yield "workflow.status"
    prefix = "tasks" if "dag" in template else "steps"
    for call in calls_of(template):
        if "withSequence" in call:
            yield "item"
            continue
        for parameter in templates_of(document)[call["template"]].get("outputs", {}).get("parameters", []):
            yield f"{prefix}.{call['name']}.outputs.parameters.{parameter['name']}"


@each_workflow_template
def test_every_variable_is_declared(document: dict[str, Any]) -> None:
    for template in templates_of(document).values():
        metrics = {"duration", "status"}
        body = {key: value for key, value in template.items() if key != "metrics"}
        unknown = references_of(body) - set(known_references(document, template))
        assert unknown == set(), template["name"]
        assert set(REFERENCE.findall(json.dumps(template.get("metrics", {})))) <= metrics


@each_workflow_template
def test_variables_of_the_spec_are_workflow_parameters(document: dict[str, Any]) -> None:
    spec = {key: value for key, value in document["spec"].items() if key != "templates"}
    parameters = {f"workflow.parameters.{parameter['name']}" for parameter in spec["arguments"]["parameters"]}
    assert set(REFERENCE.findall(json.dumps(spec))) <= parameters


# --- names ----------------------------------------------------------------------------------------------------------


def test_names_fit_for_the_longest_run_id() -> None:
    """Workflow names are label values (63). A pod's name is `workflow-template-hash` with at most 253 characters."""
    campaign_name = f"{LONGEST_RUN_ID}-2"
    assert len(campaign_name) <= campaign.LONGEST_NAME
    child = yaml.safe_load(campaign.child_manifest())["metadata"]["name"]
    child_name = child.replace("{{workflow.name}}", campaign_name).replace(
        "{{inputs.parameters.iteration}}", LAST_ITERATION
    )
    assert len(child_name) <= 63
    assert len(DOCUMENTS["policy-retraining.yaml"]["metadata"]["name"]) <= 52
    for document in WORKFLOW_TEMPLATES.values():
        for template in filter(is_leaf, templates_of(document).values()):
            assert len(f"{child_name}-{template['name']}-4294967295") <= 253
    jobset_name = jobset.JOBSET_NAME.replace("{{workflow.name}}", child_name)
    assert jobset_name[0].isalpha()
    assert len(f"{jobset_name}-{jobset.REPLICATED_JOB}-0-99-abcde") <= 63


def test_names_of_a_short_runs_pods_fit_into_a_host_name() -> None:
    child_name = f"reverse-digits-20261129-{LAST_ITERATION}"
    for document in WORKFLOW_TEMPLATES.values():
        for template in filter(is_leaf, templates_of(document).values()):
            assert len(f"{child_name}-{template['name']}-4294967295") <= 63
