"""What the local executor tells whoever watches it: one event for each change of a workflow or a node."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal["workflow", "node", "progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One change.

    kind "workflow": the workflow changed its phase (node_name is empty); "node": a node did; "progress": a running
    node wrote a new `N/M` line. `attempt` counts from 0, as Argo's `{{retries}}`; `time_s` is UTC epoch seconds;
    `node_type` is Argo's (Pod, Retry, DAG, Steps, StepGroup, TaskGroup, Skipped); `parent` is the boundary node's name.
    """

    kind: EventKind
    workflow: str
    node_name: str = ""
    display_name: str = ""
    template: str = ""
    phase: str = ""
    message: str = ""
    progress: str = ""
    attempt: int = 0
    node_type: str = ""
    parent: str = ""
    time_s: float = field(default_factory=time.time)


OnEvent = Callable[[Event], None]
