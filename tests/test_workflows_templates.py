"""Everything under templates/: the published schema, closed references, names, retries, and the kustomization."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from workflows import campaign

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
    path.name: document
    for path in sorted(TEMPLATES.glob("policy-*.yaml"))
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


def close(schema: dict[str, Any]) -> None:
    """Refuse properties that are not listed; a map (no `properties`, or typed values) keeps its free keys."""
    properties = schema.get("properties")
    if properties and "additionalProperties" not in schema:
        schema["additionalProperties"] = False
    for part in (properties or {}).values():
        close(part)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            close(schema[key])


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
        assert special == (template["name"] == "loop")


@each_document
def test_every_kind_has_a_title_and_a_description(document: dict[str, Any]) -> None:
    annotations = document["metadata"]["annotations"]
    assert annotations["workflows.argoproj.io/title"]
    assert annotations["workflows.argoproj.io/description"]


@each_workflow_template
def test_display_names_are_where_argo_reads_them_and_match_its_pattern(document: dict[str, Any]) -> None:
    longest = {"item": LAST_ITERATION, "inputs.parameters.worker": "9999"}
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
            assert int(template["activeDeadlineSeconds"]) > 0
            assert yaml.safe_load(template["podSpecPatch"])["terminationGracePeriodSeconds"] >= 30


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
    called = {document["spec"]["entrypoint"]}
    for template in templates.values():
        for call in calls_of(template):
            called.add(call["template"])
            given = {parameter["name"] for parameter in call.get("arguments", {}).get("parameters", [])}
            inputs = templates[call["template"]].get("inputs", {}).get("parameters", [])
            assert given == {parameter["name"] for parameter in inputs}, call["name"]
    assert called == set(templates)


@each_workflow_template
def test_every_task_that_depends_names_exists(document: dict[str, Any]) -> None:
    for template in templates_of(document).values():
        names = {call["name"] for call in calls_of(template)}
        for call in calls_of(template):
            for name in re.findall(r"[a-z][a-z0-9-]*", re.sub(r"\.[A-Z]\w+", "", call.get("depends", ""))):
                assert name in names - {call["name"]}


def known_references(document: dict[str, Any], template: dict[str, Any]) -> Iterator[str]:
    """Every variable that Argo resolves inside `template`."""
    yield "workflow.name"
    for parameter in document["spec"]["arguments"]["parameters"]:
        yield f"workflow.parameters.{parameter['name']}"
    for parameter in template.get("inputs", {}).get("parameters", []):
        yield f"inputs.parameters.{parameter['name']}"
    if "retryStrategy" in template:
        yield "retries"
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
        unknown = set(REFERENCE.findall(json.dumps(body))) - set(known_references(document, template))
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
    campaign_name = f"{LONGEST_RUN_ID}-12345"
    child = yaml.safe_load(campaign.child_manifest())["metadata"]["name"]
    child_name = child.replace("{{workflow.name}}", campaign_name).replace(
        "{{inputs.parameters.iteration}}", LAST_ITERATION
    )
    assert len(child_name) <= 63
    assert len(DOCUMENTS["policy-retraining.yaml"]["metadata"]["name"]) <= 52
    for document in WORKFLOW_TEMPLATES.values():
        for template in filter(is_leaf, templates_of(document).values()):
            assert len(f"{child_name}-{template['name']}-4294967295") <= 253


def test_names_of_a_short_runs_pods_fit_into_a_host_name() -> None:
    child_name = f"reverse-digits-20261129-{LAST_ITERATION}"
    for document in WORKFLOW_TEMPLATES.values():
        for template in filter(is_leaf, templates_of(document).values()):
            assert len(f"{child_name}-{template['name']}-4294967295") <= 63


# --- the kustomization ----------------------------------------------------------------------------------------------


def applied() -> list[dict[str, Any]]:
    kustomization = yaml.safe_load((TEMPLATES / "kustomization.yaml").read_text())
    return [
        document
        for name in kustomization["resources"]
        for document in yaml.safe_load_all((TEMPLATES / name).read_text())
    ]


def test_kustomization_lists_every_manifest_but_the_secrets_example() -> None:
    kustomization = yaml.safe_load((TEMPLATES / "kustomization.yaml").read_text())
    present = {path.name for path in TEMPLATES.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == present - {"secret.example.yaml"}
    assert len({(document["kind"], document["metadata"]["name"]) for document in applied()}) == len(applied())


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_the_folder() -> None:
    built = subprocess.run(["kubectl", "kustomize", str(TEMPLATES)], capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    documents = list(yaml.safe_load_all(built.stdout))
    assert len(documents) == len(applied())
    assert all(document["metadata"].get("namespace") == "moerl" for document in documents[1:])


def test_service_accounts_of_the_workflows_exist_and_are_bound() -> None:
    accounts = {document["metadata"]["name"] for document in applied() if document["kind"] == "ServiceAccount"}
    used = {
        name
        for document in WORKFLOW_TEMPLATES.values()
        for name in re.findall(r'"serviceAccountName": "([^"]+)"', json.dumps(document))
    }
    bound = {
        subject["name"]
        for document in applied()
        if document["kind"] == "RoleBinding"
        for subject in document["subjects"]
    }
    assert used == accounts == bound


def test_roles_grant_what_argo_needs_and_nothing_more() -> None:
    roles = {document["metadata"]["name"]: document["rules"] for document in applied() if document["kind"] == "Role"}
    assert roles == {
        "moerl-step": [
            {"apiGroups": ["argoproj.io"], "resources": ["workflowtaskresults"], "verbs": ["create", "patch"]}
        ],
        "moerl-campaign": [
            {"apiGroups": ["argoproj.io"], "resources": ["workflows"], "verbs": ["get", "create", "patch"]}
        ],
    }
    assert not [document for document in applied() if document["kind"].startswith("ClusterRole")]


def test_no_manifest_holds_a_secret() -> None:
    for path in TEMPLATES.glob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] == "Secret":
                assert "data" not in document and "stringData" not in document
        assert not re.search(r"://[^/\s]+:[^/\s]+@", path.read_text()), path.name


def test_config_map_has_the_keys_that_the_steps_require() -> None:
    (environment,) = (doc for doc in applied() if doc["metadata"]["name"] == "moerl-environment")
    keys = set(environment["data"]) | set(
        re.findall(r"# ([a-z0-9-]+): http", (TEMPLATES / "environment.yaml").read_text())
    )
    referenced = {
        entry["valueFrom"]["configMapKeyRef"]["key"]
        for document in WORKFLOW_TEMPLATES.values()
        for template in templates_of(document).values()
        for entry in template.get("container", {}).get("env", [])
        if "configMapKeyRef" in entry.get("valueFrom", {})
    }
    assert "store" in environment["data"]
    assert referenced == keys


def test_namespace_has_a_default_artifact_repository_for_the_reports() -> None:
    (repositories,) = (doc for doc in applied() if doc["metadata"]["name"] == "artifact-repositories")
    default = repositories["metadata"]["annotations"]["workflows.argoproj.io/default-artifact-repository"]
    assert yaml.safe_load(repositories["data"][default])["s3"]["bucket"]
