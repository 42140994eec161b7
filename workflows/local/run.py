"""One workflow while it runs: walks its templates, keeps its status, stops it.

Nodes are named as Argo names them (`wf.task`, `wf[0].step(2:item)`, `name(1)` for a second attempt), so a resumed run
finds what already succeeded by name and keeps it.
"""

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from steps.errors import ConfigError
from workflows.local.containers import DEADLINE, parse_deadline
from workflows.local.dag import DagRun
from workflows.local.events import Event
from workflows.local.expressions import WHEN, evaluate_bool
from workflows.local.fanout import CallResult, Item, expand, group_phase
from workflows.local.leaf import run_leaf
from workflows.local.model import Call, Container, Dag, Resource, Steps, Template, Workflow, WorkflowSpec
from workflows.local.outputs import display_name, resolve_inputs, resolve_outputs
from workflows.local.places import Place, Places
from workflows.local.status import NodeStatus, WorkflowStatus, save_status
from workflows.local.steps_nodes import run_steps
from workflows.local.variables import substitute

if TYPE_CHECKING:
    from workflows.local.session import Session

FAIL_FAST = "template has failed or errored children and failFast enabled"
STOPPED = "Stopped with strategy 'Stop'"
TERMINATED = "Stopped with strategy 'Terminate'"


def is_exit_node(workflow: str, node_name: str) -> bool:
    """Whether the node belongs to the workflow's exit handler."""
    return re.fullmatch(rf"{re.escape(workflow)}\.onExit([.(\[].*)?", node_name) is not None


@dataclass(slots=True)
class Boundary:
    """The dag or steps node around a call: how many children may be active, and whether it takes new ones."""

    node: NodeStatus
    fail_fast: bool = False
    places: Places | None = None
    closed: bool = False

    def note(self, child: NodeStatus) -> None:
        """Argo's template failFast counts every unsuccessful attempt, also one that a retry would mend."""
        if self.fail_fast and child.unsuccessful:
            self.closed = True


