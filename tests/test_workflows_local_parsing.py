"""What the executor takes and what it refuses, by name; this repository's own manifests load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from steps.errors import ConfigError
from tests.local_cluster import call, child_of, output, step, workflow, workflow_template
from workflows.local.parsing import parse_template_manifest, parse_workflow

REPOSITORY = Path(__file__).resolve().parents[1]
ARGO_KINDS = ("WorkflowTemplate", "CronWorkflow")


def own_manifests() -> list[dict[str, Any]]:
    manifests: list[dict[str, Any]] = []
    for path in sorted((REPOSITORY / "templates").glob("*.yaml")):
        manifests.extend(yaml.safe_load_all(path.read_text()))
    return [manifest for manifest in manifests if manifest.get("kind") in ARGO_KINDS]


def test_the_manifests_of_this_repository_load() -> None:
    names = {manifest["metadata"]["name"] for manifest in own_manifests()}
    assert {"policy-campaign", "policy-iteration"} <= names
    for manifest in own_manifests():
        parse_template_manifest(manifest)


Change = Callable[[dict[str, Any]], object]


def template(manifest: dict[str, Any], number: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = manifest["spec"]["templates"][number]
    return found


def task(manifest: dict[str, Any], number: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = template(manifest, 0)["dag"]["tasks"][number]
    return found


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: m["spec"].update(hooks={}), "WorkflowTemplate t: field hooks is not known"),
        (lambda m: m["spec"].update(entrypoint="x"), "entrypoint x is not one of its templates"),
        (lambda m: m["spec"].update(onExit="x"), "onExit x is not one of its templates"),
        (lambda m: m["spec"].update(retryStrategy={"limit": 1}), "put it on leaf templates"),
        (lambda m: m["spec"]["templates"].append({"name": "ok"}), "template ok: needs exactly one of container"),
        (lambda m: m["spec"]["templates"].append(step("ok")), "template ok is defined twice"),
        (lambda m: template(m).update(memoize={}), "template ok: field memoize is not known"),
        (lambda m: template(m).update(sidecars=[{}]), "template ok: field sidecars is not known"),
        (lambda m: template(m).update(parallelism=2), "act on dag and steps templates only"),
        (lambda m: template(m, 0).update(retryStrategy={"limit": 1}), "reruns every child"),
        (lambda m: template(m, 0).update(activeDeadlineSeconds=5), "acts on leaf templates only"),
        (lambda m: template(m)["container"].update(lifecycle={}), r"template ok.container: field lifecycle"),
        (lambda m: template(m)["container"].pop("command"), "command is missing"),
        (lambda m: template(m)["container"].update(env=[{"name": "A", "valueFrom": {}}]), "env.valueFrom: is empty"),
        (
            lambda m: template(m)["container"].update(
                env=[{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "r"}}}]
            ),
            "field resourceFieldRef is not known",
        ),
        (lambda m: template(m).update(retryStrategy={"retryPolicy": "Never"}), "retryPolicy Never is not known"),
        (
            lambda m: template(m).update(retryStrategy={"backoff": {"duration": "1", "maxDuration": "2"}}),
            "maxDuration counts",
        ),
        (lambda m: template(m).update(retryStrategy={"expression": "a =="}), "unexpected end"),
        (lambda m: template(m).update(outputs={"parameters": [output("x")], "result": "r"}), "field result"),
        (
            lambda m: template(m).update(outputs={"parameters": [{"name": "x", "valueFrom": {"path": "/etc/x"}}]}),
            "must lie under /tmp/moerl/outputs/",
        ),
        (
            lambda m: template(m).update(outputs={"parameters": [{"name": "x", "valueFrom": {"event": "e"}}]}),
            "field event",
        ),
        (lambda m: template(m).update(inputs={"artifacts": [{"name": "a"}]}), "inputs: field artifacts"),
        (lambda m: task(m).update(depends="nothing"), "depends on nothing, which is not a task"),
        (lambda m: task(m, 0).update(depends="b"), "depend on each other in a circle"),
        (lambda m: task(m).update(name="a"), "the name a is used twice"),
        (lambda m: task(m).update(template="nope"), "template nope does not exist"),
        (lambda m: task(m).update(continueOn={"failed": True}), "say it with depends"),
        (lambda m: task(m).update(templateRef={"name": "x"}), "b: field templateRef"),
        (lambda m: task(m).update(withSequence={"count": "1", "end": "2"}), "exactly one of count, end"),
        (lambda m: template(m, 0)["dag"].update(target="a"), "field target"),
        (lambda m: m.update(kind="Deployment"), "Deployment t: the local executor takes WorkflowTemplates"),
    ],
)
def test_what_is_not_known_is_refused_with_its_place(change: Change, problem: str) -> None:
    main = {"name": "main", "dag": {"tasks": [call("a", "ok"), call("b", "ok", depends="a")]}}
    manifest = workflow_template("t", [main, step("ok", "exit", "0")])
    parse_template_manifest(manifest)
    change(manifest)
    with pytest.raises(ConfigError, match=problem):
        parse_template_manifest(manifest)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: m.update(metadata={"generateName": "x-"}), "generateName is refused"),
        (lambda m: m.update(kind="CronWorkflow"), "kind CronWorkflow can't be run here"),
        (lambda m: m["spec"].update(suspend=True), "field suspend is not known"),
        (lambda m: m.update(spec=[]), "must be a mapping, not list"),
    ],
)
def test_what_can_not_be_submitted_is_refused(change: Change, problem: str) -> None:
    manifest = workflow("wf", [step("main", "exit", "0")])
    change(manifest)
    with pytest.raises(ConfigError, match=problem):
        parse_workflow(manifest)


def test_fields_that_matter_only_on_a_cluster_are_accepted() -> None:
    leaf = step("main", "exit", "0", nodeSelector={"a": "b"}, tolerations=[], serviceAccountName="s", metrics={})
    leaf["container"] |= {"resources": {"limits": {}}, "volumeMounts": [], "securityContext": {}}
    spec = {"podGC": {}, "ttlStrategy": {}, "volumes": [], "securityContext": {}, "serviceAccountName": "s"}
    parse_workflow(workflow("wf", [leaf], **spec))


def test_resource_templates_are_checked_too() -> None:
    broken = {"name": "main", "resource": {**child_of("x", "y"), "mergeStrategy": "json"}}
    with pytest.raises(ConfigError, match=r"template main.resource: field mergeStrategy"):
        parse_workflow(workflow("wf", [broken]))
    patch = {"name": "main", "resource": {"action": "patch", "manifest": "kind: Workflow"}}
    with pytest.raises(ConfigError, match="action patch is not known"):
        parse_workflow(workflow("wf", [patch]))


def test_a_resource_without_a_condition_is_refused() -> None:
    unwatched = {key: value for key, value in child_of("x", "y").items() if not key.endswith("Condition")}
    with pytest.raises(ConfigError, match="without one Argo does not wait for the object"):
        parse_workflow(workflow("wf", [{"name": "main", "resource": unwatched}]))
