"""What the rules read and what they say: manifests, their templates, findings.

A manifest is any YAML document: an Argo kind, a kind of Kubernetes, or what a resource template holds as text. Rules
see the whole set at once, since much of what goes wrong lies between two of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from workflows.platform import PlatformProfile

Severity = Literal["error", "warning"]
Body = dict[str, Any]

WORKFLOW_KINDS = ("Workflow", "WorkflowTemplate", "ClusterWorkflowTemplate", "CronWorkflow")
GANG_KIND = "JobSet"
SERVING_KINDS = ("StatefulSet", "Deployment", "DaemonSet", "ReplicaSet", "Service", "Pod")
"""What a resource template can make that runs until it is deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One document. `place` says where in its parent it stands, when a resource template holds it."""

    source: str
    """File, or what the text was rendered from."""
    body: Body
    place: str = ""
    holder: "Template | None" = None

    @property
    def kind(self) -> str:
        return str(self.body.get("kind") or "")

    @property
    def name(self) -> str:
        metadata = mapping(self.body.get("metadata"))
        return str(metadata.get("name") or metadata.get("generateName") or "")

    @property
    def spec(self) -> Body:
        """The spec of a Workflow, also of the one that a CronWorkflow starts; of another kind, its own."""
        spec = mapping(self.body.get("spec"))
        return mapping(spec.get("workflowSpec")) if self.kind == "CronWorkflow" else spec

    @property
    def spec_path(self) -> str:
        return "spec.workflowSpec" if self.kind == "CronWorkflow" else "spec"

    def at(self, path: str) -> str:
        return ".".join(part for part in (self.place, path) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A template of a Workflow; `path` is where it stands."""

    manifest: Manifest
    body: Body
    path: str
    inline: bool = False

    @property
    def name(self) -> str:
        return str(self.body.get("name") or "")

    @property
    def is_group(self) -> bool:
        """A DAG or Steps: it has no pod of its own."""
        return "dag" in self.body or "steps" in self.body

    @property
    def has_pod(self) -> bool:
        return any(key in self.body for key in ("container", "script", "containerSet", "resource"))

    @property
    def retry(self) -> Body | None:
        strategy = self.body.get("retryStrategy")
        return strategy if isinstance(strategy, dict) else None

    @property
    def calls(self) -> list[tuple[str, Body]]:
        """(path, task or step) of a DAG or Steps template."""
        if "dag" in self.body:
            tasks = listing(mapping(self.body["dag"]).get("tasks"))
            return [(f"{self.path}.dag.tasks[{task.get('name')}]", task) for task in tasks]
        return [(f"{self.path}.steps[{step.get('name')}]", step) for group in self.step_groups for step in group]

    @property
    def step_groups(self) -> list[list[Body]]:
        """The steps of a Steps template that run together."""
        groups = self.body.get("steps")
        return [listing(group) for group in groups] if isinstance(groups, list) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, and what to do about it."""

    rule: str
    severity: Severity
    source: str
    manifest: str
    """Kind and name."""
    path: str
    problem: str
    advice: str

    def __str__(self) -> str:
        place = f"{self.source}: {self.manifest}: {self.path}" if self.path else f"{self.source}: {self.manifest}"
        return f"{place}: {self.severity} [{self.rule}] {self.problem}; {self.advice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a rule yields: where, and what is wrong there."""

    manifest: Manifest
    path: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`advice` is one line that says what to do."""

    name: str
    severity: Severity
    advice: str
    check: Callable[["Manifests"], Iterator[Place]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Manifests:
    """Everything that one call of the linter looks at; equal to itself alone, so that what is derived can be kept."""

    documents: tuple[Manifest, ...]
    """Those of files, and after each the ones that its resource templates hold."""
    profile: PlatformProfile | None = None

    def of_kind(self, *kinds: str) -> Iterator[Manifest]:
        return (document for document in self.documents if document.kind in kinds)

    def workflows(self) -> Iterator[Manifest]:
        return self.of_kind(*WORKFLOW_KINDS)

    def templates(self) -> Iterator[Template]:
        for manifest in self.workflows():
            yield from templates_of(manifest)

    def embedded_in(self, template: Template) -> Iterator[Manifest]:
        """What a resource template holds: the same manifest once for each set of sample values."""
        return (
            document
            for document in self.documents
            if document.holder is not None and document.holder.body is template.body
        )


def templates_of(manifest: Manifest) -> Iterator[Template]:
    """Templates of a Workflow, those that stand inside a task or step included."""
    for body in listing(manifest.spec.get("templates")):
        path = manifest.at(f"{manifest.spec_path}.templates[{body.get('name')}]")
        template = Template(manifest=manifest, body=body, path=path)
        yield template
        for call_path, call in template.calls:
            if isinstance(call.get("inline"), dict):
                yield Template(manifest=manifest, body=call["inline"], path=f"{call_path}.inline", inline=True)


def mapping(value: object) -> Body:
    """The value if it is a mapping, else an empty one: what has the wrong type is the schema's to say."""
    return value if isinstance(value, dict) else {}


def listing(value: object) -> list[Body]:
    """The mappings of a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def strings(value: object) -> list[str]:
    """The items of a list as text."""
    return [str(item) for item in value] if isinstance(value, list) else []


def parameters_of(value: object) -> list[Body]:
    """`parameters` of inputs, outputs or arguments."""
    return listing(mapping(value).get("parameters"))