@dataclass(slots=True)
class WorkflowRun:
    """`shutdown` is empty, or why nothing new may start; setting it goes through `stop`.

    exiting: the exit handler runs. terminated: it must not.
    """

    session: "Session"
    workflow: Workflow
    spec: WorkflowSpec
    status: WorkflowStatus
    folder: Path
    shutdown: str = ""
    pods: dict[str, asyncio.Future[str]] = field(default_factory=dict)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    pod_slots: asyncio.Semaphore | None = None
    exit_scope: dict[str, str] = field(default_factory=dict)
    exiting: bool = False
    terminated: bool = False

    def __post_init__(self) -> None:
        if self.spec.parallelism is not None:
            self.pod_slots = asyncio.Semaphore(self.spec.parallelism)

    # -- life ---------------------------------------------------------------------------------------------------------

    async def execute(self) -> WorkflowStatus:
        """Runs to the end and returns the final status; a step that fails is in the status, not an exception."""
        self.terminated = self.terminated or bool(self.shutdown)  # stopped before it began: nothing to clean up
        self.set_phase("Running", "")
        deadline = self._start_deadline()
        entry = await self.run_template(self.status.name, self.spec.entrypoint, {}, None)
        if deadline is not None:
            deadline.cancel()
        phase = "Succeeded" if entry.phase in ("Succeeded", "Skipped") else entry.phase
        message = self.shutdown if self.shutdown and entry.unsuccessful else entry.message
        if self.spec.on_exit and not self.terminated:
            phase, message = await self._run_exit_handler(phase, message)
        self.status.finished_s = time.time()
        self.set_phase(phase, message)
        return self.status

    async def _run_exit_handler(self, phase: str, message: str) -> tuple[str, str]:
        """Its failure matters to a workflow that has succeeded otherwise, and to no other."""
        self.exiting = True
        if self.session.stopping:  # which reached the children, too: they end by themselves, and are resumed
            await self.session.wait_for_children(self.status.name)
        if self.terminated:  # while they ended
            return phase, message if phase == "Succeeded" else self.shutdown
        self.shutdown = ""  # neither a deadline nor `argo stop` forbids it
        self.stopped.clear()
        # Argo quotes the list so that its own quotes survive being put into the template's text.
        failures = json.dumps(json.dumps(self._failures(), separators=(",", ":")), ensure_ascii=False)
        self.exit_scope = {
            "workflow.status": phase,
            "workflow.failures": failures,
        }
        node = await self.run_template(f"{self.status.name}.onExit", self.spec.on_exit, {}, None)
        return (node.phase, node.message) if node.unsuccessful and phase == "Succeeded" else (phase, message)

    def _start_deadline(self) -> asyncio.TimerHandle | None:
        if not self.spec.active_deadline_s:
            return None
        where = f"workflow {self.status.name}"
        seconds = parse_deadline(substitute(self.spec.active_deadline_s, self.globals(), where), where)
        assert seconds is not None
        return asyncio.get_running_loop().call_later(seconds, self.stop, DEADLINE)

    @asynccontextmanager
    async def pod_slot(self) -> AsyncIterator[None]:
        """A place for one pod within spec.parallelism."""
        async with self.pod_slots or nullcontext():
            yield

    @asynccontextmanager
    async def capacity(self) -> AsyncIterator[None]:
        """The same, and a place on the machine."""
        async with self.pod_slot(), self.session.capacity:
            yield

    def stop(self, reason: str, *, terminate: bool = False) -> None:
        """Nothing new starts; running pods are asked to end. Only `terminate` ends or forbids an exit handler."""
        self.terminated = self.terminated or terminate
        if self.exiting and not terminate:
            return
        self.shutdown = reason
        self.stopped.set()
        for kill in self.pods.values():
            if not kill.done():
                kill.set_result(reason)

    # -- status -------------------------------------------------------------------------------------------------------

    def set_phase(self, phase: str, message: str) -> None:
        self.status.phase = phase
        self.status.message = message
        save_status(self.status, self.folder)
        self.session.emit(
            Event(
                kind="workflow", workflow=self.status.name, template=self.status.template, phase=phase, message=message
            )
        )

    def begin(
        self, name: str, node_type: str, template: Template, parent: str, inputs: Mapping[str, str]
    ) -> NodeStatus:
        node = NodeStatus(
            name=name,
            display_name=re.sub(r"^(\[\d+\])?\.", "", name.removeprefix(parent)) if parent else name,
            type=node_type,
            template=template.name,
            parent=parent,
            inputs=dict(inputs),
            started_s=time.time(),
        )
        self.status.nodes[name] = node
        return node

    def transition(self, node: NodeStatus, phase: str, message: str = "") -> None:
        """A node's new phase: kept on disk (Pending is nothing to come back to), then told to whoever watches."""
        node.phase = phase
        node.message = message
        if phase not in ("Pending", "Running"):
            node.finished_s = time.time()
        if phase != "Pending":
            save_status(self.status, self.folder)
        self.emit(node, "node")

    def emit(self, node: NodeStatus, kind: str, message: str = "") -> None:
        self.session.emit(
            Event(
                kind="progress" if kind == "progress" else "node",
                workflow=self.status.name,
                node_name=node.name,
                display_name=node.display_name,
                template=node.template,
                phase=node.phase,
                message=message or node.message,
                progress=node.progress,
                attempt=node.attempt,
                node_type=node.type,
                parent=node.parent,
            )
        )

    def globals(self) -> dict[str, str]:
        """The `workflow.*` variables; the failures, and the final status, are the exit handler's."""
        name = self.status.name
        scope = {
            "workflow.name": name,
            "workflow.namespace": self.session.settings.namespace,
            "workflow.uid": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{self.folder}@{self.status.created_s}")),
            "workflow.serviceAccountName": "default",
            "workflow.creationTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.status.created_s)),
            "workflow.creationTimestamp.s": str(int(self.status.created_s)),
            "workflow.mainEntrypoint": self.spec.entrypoint,
            "workflow.status": self.status.phase,
            "workflow.duration": f"{time.time() - self.status.started_s:.6f}",
            **self.exit_scope,
        }
        parameters = [{"name": key, "value": value} for key, value in self.status.parameters.items()]
        scope["workflow.parameters"] = json.dumps(parameters)
        scope |= {f"workflow.parameters.{key}": value for key, value in self.status.parameters.items()}
        scope |= {f"workflow.labels.{key}": value for key, value in self.workflow.labels.items()}
        scope |= {f"workflow.annotations.{key}": value for key, value in self.workflow.annotations.items()}
        return scope | {f"workflow.outputs.parameters.{key}": value for key, value in self.status.outputs.items()}

    def _failures(self) -> list[dict[str, str]]:
        return [
            {
                "displayName": node.display_name,
                "message": node.message,
                "templateName": node.template,
                "phase": node.phase,
                "podName": node.pod_name,
                "finishedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(node.finished_s)),
            }
            for node in self.status.nodes.values()
            if node.unsuccessful
        ]

    # -- nodes --------------------------------------------------------------------------------------------------------

    def omit(self, boundary: Boundary, name: str, call: Call, message: str, phase: str = "Omitted") -> CallResult:
        """A node that does not run: Omitted, Skipped, or an Error (of the manifest) before it could start."""
        node = self.begin(name, "Skipped", self.spec.templates[call.template], boundary.node.name, {})
        node.error_code = ConfigError.exit_code if phase == "Error" else 0
        self.transition(node, phase, message)
        boundary.note(node)
        return CallResult(phase, (node,))

    async def run_call(self, boundary: Boundary, name: str, call: Call, scope: Mapping[str, str]) -> CallResult:
        """A task or step, with its copies where it fans out."""
        if not call.expands:
            node = await self._run_item(boundary, name, call, scope, Item("", {}))
            return CallResult(node.phase, (node,))
        try:
            items = expand(call, scope, name)
        except ConfigError as error:
            return self.omit(boundary, name, call, str(error), "Error")
        if not items:
            return self.omit(boundary, name, call, "Skipped, empty params", "Skipped")
        nodes = tuple(
            await asyncio.gather(*(self._run_item(boundary, name + item.suffix, call, scope, item) for item in items))
        )
        return CallResult(group_phase(nodes), nodes, expanded=True)

    async def _run_item(
        self, boundary: Boundary, name: str, call: Call, scope: Mapping[str, str], item: Item
    ) -> NodeStatus:
        place = await boundary.places.take() if boundary.places is not None else None
        try:
            if boundary.closed or self.shutdown:
                return self._not_started(name, call.template, self.shutdown or FAIL_FAST)
            own = {**scope, **item.scope}
            try:
                when = substitute(call.when, own, f"{name} when")
                if when and not evaluate_bool(when, {}, WHEN):
                    return self.omit(boundary, name, call, f"when '{when}' evaluated false", "Skipped").nodes[0]
                arguments = {
                    key: substitute(value, own, f"{name} argument {key}") for key, value in call.arguments.items()
                }
            except ConfigError as error:
                return self.omit(boundary, name, call, str(error), "Error").nodes[0]
            node = await self.run_template(name, call.template, arguments, boundary, place)
            boundary.note(node)
            return node
        finally:
            if place is not None:
                place.leave()

    def _not_started(self, name: str, template: str, reason: str) -> NodeStatus:
        """Stands for a node that never came to be; it is not recorded."""
        return NodeStatus(
            name=name, display_name=name, type="Skipped", template=template, phase="Failed", message=reason
        )

    async def run_template(
        self,
        name: str,
        template_name: str,
        arguments: Mapping[str, str],
        boundary: Boundary | None,
        place: Place | None = None,
    ) -> NodeStatus:
        """Runs one node to its end, or keeps it when it succeeded in an earlier submission."""
        template = self.spec.templates[template_name]
        if self.shutdown:
            return self._not_started(name, template_name, self.shutdown)
        kept = self._kept(name)
        if kept is not None:
            self.emit(kept, "node", "kept")
            return kept
        parent = boundary.node.name if boundary else ""
        try:
            inputs = resolve_inputs(template, arguments, self.globals(), name)
            scope = {**self.globals(), **{f"inputs.parameters.{key}": value for key, value in inputs.items()}}
            mutexes = tuple(substitute(mutex, scope, f"{name} mutex") for mutex in template.mutexes)
            shown = display_name(template, scope, name)
        except ConfigError as error:
            node = self.begin(name, "Skipped", template, parent, arguments)
            node.error_code = error.exit_code
            self.transition(node, "Error", str(error))
            return node
        async with self.session.mutexes.hold(mutexes, lambda: bool(self.shutdown)):
            if isinstance(template.body, Container | Resource):
                return await run_leaf(self, name, template, inputs, scope, boundary, place, shown)
            node = self.begin(name, template.kind, template, parent, inputs)
            node.display_name = shown or node.display_name
            return await self._run_group(node, template, template.body, scope)

    def _kept(self, name: str) -> NodeStatus | None:
        node = self.status.nodes.get(name)
        return node if node is not None and node.phase == "Succeeded" and node.type in ("Pod", "Retry") else None

    async def _run_group(
        self, node: NodeStatus, template: Template, body: Dag | Steps, scope: Mapping[str, str]
    ) -> NodeStatus:
        boundary = Boundary(node, template.fail_fast, Places(template.parallelism) if template.parallelism else None)
        self.transition(node, "Running")
        message = ""
        if isinstance(body, Dag):
            phase, known = await DagRun(self, body, boundary, scope).execute()
        else:
            phase, message, known = await run_steps(self, body, boundary, scope)
        if boundary.closed:
            phase, message = "Failed", FAIL_FAST
        if phase == "Succeeded":
            try:
                self.publish(node, *resolve_outputs(template, {**scope, **known}, node.name))
            except ConfigError as error:
                phase, message, node.error_code = "Error", str(error), error.exit_code
        self.transition(node, phase, self.shutdown if self.shutdown and phase != "Succeeded" else message)
        return node

    def publish(self, node: NodeStatus, outputs: dict[str, str], artifacts: dict[str, str]) -> None:
        """Sets a node's outputs, and the workflow's where a parameter has a globalName."""
        node.outputs = outputs
        node.artifacts = artifacts
        for parameter in self.spec.templates[node.template].outputs:
            if parameter.global_name and parameter.name in outputs:
                self.status.outputs[parameter.global_name] = outputs[parameter.name]
