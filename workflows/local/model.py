"""A typed view of the Argo manifests that the local executor runs.

Every field is either read, or listed as one that only matters on a cluster, or refused by its name: nothing that a
manifest asks for is dropped in silence. The parsers are in `parsing.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

OUTPUTS_DIR = "/tmp/moerl/outputs"  # where steps write in their pods; each local node has its own folder instead
DISPLAY_NAME = "workflows.argoproj.io/display-name"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFrom:
    """Where an output's value comes from; exactly one of the first four is set."""

    path: str | None = None
    parameter: str | None = None
    expression: str | None = None
    json_path: str | None = None
    default: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    name: str
    value: str | None = None
    default: str | None = None
    value_from: ValueFrom | None = None
    global_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """An output file: at `path` in a pod, or handed up `from_` a task of a dag or steps template."""

    name: str
    path: str | None = None
    from_: str | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVar:
    """A literal, or a reference: source "configMap", "secret" (object, key) or "field" (key is the field path)."""

    name: str
    value: str = ""
    source: Literal["literal", "configMap", "secret", "field"] = "literal"
    object_name: str = ""
    key: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """`unused` are the texts with tags in fields that only matter on a cluster: they must resolve here, too."""

    command: tuple[str, ...]
    args: tuple[str, ...] = ()
    env: tuple[EnvVar, ...] = ()
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A resource template; the manifest stays text until its tags are replaced.

    owned: the object is deleted with the workflow (`setOwnerReference`).
    """

    action: Literal["apply", "create", "delete", "get"]
    manifest: str = ""
    flags: tuple[str, ...] = ()
    success_condition: str = ""
    failure_condition: str = ""
    owned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Durations are Go's ("15s", "2m") or bare seconds."""

    duration: str
    factor: str = "1"
    cap: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryStrategy:
    """`limit` counts extra attempts; None means no limit. Policy None is Argo's default (see `retry.py`)."""

    limit: str | None = None
    policy: Literal["Always", "OnFailure", "OnError"] | None = None
    expression: str = ""
    backoff: Backoff | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    start: str = "0"
    end: str | None = None
    count: str | None = None
    format: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A dag task or a step: which template runs, with what, how often and when."""

    name: str
    template: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    depends: str = ""
    when: str = ""
    with_items: tuple[object, ...] | None = None
    with_param: str | None = None
    with_sequence: Sequence | None = None
    continue_on_failed: bool = False
    continue_on_error: bool = False

    @property
    def expands(self) -> bool:
        return self.with_items is not None or self.with_param is not None or self.with_sequence is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    tasks: tuple[Call, ...]
    fail_fast: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    groups: tuple[tuple[Call, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """`unused`: as in Container."""

    name: str
    body: Container | Resource | Dag | Steps
    inputs: tuple[Parameter, ...] = ()
    outputs: tuple[Parameter, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    retry: RetryStrategy | None = None
    active_deadline_s: str = ""
    pod_spec_patch: str = ""
    parallelism: int | None = None
    fail_fast: bool = False
    mutexes: tuple[str, ...] = ()
    display_name: str = ""
    unused: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Argo's node type."""
        kinds = {Container: "Pod", Resource: "Pod", Dag: "DAG", Steps: "Steps"}
        return kinds[type(self.body)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSpec:
    """The spec of a WorkflowTemplate, or of a Workflow with its templates inside."""

    entrypoint: str
    templates: Mapping[str, Template]
    parameters: tuple[Parameter, ...] = ()
    on_exit: str = ""
    active_deadline_s: str = ""
    parallelism: int | None = None
    pod_spec_patch: str = ""
    mutexes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workflow:
    """A Workflow to run: its own spec, or a reference to a template by name, and the arguments given."""

    name: str
    template_ref: str = ""
    spec: WorkflowSpec | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
