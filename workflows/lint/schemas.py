"""Every manifest against its published schema, unknown fields refused.

Argo's JSON schema and JobSet's CRD are files in a folder (`--schemas DIR`, $MOERL_SCHEMAS). Without them Argo's kinds
are held against Hera's models, which know a little less, and JobSets' pods against Kubernetes' own.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from steps.errors import UsageError
from workflows.lint import hera_models, kubernetes_models
from workflows.lint.model import GANG_KIND, WORKFLOW_KINDS, Body, Manifest, Place, listing, mapping

ARGO_FILE = "argo-workflows-*.schema.json"
JOBSET_FILE = "jobset.x-k8s.io_jobsets.crd.yaml"
REPOSITORY = Path(__file__).resolve().parents[2]
ARGO_API = "argoproj.io/v1alpha1"
JOBSET_API = "jobset.x-k8s.io/v1alpha2"
_DEFINITIONS = "io.argoproj.workflow.v1alpha1."


@dataclass(frozen=True, slots=True, kw_only=True)
class Schemas:
    """Where the schemas come from; None: there is none, and models stand in."""

    argo: Path | None = None
    jobset: Path | None = None

    @property
    def note(self) -> str:
        """What they are, for whoever reads the result."""
        argo = self.argo.name if self.argo else "Hera's models (no published schema here: give --schemas DIR)"
        jobset = self.jobset.name if self.jobset else "its pods only (no CRD here: give --schemas DIR)"
        return f"Argo: {argo}; JobSet: {jobset}; Kubernetes: models of its Python client"


def find_schemas(folder: Path | None) -> Schemas:
    """Those in `folder`, else in $MOERL_SCHEMAS, else beside the checkout; UsageError for a folder without any."""
    given = folder or (Path(os.environ["MOERL_SCHEMAS"]) if os.environ.get("MOERL_SCHEMAS") else None)
    searched = given or REPOSITORY.parent / "shared" / "schemas"
    argo, jobset = sorted(searched.glob(ARGO_FILE)), searched / JOBSET_FILE
    if given and not argo and not jobset.is_file():
        raise UsageError(f"{given}: neither {ARGO_FILE} nor {JOBSET_FILE} is there; name the folder that holds them")
    return Schemas(argo=argo[-1] if argo else None, jobset=jobset if jobset.is_file() else None)


def check(manifest: Manifest, schemas: Schemas) -> Iterator[Place]:
    """Everything in one manifest that its schema does not take."""
    for path, problem in _problems(manifest.body, schemas):
        yield Place(manifest=manifest, path=manifest.at(path), problem=problem)


def is_known(manifest: Manifest) -> bool:
    """Is there a schema or model for this kind?"""
    ours = manifest.kind in (*WORKFLOW_KINDS, GANG_KIND)
    return ours or kubernetes_models.model_of(manifest.body) is not None


def _problems(body: Body, schemas: Schemas) -> Iterator[tuple[str, str]]:
    kind, version = str(body.get("kind")), body.get("apiVersion")
    if kind in WORKFLOW_KINDS:
        if version != ARGO_API:
            yield "apiVersion", f"{version!r} is not {ARGO_API!r}"
        yield from _argo(body, kind, schemas)
        yield from kubernetes_models.problems(body.get("metadata") or {}, "V1ObjectMeta", "metadata")
    elif kind == GANG_KIND:
        if version != JOBSET_API:
            yield "apiVersion", f"{version!r} is not {JOBSET_API!r}"
        yield from _jobset(body, schemas)
        yield from kubernetes_models.problems(body.get("metadata") or {}, "V1ObjectMeta", "metadata")
    elif model := kubernetes_models.model_of(body):
        yield from kubernetes_models.problems(body, model)


def _argo(body: Body, kind: str, schemas: Schemas) -> Iterator[tuple[str, str]]:
    if schemas.argo is None:
        yield from hera_models.problems(body, kind)
        return
    for error in _argo_validator(schemas.argo, kind).iter_errors(body):
        yield from _told(error)


def _jobset(body: Body, schemas: Schemas) -> Iterator[tuple[str, str]]:
    if schemas.jobset is not None:
        for error in _jobset_validator(schemas.jobset).iter_errors(body):
            yield from _told(error)
        return
    for index, job in enumerate(listing(mapping(body.get("spec")).get("replicatedJobs"))):
        template = mapping(job.get("template"))
        path = f"spec.replicatedJobs[{index}].template"
        yield from kubernetes_models.problems(template, "V1JobTemplateSpec", path)


def _told(error: ValidationError) -> Iterator[tuple[str, str]]:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    if error.validator == "additionalProperties":
        for field in sorted(set(error.instance) - set(error.schema["properties"])):
            yield f"{path}.{field}".removeprefix("."), "there is no such field"
        return
    message = error.message
    yield path.removeprefix("."), message if len(message) < 300 else f"{message[:300]}..."


@cache
def _argo_validator(path: Path, kind: str) -> Draft202012Validator:
    definitions = json.loads(path.read_text(encoding="utf-8"))["definitions"]
    # The published type is text alone, while the API server takes numbers as well.
    definitions["io.k8s.apimachinery.pkg.util.intstr.IntOrString"]["type"] = ["integer", "string"]
    for definition in definitions.values():
        close(definition)
    return Draft202012Validator({"$ref": f"#/definitions/{_DEFINITIONS}{kind}", "definitions": definitions})


@cache
def _jobset_validator(path: Path) -> Draft202012Validator:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    version = JOBSET_API.rpartition("/")[2]
    schemas = {item["name"]: item["schema"]["openAPIV3Schema"] for item in document["spec"]["versions"]}
    schema = schemas[version]
    _translate(schema)
    close(schema)
    return Draft202012Validator(schema)


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


def _translate(schema: Any) -> None:
    """OpenAPI 3.0 as Kubernetes has it -> JSON schema."""
    if isinstance(schema, list):
        for item in schema:
            _translate(item)
    if not isinstance(schema, dict):
        return
    if schema.pop("x-kubernetes-int-or-string", False):
        schema["type"] = ["integer", "string"]
        schema.pop("anyOf", None)
    for value in schema.values():
        _translate(value)
