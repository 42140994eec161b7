"""Published schemas with unknown fields refused: Argo's kinds, JobSets, Kubernetes' kinds, also those held as text."""

from collections.abc import Callable
from pathlib import Path

import pytest

from steps.errors import DataError, UsageError
from tests.tampering import Documents, documents, manifests_of
from workflows.lint import schemas
from workflows.lint.loading import parse, read_files
from workflows.lint.schemas import Schemas, find_schemas

ITERATION, CAMPAIGN, CRON = "policy-iteration", "policy-campaign", "policy-retraining"
PUBLISHED = find_schemas(None)
WITHOUT = Schemas()
needs_schemas = pytest.mark.skipif(
    PUBLISHED.argo is None or PUBLISHED.jobset is None, reason="no schemas here; set MOERL_SCHEMAS to their folder"
)


def problems(edited: Documents, known: Schemas) -> list[str]:
    places = [place for manifest in manifests_of(edited).documents for place in schemas.check(manifest, known)]
    return [f"{place.path}: {place.problem}" for place in places]


UNKNOWN: list[tuple[str, Callable[[Documents], object]]] = [
    ("spec.retries", lambda docs: docs.of(ITERATION)["spec"].update(retries=3)),
    ("retryStrategy", lambda docs: docs.template(ITERATION, "plan")["retryStrategy"].update(maxRetries="3")),
    ("spec.podGC", lambda docs: docs.of(ITERATION)["spec"]["podGC"].update(delay="1m")),
    ("resources", lambda docs: docs.container("plan")["resources"].update(request={})),
    ("spec", lambda docs: docs.of(CRON)["spec"].update(schedule="0 2 * * *")),
    ("synchronization.mutex", lambda docs: docs.of(CAMPAIGN)["spec"]["synchronization"].update(mutex={"name": "x"})),
    (
        "resource.manifest.spec",
        lambda docs: docs.child("  workflowTemplateRef:", "  templateRef: x\n  workflowTemplateRef:"),
    ),
    ("resource.manifest.spec", lambda docs: docs.gang("restartPolicy: Never", "restartPolicies: Never")),
    ("rules", lambda docs: docs.of("Role/moerl-step")["rules"][0].update(verb=["get"])),
    ("data", lambda docs: docs.of("ConfigMap/moerl-environment")["data"].update(port=5432)),
    ("metadata", lambda docs: docs.of(ITERATION)["metadata"].update(title="x")),
]
PUBLISHED_ALONE: list[tuple[str, Callable[[Documents], object]]] = [
    ("retryStrategy.limit", lambda docs: docs.template(ITERATION, "plan")["retryStrategy"].update(limit=3.5)),
    ("spec.failurePolicy", lambda docs: docs.gang("maxRestarts:", "maximumRestarts:")),
    ("spec.replicatedJobs", lambda docs: docs.gang("replicas: 1", "replicas: '1'")),
    ("apiVersion", lambda docs: docs.gang("jobset.x-k8s.io/v1alpha2", "jobset.x-k8s.io/v1beta1")),
]


@needs_schemas
def test_rendered_manifests_pass_the_published_schemas() -> None:
    assert problems(documents(), PUBLISHED) == []


def test_rendered_manifests_pass_the_models_that_stand_in() -> None:
    assert problems(documents(), WITHOUT) == []


@needs_schemas
@pytest.mark.parametrize(("path", "edit"), UNKNOWN, ids=[f"{index}-{path}" for index, (path, _) in enumerate(UNKNOWN)])
def test_published_schemas_refuse(path: str, edit: Callable[[Documents], object]) -> None:
    edited = documents()
    edit(edited)
    assert any(path in problem for problem in problems(edited, PUBLISHED))


@pytest.mark.parametrize(("path", "edit"), UNKNOWN, ids=[f"{index}-{path}" for index, (path, _) in enumerate(UNKNOWN)])
def test_models_refuse_the_same_without_schemas(path: str, edit: Callable[[Documents], object]) -> None:
    edited = documents()
    edit(edited)
    assert any(path in problem for problem in problems(edited, WITHOUT))


@needs_schemas
@pytest.mark.parametrize(("path", "edit"), PUBLISHED_ALONE, ids=["limit", "unknown", "type", "version"])
def test_published_schemas_refuse_what_the_models_pass(path: str, edit: Callable[[Documents], object]) -> None:
    edited = documents()
    edit(edited)
    assert any(path in problem for problem in problems(edited, PUBLISHED))


@needs_schemas
def test_a_number_that_is_no_text_in_the_child_workflow_is_refused() -> None:
    """Argo replaces the tag in the text: without quotes 00001 is a number to YAML."""
    edited = documents()
    edited.child("value: '{{inputs.parameters.iteration}}'", "value: {{inputs.parameters.iteration}}")
    assert any("resource.manifest.spec.arguments" in problem for problem in problems(edited, PUBLISHED))


def test_required_fields_of_kubernetes_kinds_are_asked_for() -> None:
    edited = documents()
    del edited.of("RoleBinding/moerl-step")["roleRef"]
    assert any("role_ref" in problem for problem in problems(edited, WITHOUT))


@needs_schemas
def test_numbers_are_taken_where_the_api_server_takes_them() -> None:
    edited = documents()
    edited.template(ITERATION, "plan")["retryStrategy"]["limit"] = 3
    edited.template(ITERATION, "plan")["activeDeadlineSeconds"] = 60
    assert problems(edited, PUBLISHED) == []


def test_quantities_may_be_numbers() -> None:
    edited = documents()
    edited["Pod/p"] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p"},
        "spec": {"containers": [{"name": "main", "image": "a:1", "resources": {"limits": {"cpu": 1}}}]},
    }
    assert problems(edited, WITHOUT) == []


def test_folder_without_schemas_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{tmp_path}.*name the folder that holds them"):
        find_schemas(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "not YAML: line "),
        ("a: 1\na: 2\n", "the key 'a' stands twice"),
        ("x: {{workflow.name}}\n", "not YAML: line 1"),
        ("metadata: {}\n", "without `kind`"),
        ("- 1\n", "without `kind`"),
    ],
)
def test_text_that_is_no_manifest_is_one_line(text: str, problem: str) -> None:
    with pytest.raises(DataError, match="^file.yaml: ") as error:
        parse({"file.yaml": text})
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_held_manifest_that_is_no_yaml_is_told_with_its_place() -> None:
    edited = documents()
    edited.gang("kind: JobSet", "kind: JobSet: x")
    with pytest.raises(DataError, match=r"templates\[train-gang\].resource.manifest: not YAML once its tags"):
        manifests_of(edited)


def test_folder_stands_for_what_its_kustomization_lists(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "a.yaml").write_text("kind: ConfigMap\n")
    (tmp_path / "over").mkdir()
    (tmp_path / "over" / "kustomization.yaml").write_text("kind: Kustomization\nresources: [../base, b.yaml]\n")
    (tmp_path / "over" / "b.yaml").write_text("kind: Secret\n")
    (tmp_path / "over" / "patch.yaml").write_text("kind: Pod\n")
    assert [Path(name).name for name in read_files([tmp_path / "over"])] == ["a.yaml", "b.yaml"]


def test_missing_file_and_empty_folder_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_files([tmp_path / "absent.yaml"])
    with pytest.raises(UsageError, match="there is no manifest"):
        read_files([tmp_path])
