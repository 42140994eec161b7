"""Rules on names and on what the UI shows (Argo: workflow/controller/operator.go, setNodeDisplayName; docs/metrics.md;
JobSet: pkg/webhooks/jobset_webhook.go, generateLongestPodName).
"""

import re
from collections.abc import Iterator

from workflows.containers import DISPLAY_NAME
from workflows.lint.model import GANG_KIND, Body, Manifest, Manifests, Place, Rule, listing, mapping, parameters_of
from workflows.lint.tags import TAG, replace_tags, samples_for

LONGEST_LABEL = 63
LONGEST_CRON_NAME = 52
"""A CronWorkflow's Workflows get `-` and ten digits behind its name."""
TITLE = "workflows.argoproj.io/title"
DESCRIPTION = "workflows.argoproj.io/description"
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DISPLAY_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9-.]{0,61}[a-zA-Z0-9]")
_FIELD_NAME = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9]*")
_LONGEST_FIELD_NAME = 128
_PARAMETER_NAME = re.compile(r"[-a-zA-Z0-9_]+")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_METRIC_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_POD_SUFFIX = "-abcde"
_UNBOUNDED = ("workflow.name", "workflow.uid", "workflow.parameters.run", "pod.name", "inputs.parameters.iteration")


def long_name(manifests: Manifests) -> Iterator[Place]:
    for manifest in manifests.documents:
        limit = LONGEST_CRON_NAME if manifest.kind == "CronWorkflow" else LONGEST_LABEL
        if manifest.kind.endswith("Workflow") or manifest.kind == "WorkflowTemplate" or manifest.kind == GANG_KIND:
            if len(manifest.name) > limit:
                problem = f"up to {len(manifest.name)} characters, of {limit} at most: {manifest.name}"
                yield Place(manifest=manifest, path=manifest.at("metadata.name"), problem=problem)


def bad_name(manifests: Manifests) -> Iterator[Place]:
    for manifest in manifests.documents:
        name = (
            manifest.name.removesuffix("-")
            if "generateName" in mapping(manifest.body.get("metadata"))
            else manifest.name
        )
        if manifest.kind.startswith(("Role", "ClusterRole")) or _SUBDOMAIN.fullmatch(name):
            continue
        problem = f"{name!r} is no name that Kubernetes takes" if name else "it has no name"
        yield Place(manifest=manifest, path=manifest.at("metadata.name"), problem=problem)
    yield from _field_names(manifests)
    yield from _label_values(manifests)


def gang_names(manifests: Manifests) -> Iterator[Place]:
    for manifest in manifests.of_kind(GANG_KIND):
        for job in listing(manifest.spec.get("replicatedJobs")):
            count = mapping(mapping(job.get("template")).get("spec")).get("parallelism")
            # Room for 100 nodes, whatever the sample of the number is.
            last_pod = max(int(count) - 1, 99) if isinstance(count, int) else 99
            last_job = max(int(job.get("replicas") or 1) - 1, 0)
            name = f"{manifest.name}-{job.get('name')}-{last_job}-{last_pod}{_POD_SUFFIX}"
            if len(name) > LONGEST_LABEL or not _DNS_1035.fullmatch(name):
                problem = f"a pod would be called {name} ({len(name)} characters)"
                yield Place(manifest=manifest, path=manifest.at("metadata.name"), problem=problem)


