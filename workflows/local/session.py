"""What the workflows of one submission share: settings, the warm server, the machine's capacity, stopping."""

import asyncio
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from steps.errors import ConfigError
from workflows.local.chaos import Chaos
from workflows.local.containers import POD_DELETED
from workflows.local.events import Event, OnEvent
from workflows.local.gangs import JobSets
from workflows.local.locks import Mutexes, hold_workflow
from workflows.local.model import Workflow, WorkflowSpec
from workflows.local.run import STOPPED, TERMINATED, WorkflowRun, is_exit_node
from workflows.local.status import STATUS_FILE, WorkflowStatus, check_name, load_status
from workflows.local.variables import substitute
from workflows.local.warm_client import WarmClient


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
    chaos: Chaos | None = None
    namespace: str = "local"
    node_name: str = "local"


class Session:
    def __init__(self, settings: Settings, client: WarmClient) -> None:
        self.settings = settings
        self.client = client
        self.capacity = asyncio.Semaphore(settings.max_parallel_pods)
        self.mutexes = Mutexes(settings.root / ".mutexes")
        self.job_sets = JobSets(self)
        self.hurry = asyncio.Event()
        self.stopping = False
        self.runs: dict[str, WorkflowRun] = {}
        self.tasks: dict[str, asyncio.Task[WorkflowStatus]] = {}
        self.parents: dict[str, str] = {}

    def emit(self, event: Event) -> None:
        self.settings.on_event(event)

    def stop(self) -> None:
        """The first call is `argo stop`: every step ends within its grace period, then the exit handlers run.

        A second one is `argo terminate`: no grace, no exit handler.
        """
        if self.stopping:
            self.hurry.set()
        self.stopping = True
        for run in list(self.runs.values()):
            run.stop(TERMINATED if self.hurry.is_set() else STOPPED, terminate=self.hurry.is_set())

    def delete_pod(self, workflow: str, node_name: str) -> bool:
        """As `kubectl delete pod`, or for a gang's pod, by its own name, an eviction; False when it is not running."""
        if workflow not in self.runs:
            return False
        kill = self.runs[workflow].pods.get(node_name)
        if kill is None:
            return self.job_sets.evict(node_name)
        if kill.done():
            return False
        kill.set_result(POD_DELETED)
        return True

    def status_of(self, workflow: str) -> WorkflowStatus | None:
        if workflow in self.runs:
            return self.runs[workflow].status
        return load_status(self.settings.root, workflow)

    def statuses(self) -> Iterator[WorkflowStatus]:
        """Of every workflow that is here, by name."""
        for path in sorted(self.settings.root.glob(f"*/{STATUS_FILE}")):
            status = self.status_of(path.parent.name)
            if status is not None:
                yield status

    async def delete(self, workflow: str) -> None:
        """As `kubectl delete workflow`: what runs of it ends within its grace period, without an exit handler.

        Nothing happens when there is none.
        """
        if workflow in self.runs:
            self.runs[workflow].stop("workflow deleted", terminate=True)
            await asyncio.wait([self.tasks[workflow]])
        self.tasks.pop(workflow, None)
        self.parents.pop(workflow, None)
        await self.job_sets.delete_owned(workflow)
        shutil.rmtree(self.settings.root / check_name(workflow), ignore_errors=True)

    def start(self, workflow: Workflow, parent: str = "") -> asyncio.Task[WorkflowStatus]:
        """Begins to run a workflow, or finds it: known to this submission, or Succeeded in an earlier one.

        One that an earlier submission left unfinished or failed is retried, as `argo retry` does: once a submission.
        """
        if workflow.name not in self.tasks:
            self.tasks[workflow.name] = asyncio.create_task(self._run(workflow))
            self.parents[workflow.name] = parent
        return self.tasks[workflow.name]

    async def wait_for_children(self, workflow: str) -> None:
        """Until the Workflows that it started have ended."""
        children = [self.tasks[name] for name, parent in self.parents.items() if parent == workflow]
        if children:
            await asyncio.wait(children)

    async def finish(self) -> None:
        """Waits for workflows that nobody watches any more, then ends the gangs that nobody has deleted."""
        while running := [task for task in self.tasks.values() if not task.done()]:
            await asyncio.gather(*running)
        await self.job_sets.end_all()

    async def _run(self, workflow: Workflow) -> WorkflowStatus:
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
                    return await run.execute()
            finally:
                del self.runs[workflow.name]

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
    """A new status, or the old one with only what counts on a resume: attempts that ended and nodes that succeeded.

    The exit handler begins anew, as after `argo retry`.
    """
    now_s = time.time()
    status = existing or WorkflowStatus(name=workflow.name, template=workflow.template_ref, created_s=now_s)
    status.parameters = parameters
    status.labels = dict(workflow.labels)
    status.started_s, status.finished_s = now_s, 0.0
    for node in list(status.nodes.values()):
        if is_exit_node(workflow.name, node.name):
            del status.nodes[node.name]
        elif node.type == "Pod" and node.phase in ("Pending", "Running"):  # its executor died, and took it along
            node.phase, node.message, node.exit_code = "Error", POD_DELETED, "-1"
        elif node.type != "Pod" and not (node.type == "Retry" and node.phase == "Succeeded"):
            del status.nodes[node.name]
    return status
