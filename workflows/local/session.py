"""What the workflows of one submission share: settings, the warm server, the machine's capacity, stopping."""

import asyncio
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from steps.errors import ConfigError
from workflows.local.containers import POD_DELETED
from workflows.local.events import Event, OnEvent
from workflows.local.locks import Mutexes, hold_workflow
from workflows.local.model import Workflow, WorkflowSpec
from workflows.local.resources import ResourceHandler
from workflows.local.run import WorkflowRun
from workflows.local.status import WorkflowStatus, check_name, load_status
from workflows.local.variables import substitute
from workflows.local.warm_client import WarmClient

STOPPED = "Stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A LocalCluster's unchanging part. `base_env` is this machine's; `extra_env` wins over the manifests'."""

    root: Path
    config_maps: Mapping[str, Mapping[str, str]]
    secrets: Mapping[str, Mapping[str, str]]
    templates: Mapping[str, WorkflowSpec]
    on_event: OnEvent
    working_dir: Path
    base_env: Mapping[str, str]
    extra_env: Mapping[str, str]
    max_parallel_pods: int
    backoff_scale: float
    resource_handlers: Mapping[str, ResourceHandler] = field(default_factory=dict)
    namespace: str = "local"
    node_name: str = "local"


class Session:
    def __init__(self, settings: Settings, client: WarmClient) -> None:
        self.settings = settings
        self.client = client
        self.capacity = asyncio.Semaphore(settings.max_parallel_pods)
        self.mutexes = Mutexes(settings.root / ".mutexes")
        self.hurry = asyncio.Event()
        self.stopping = False
        self.runs: dict[str, WorkflowRun] = {}
        self.ended: dict[str, WorkflowStatus] = {}

    def emit(self, event: Event) -> None:
        self.settings.on_event(event)

    def stop(self) -> None:
        """The first call asks every step to end within its grace period; a second one does not wait."""
        if self.stopping:
            self.hurry.set()
        self.stopping = True
        for run in self.runs.values():
            run.stop(STOPPED)

    def delete_pod(self, workflow: str, node_name: str) -> bool:
        """As `kubectl delete pod`; False when the node is not running."""
        kill = self.runs[workflow].pods.get(node_name) if workflow in self.runs else None
        if kill is None or kill.done():
            return False
        kill.set_result(POD_DELETED)
        return True

    def status_of(self, workflow: str) -> WorkflowStatus | None:
        if workflow in self.runs:
            return self.runs[workflow].status
        return load_status(self.settings.root, workflow)

    def delete(self, workflow: str) -> bool:
        if workflow in self.runs:
            raise ConfigError(f"workflow {workflow} is running; it can't be deleted")
        folder = self.settings.root / check_name(workflow)
        if not folder.is_dir():
            return False
        shutil.rmtree(folder)
        return True

    async def apply(self, workflow: Workflow) -> WorkflowStatus:
        """Runs a workflow, or finds it: finished in this submission, or Succeeded in an earlier one.

        One that an earlier submission left unfinished or failed is retried, as `argo retry` does: once a submission.
        """
        if workflow.name in self.ended:
            return self.ended[workflow.name]
        if workflow.name in self.runs:
            raise ConfigError(f"workflow {workflow.name} is already running here; two templates apply the same name")
        existing = load_status(self.settings.root, workflow.name)
        if existing is not None and existing.phase == "Succeeded":
            return existing
        spec = self._spec(workflow)
        parameters = _parameters(workflow, spec)
        folder = self.settings.root / check_name(workflow.name)
        with hold_workflow(folder):
            status = _fresh_or_resumed(existing, workflow, parameters)
            run = WorkflowRun(self, workflow, spec, status, folder)
            if self.stopping:
                run.stop(STOPPED)
            self.runs[workflow.name] = run
            try:
                names = tuple(substitute(mutex, run.globals(), f"{workflow.name} mutex") for mutex in spec.mutexes)
                async with self.mutexes.hold(names, lambda: bool(run.shutdown)):
                    self.ended[workflow.name] = await run.execute()
            finally:
                del self.runs[workflow.name]
        return self.ended[workflow.name]

    def _spec(self, workflow: Workflow) -> WorkflowSpec:
        if workflow.spec is not None:
            return workflow.spec
        if workflow.template_ref not in self.settings.templates:
            known = ", ".join(sorted(self.settings.templates)) or "none"
            raise ConfigError(
                f"workflow {workflow.name}: workflowtemplates.argoproj.io {workflow.template_ref!r} not found "
                f"(known: {known})"
            )
        return self.settings.templates[workflow.template_ref]


def _parameters(workflow: Workflow, spec: WorkflowSpec) -> dict[str, str]:
    values = dict(workflow.arguments)
    for parameter in spec.parameters:
        if parameter.name not in values:
            value = parameter.value if parameter.value is not None else parameter.default
            if value is None:
                raise ConfigError(f"workflow {workflow.name}: argument {parameter.name} is missing")
            values[parameter.name] = value
    return values


def _fresh_or_resumed(
    existing: WorkflowStatus | None, workflow: Workflow, parameters: dict[str, str]
) -> WorkflowStatus:
    """A new status, or the old one with only what counts on a resume: attempts that ended and nodes that succeeded."""
    now_s = time.time()
    status = existing or WorkflowStatus(name=workflow.name, template=workflow.template_ref, created_s=now_s)
    status.parameters = parameters
    status.started_s, status.finished_s = now_s, 0.0
    for node in list(status.nodes.values()):
        if node.type == "Pod" and node.phase in ("Pending", "Running"):  # its executor died, and took it along
            node.phase, node.message, node.exit_code = "Error", POD_DELETED, "-1"
        elif node.type != "Pod" and not (node.type == "Retry" and node.phase == "Succeeded"):
            del status.nodes[node.name]
    return status