def display_name(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        manifest = template.manifest
        given = mapping(template.body.get("annotations")).get(DISPLAY_NAME)
        if given is None:
            continue
        samples = samples_for(manifest.body, manifest.spec, template.body, filled=True)
        shown = replace_tags(str(given), samples, template.path)
        if not _DISPLAY_NAME.fullmatch(shown):
            yield Place(
                manifest=manifest,
                path=f"{template.path}.annotations",
                problem=f"the display name can be {shown!r}, and then the node ends as Error",
            )


def no_display_name(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        if template.has_pod and not template.inline and DISPLAY_NAME not in mapping(template.body.get("annotations")):
            problem = "its nodes show no more than the task's name"
            if DISPLAY_NAME in mapping(mapping(template.body.get("metadata")).get("annotations")):
                problem = "an annotation of the pod: Argo does not read it there"
            yield Place(manifest=template.manifest, path=template.path, problem=problem)


def no_description(manifests: Manifests) -> Iterator[Place]:
    for manifest in manifests.workflows():
        annotations = mapping(mapping(manifest.body.get("metadata")).get("annotations"))
        wanted = (TITLE,) if manifest.kind == "Workflow" else (TITLE, DESCRIPTION)
        for annotation in wanted:
            if not annotations.get(annotation):
                path = manifest.at("metadata.annotations")
                yield Place(manifest=manifest, path=path, problem=f"{annotation} is missing")
    for manifest in manifests.of_kind("WorkflowTemplate", "ClusterWorkflowTemplate"):
        for parameter in parameters_of(manifest.spec.get("arguments")):
            if not parameter.get("description"):
                path = manifest.at(f"{manifest.spec_path}.arguments.parameters[{parameter.get('name')}]")
                yield Place(manifest=manifest, path=path, problem="the submit form does not say what it is")


def parameter_enum(manifests: Manifests) -> Iterator[Place]:
    for manifest in manifests.workflows():
        for parameter in parameters_of(manifest.spec.get("arguments")):
            choices, value = parameter.get("enum"), parameter.get("value")
            if choices and value is not None and value not in choices:
                path = manifest.at(f"{manifest.spec_path}.arguments.parameters[{parameter.get('name')}]")
                yield Place(manifest=manifest, path=path, problem=f"the default {value!r} is not one of {choices}")


def metrics(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        for metric in listing(mapping(template.body.get("metrics")).get("prometheus")):
            path = f"{template.path}.metrics.prometheus[{metric.get('name')}]"
            names = [str(metric.get("name")), *(str(label.get("key")) for label in listing(metric.get("labels")))]
            for name in names:
                if not _METRIC_NAME.fullmatch(name):
                    problem = f"{name!r}: letters, digits and underscores only"
                    yield Place(manifest=template.manifest, path=path, problem=problem)
            for label in listing(metric.get("labels")):
                if any(f"{{{{{name}}}}}" in str(label.get("value")) for name in _UNBOUNDED):
                    problem = f"the label {label.get('key')} makes a new time series for each run"
                    yield Place(manifest=template.manifest, path=path, problem=problem)


def _field_names(manifests: Manifests) -> Iterator[Place]:
    """Names inside a Workflow (Argo: workflow/validate/validate.go)."""
    for template in manifests.templates():
        for path, named in [(template.path, template.body), *template.calls]:
            name = str(named.get("name", "inline"))
            if len(name) > _LONGEST_FIELD_NAME or not _FIELD_NAME.fullmatch(name):
                yield Place(manifest=template.manifest, path=path, problem=f"{name!r} is no name of a template or task")
        for holder in (template.body.get("inputs"), template.body.get("outputs")):
            for parameter in parameters_of(holder):
                if not _PARAMETER_NAME.fullmatch(str(parameter.get("name"))):
                    problem = f"{parameter.get('name')!r} is no name of a parameter"
                    yield Place(manifest=template.manifest, path=template.path, problem=problem)


def _label_values(manifests: Manifests) -> Iterator[Place]:
    for manifest in manifests.documents:
        for path, labels in _labels(manifest.body):
            for key, value in labels.items():
                shown = str(value)
                if not TAG.search(shown) and (len(shown) > LONGEST_LABEL or not _LABEL_VALUE.fullmatch(shown)):
                    problem = f"{key}: {shown!r} is no value of a label ({len(shown)} characters)"
                    yield Place(manifest=manifest, path=manifest.at(path), problem=problem)


def _labels(value: object, path: str = "") -> Iterator[tuple[str, Body]]:
    """(path, labels) of each mapping called labels or matchLabels."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        below = f"{path}.{key}".removeprefix(".")
        if key in ("labels", "matchLabels") and isinstance(item, dict):
            yield below, item
        yield from _labels(item, below)


def run_mutex(manifests: Manifests) -> Iterator[Place]:
    known = {manifest.name: manifest for manifest in manifests.of_kind("WorkflowTemplate")}
    for manifest in manifests.of_kind("WorkflowTemplate", "ClusterWorkflowTemplate"):
        if "run" not in {str(parameter.get("name")) for parameter in parameters_of(manifest.spec.get("arguments"))}:
            continue
        if not any("{{workflow.parameters.run}}" in name for name in _mutexes(manifest)):
            path = manifest.at(f"{manifest.spec_path}.synchronization.mutexes")
            yield Place(manifest=manifest, path=path, problem="two workflows may work on the same run at once")
    for child in manifests.of_kind("Workflow"):
        reference = known.get(str(mapping(child.spec.get("workflowTemplateRef")).get("name")))
        if child.holder is None or reference is None:
            continue
        for name in sorted(_mutexes(child.holder.manifest) & _mutexes(reference)):
            problem = f"it waits for {name!r}, which its parent holds until it has ended"
            yield Place(manifest=child, path=child.at("spec.workflowTemplateRef"), problem=problem)


def _mutexes(manifest: Manifest) -> set[str]:
    return {str(mutex.get("name")) for mutex in listing(mapping(manifest.spec.get("synchronization")).get("mutexes"))}


RULES = (
    Rule(
        name="name-too-long",
        severity="error",
        advice="shorten it: names of Workflows become label values and parts of host names",
        check=long_name,
    ),
    Rule(
        name="bad-name",
        severity="error",
        advice="letters, digits and inner hyphens: lower-case in names of objects, also dots and underscores in labels",
        check=bad_name,
    ),
    Rule(
        name="gang-name",
        severity="error",
        advice="begin the JobSet's name with a letter, and leave its pods' names room in 63 characters",
        check=gang_names,
    ),
    Rule(
        name="display-name",
        severity="error",
        advice="letters, digits, inner hyphens and dots, 2 to 63 of them",
        check=display_name,
    ),
    Rule(
        name="display-name-missing",
        severity="warning",
        advice=f"set it in the template's own annotations ({DISPLAY_NAME})",
        check=no_display_name,
    ),
    Rule(
        name="description-missing",
        severity="warning",
        advice="say what it is, for the UI's list and its submit form",
        check=no_description,
    ),
    Rule(name="parameter-enum", severity="error", advice="choose a default of the list", check=parameter_enum),
    Rule(
        name="prometheus-metric",
        severity="error",
        advice="letters, digits and underscores; no runs, pods and iterations in the labels",
        check=metrics,
    ),
    Rule(
        name="run-mutex",
        severity="error",
        advice="take a mutex with the run in its name, and another one in the child",
        check=run_mutex,
    ),
)
