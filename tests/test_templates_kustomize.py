"""The kustomizations under templates/: they build, leave nothing out, and name everything that they refer to."""

import subprocess
from pathlib import Path

import pytest
import yaml
from hera.workflows import models as m

from tests.kustomization import EKS, HAS_KUBECTL, INSTALL, LAPTOP, NODES, TEMPLATES, Document, build, identity, parse
from workflows import parameters
from workflows.lint import kubernetes_models

FOLDERS = {"templates": TEMPLATES, "install": INSTALL, "laptop": LAPTOP, "eks-p5en": EKS, "eks-p5en/nodes": NODES}
INSTALLATIONS = {"templates": TEMPLATES, "laptop": LAPTOP, "eks-p5en": EKS}
NOT_APPLIED = {TEMPLATES / "secret.example.yaml", EKS / "irsa.yaml"}
"""A Secret has no values here, and IRSA is the other choice beside Pod Identity."""
each_folder = pytest.mark.parametrize("folder", FOLDERS.values(), ids=list(FOLDERS))
each_installation = pytest.mark.parametrize("folder", INSTALLATIONS.values(), ids=list(INSTALLATIONS))


@each_folder
def test_folder_builds_and_leaves_no_manifest_out(folder: Path) -> None:
    built = build(folder)
    present = {path for path in folder.glob("*.yaml")}
    assert present - built.files - NOT_APPLIED == set()


@pytest.mark.skipif(not HAS_KUBECTL, reason="kubectl is not installed")
@each_folder
def test_kustomize_builds_what_our_reading_says(folder: Path) -> None:
    result = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    theirs = {identity(document): document for document in parse(result.stdout)}
    ours = {identity(document): document for document in build(folder).documents}
    assert theirs.keys() == ours.keys()
    assert {key: document for key, document in theirs.items() if document != ours[key]} == {}


@each_installation
def test_every_installation_has_all_four_workflows_and_what_they_name(folder: Path) -> None:
    built = build(folder)
    names = {document["metadata"]["name"] for document in built.all("WorkflowTemplate", "CronWorkflow")}
    assert names == {"policy-iteration", "policy-campaign", "policy-benchmark", "policy-retraining"}
    assert "store" in built.one("ConfigMap", parameters.ENVIRONMENT_CONFIG_MAP)["data"]
    for document in built.all("CronWorkflow"):
        assert document["spec"]["workflowSpec"]["workflowTemplateRef"]["name"] in names


@each_folder
def test_kinds_of_kubernetes_have_the_fields_that_its_models_know_and_no_other(folder: Path) -> None:
    for document in build(folder).documents:
        model = kubernetes_models.model_of(document)
        if model is not None:
            assert list(kubernetes_models.problems(document, model)) == [], identity(document)


def test_a_field_that_kubernetes_does_not_know_is_found() -> None:
    document = build(LAPTOP).one("StatefulSet", "s3")
    document["spec"]["template"]["spec"]["containers"][0]["readyProbe"] = {}
    model = kubernetes_models.model_of(document)
    assert model is not None
    (problem,) = kubernetes_models.problems(document, model)
    assert "readyProbe" in str(problem)


@each_installation
def test_artifact_repository_is_the_default_and_one_that_argo_can_read(folder: Path) -> None:
    repository = build(folder).one("ConfigMap", "artifact-repositories")
    default = repository["metadata"]["annotations"]["workflows.argoproj.io/default-artifact-repository"]
    content: Document = yaml.safe_load(repository["data"][default])
    assert set(content) == {"s3"}
    assert set(content["s3"]) <= {field.alias or name for name, field in m.S3ArtifactRepository.model_fields.items()}
    assert content["s3"].get("useSDKCreds") or {"accessKeySecret", "secretKeySecret"} <= content["s3"].keys()


def test_no_manifest_of_ours_holds_a_secret() -> None:
    for folder in FOLDERS.values():
        assert build(folder).all("Secret") == []
    (example,) = yaml.safe_load_all((TEMPLATES / "secret.example.yaml").read_text())
    assert not example.keys() & {"data", "stringData"}
    assert example["metadata"]["name"] == parameters.CREDENTIALS_SECRET
