"""What the executor knows about a workflow and its nodes, kept as one JSON file a workflow.

The file is replaced by an atomic rename after every change, so a reader, or a resumed run, always sees a whole one.
"""

import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from steps.errors import ConfigError, DataError, ServiceUnavailable

COMPLETED = frozenset({"Succeeded", "Failed", "Error"})
UNSUCCESSFUL = frozenset({"Failed", "Error"})
STATUS_FILE = "workflow.json"


@dataclass(slots=True, kw_only=True)
class NodeStatus:
    """A node as Argo counts them: a pod, one attempt of a retried pod, or a group of nodes.

    phase: Pending, Running, Succeeded, Failed, Error, Skipped or Omitted. exit_code is "" until there is one, "-1" for
    a pod that was deleted. process_code is that of the process that failed where it belongs to a gang that this node
    watched; folder is then that process's. error_code is that of the StepError that ended the node in place of a
    process, 0 without one; retry expressions don't see it, as on a cluster. attempt counts from 0. Times are UTC epoch
    seconds. artifacts map names to local paths.
    """

    name: str
    display_name: str
    type: str
    template: str = ""
    parent: str = ""
    phase: str = "Pending"
    message: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    exit_code: str = ""
    process_code: str = ""
    error_code: int = 0
    attempt: int = 0
    progress: str = ""
    pod_name: str = ""
    pid: int = 0
    folder: str = ""
    started_s: float = 0.0
    finished_s: float = 0.0

    @property
    def unsuccessful(self) -> bool:
        return self.phase in UNSUCCESSFUL

    @property
    def own_code(self) -> str:
        return self.process_code or self.exit_code


@dataclass(slots=True, kw_only=True)
class WorkflowStatus:
    """`nodes` by node name, in order of creation; `outputs` are the values published under a globalName, as in Argo."""

    name: str
    template: str = ""
    phase: str = "Pending"
    message: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, NodeStatus] = field(default_factory=dict)
    created_s: float = 0.0
    started_s: float = 0.0
    finished_s: float = 0.0

    def attempts_of(self, node_name: str) -> list[NodeStatus]:
        """The attempts of a retried node, oldest first."""
        found: list[NodeStatus] = []
        while (node := self.nodes.get(f"{node_name}({len(found)})")) is not None:
            found.append(node)
        return found

    def leaves(self) -> Iterator[NodeStatus]:
        """The nodes that ran, or would run, as pods, attempts of retried ones one by one."""
        return (node for node in self.nodes.values() if node.type == "Pod")

    def kubernetes_labels(self) -> dict[str, str]:
        """The object's labels with those that Argo's controller keeps."""
        completed = "true" if self.phase in COMPLETED else "false"
        return {
            **self.labels,
            "workflows.argoproj.io/completed": completed,
            "workflows.argoproj.io/phase": self.phase,
        }

    def kubernetes_status(self) -> dict[str, Any]:
        """The part of the object's `status` that conditions and jsonPath of resource templates read."""
        parameters = [{"name": name, "value": value} for name, value in self.outputs.items()]
        return {"phase": self.phase, "message": self.message, "outputs": {"parameters": parameters}}


def pod_name(workflow: str, template: str, node_name: str) -> str:
    """workflow-template-hash, as Argo's v2 names; the same on every resume."""
    suffix = f"-{zlib.crc32(node_name.encode()):010d}"
    return f"{workflow}-{template}"[: 63 - len(suffix)] + suffix


def save_status(status: WorkflowStatus, folder: Path) -> None:
    """ServiceUnavailable when the disk does not take it; the last status that was saved stays whole."""
    path = folder / STATUS_FILE
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(asdict(status), separators=(",", ":")))
        os.replace(temporary, path)
    except OSError as error:
        raise ServiceUnavailable(f"can't write {path}: {error.strerror}") from None


def load_status(root: Path, workflow: str) -> WorkflowStatus | None:
    """The persisted status, None when the workflow never ran here; DataError when the file is damaged."""
    path = root / check_name(workflow) / STATUS_FILE
    if not path.exists():
        return None
    try:
        fields = json.loads(path.read_text())
        fields["nodes"] = {name: NodeStatus(**node) for name, node in fields["nodes"].items()}
        return WorkflowStatus(**fields)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error}); move it away to run {workflow} from its start") from None


def check_name(workflow: str) -> str:
    """Kubernetes' rule for names, which also keeps a name from leaving the folder it stands for."""
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", workflow):
        raise ConfigError(f"workflow name {workflow!r}: use lower-case letters, digits, '-' and '.'")
    return workflow
