"""Every pod that the manifests make, in one form: Argo's templates, a JobSet's gang, Deployments and their like."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from workflows.lint.model import GANG_KIND, Body, Manifest, Manifests, Template, listing, mapping, strings
from workflows.lint.tags import replace_tags, samples_for
from workflows.platform import CAPACITY_TYPE_LABEL

_POD_FIELDS = ("nodeSelector", "tolerations", "affinity", "securityContext", "serviceAccountName", "podMetadata")
_CONTROLLERS = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """`spec` is a Kubernetes pod spec: of a template, with the Workflow's defaults below and its podSpecPatch above."""

    manifest: Manifest
    path: str
    name: str
    spec: Body
    template: Template | None = None
    """The Argo template that the pod comes from."""
    in_gang: bool = False

    @property
    def containers(self) -> list[Body]:
        """Those that run our own image; a resource template's only one is Argo's."""
        return listing(self.spec.get("initContainers")) + listing(self.spec.get("containers"))

    @property
    def main(self) -> Body:
        containers = listing(self.spec.get("containers"))
        return next((item for item in containers if item.get("name") == "main"), containers[0] if containers else {})

    @property
    def is_watcher(self) -> bool:
        """A pod of Argo's own that watches, makes or deletes an object."""
        return self.template is not None and "resource" in self.template.body

    @property
    def words(self) -> list[str]:
        """The command line of the main container."""
        return strings(self.main.get("command")) + strings(self.main.get("args"))

    @property
    def capacity_types(self) -> list[str]:
        """Values of Karpenter's capacity label that the pod asks for, tags as they are."""
        node_affinity = mapping(mapping(self.spec.get("affinity")).get("nodeAffinity"))
        required = mapping(node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution"))
        preferred = listing(node_affinity.get("preferredDuringSchedulingIgnoredDuringExecution"))
        terms = listing(required.get("nodeSelectorTerms")) + [mapping(item.get("preference")) for item in preferred]
        found = [
            value
            for term in terms
            for expression in listing(term.get("matchExpressions"))
            if expression.get("key") == CAPACITY_TYPE_LABEL and expression.get("operator") == "In"
            for value in strings(expression.get("values"))
        ]
        selected = mapping(self.spec.get("nodeSelector")).get(CAPACITY_TYPE_LABEL)
        return found + ([str(selected)] if selected is not None else [])

    @property
    def on_spot(self) -> bool:
        """May it run on Spot?"""
        return any("spot" in value for value in self.capacity_types)


def resources(container: Body, which: str) -> dict[str, str]:
    """Requests or limits of a container, as text."""
    return {str(name): str(value) for name, value in mapping(mapping(container.get("resources")).get(which)).items()}


def environment(container: Body) -> dict[str, Body]:
    """Variables by name."""
    return {str(item.get("name")): item for item in listing(container.get("env"))}


@lru_cache(maxsize=4)
def pods(manifests: Manifests) -> tuple[Pod, ...]:
    """Of all manifests."""
    of_templates = [_of_template(template) for template in manifests.templates() if template.has_pod]
    return (*of_templates, *(pod for manifest in manifests.documents for pod in _of_object(manifest)))


def containers(manifests: Manifests) -> Iterator[tuple[Pod, str, Body]]:
    """(pod, path, container) of every container that runs an image of ours."""
    for pod in pods(manifests):
        if pod.is_watcher:
            continue
        for container in pod.containers:
            yield pod, f"{pod.path}.{container.get('name') or 'container'}", container


def _of_object(manifest: Manifest) -> Iterator[Pod]:
    spec = mapping(manifest.body.get("spec"))
    if manifest.kind == "Pod":
        yield Pod(manifest=manifest, path=manifest.at("spec"), name=manifest.name, spec=spec)
    elif manifest.kind in _CONTROLLERS:
        pod = mapping(mapping(spec.get("template")).get("spec"))
        yield Pod(manifest=manifest, path=manifest.at("spec.template.spec"), name=manifest.name, spec=pod)
    elif manifest.kind == "CronJob":
        job = mapping(mapping(spec.get("jobTemplate")).get("spec"))
        pod = mapping(mapping(job.get("template")).get("spec"))
        path = manifest.at("spec.jobTemplate.spec.template.spec")
        yield Pod(manifest=manifest, path=path, name=manifest.name, spec=pod)
    elif manifest.kind == GANG_KIND:
        for job in listing(spec.get("replicatedJobs")):
            job_spec = mapping(mapping(job.get("template")).get("spec"))
            pod = mapping(mapping(job_spec.get("template")).get("spec"))
            path = manifest.at(f"spec.replicatedJobs[{job.get('name')}].template.spec.template.spec")
            yield Pod(manifest=manifest, path=path, name=str(job.get("name")), spec=pod, in_gang=True)


def _of_template(template: Template) -> Pod:
    spec, body = template.manifest.spec, template.body
    pod: Body = {
        field: copy.deepcopy(source[field]) for source in (spec, body) for field in _POD_FIELDS if field in source
    }
    pod["securityContext"] = {**mapping(spec.get("securityContext")), **mapping(body.get("securityContext"))}
    pod["volumes"] = listing(spec.get("volumes")) + listing(body.get("volumes"))
    pod["initContainers"] = listing(body.get("initContainers"))
    pod["containers"] = [_main(body), *listing(mapping(body.get("containerSet")).get("containers"))]
    pod["containers"] = [item for item in pod["containers"] if item] + listing(body.get("sidecars"))
    for patch in (spec.get("podSpecPatch"), body.get("podSpecPatch")):
        if isinstance(patch, str):
            pod = _merge(pod, _read_patch(template, patch))
    return Pod(manifest=template.manifest, path=template.path, name=template.name, spec=pod, template=template)


def _main(body: Body) -> Body:
    if "resource" in body:
        return {"name": "main"}
    container = mapping(body.get("container") or body.get("script"))
    return {**container, "name": "main"} if container else {}


def _read_patch(template: Template, patch: str) -> Body:
    manifest = template.manifest
    samples = samples_for(manifest.body, manifest.spec, template.body, filled=False)
    try:
        return mapping(yaml.safe_load(replace_tags(patch, samples, template.path)))
    except yaml.YAMLError:
        return {}


def _merge(base: Any, patch: Any) -> Any:
    """Kubernetes' strategic merge as far as pods need it: mappings by key, lists of named things by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: _merge(base[key], value) if key in base else value for key, value in patch.items()}
    if isinstance(base, list) and isinstance(patch, list) and all("name" in item for item in listing(patch)):
        merged = list(base)
        for item in listing(patch):
            names = [mapping(known).get("name") for known in merged]
            if item["name"] in names:
                position = names.index(item["name"])
                merged[position] = _merge(merged[position], item)
            else:
                merged.append(item)
        return merged
    return patch
