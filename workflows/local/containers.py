"""A container template as a process: environment, deadline, SIGTERM and SIGKILL, exit code, outputs, progress."""

import asyncio
import contextlib
import re
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from steps.errors import ConfigError, ServiceUnavailable
from workflows.local.chaos import NOTICE_VARIABLE, disturbed
from workflows.local.model import Container, EnvVar, Template
from workflows.local.outputs import collect_files
from workflows.local.status import NodeStatus
from workflows.local.variables import substitute
from workflows.local.warm_client import StepProcess

if TYPE_CHECKING:
    from workflows.local.run import WorkflowRun

DEADLINE = "Step exceeded its deadline"
POD_DELETED = "pod deleted"
DEFAULT_GRACE_S = 30.0  # Kubernetes' terminationGracePeriodSeconds
PROGRESS_POLL_S = 0.25  # only for what a person sees; a step's end is an event, never polled


@dataclass(frozen=True, slots=True)
class PodFiles:
    """A node's own folder."""

    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "main.log"

    @property
    def outputs(self) -> Path:
        return self.folder / "outputs"

    @property
    def progress(self) -> Path:
        return self.folder / "progress"

    @property
    def notice(self) -> Path:
        return self.folder / "notice"

    def prepare(self) -> None:
        """Empty outputs: a step that runs again must not find the last attempt's. ServiceUnavailable: the disk."""
        try:
            shutil.rmtree(self.outputs, ignore_errors=True)
            self.outputs.mkdir(parents=True)
            self.progress.unlink(missing_ok=True)
            self.notice.unlink(missing_ok=True)
        except OSError as error:
            raise ServiceUnavailable(f"can't write {self.folder}: {error.strerror}") from None


async def run_container(
    run: "WorkflowRun", node: NodeStatus, template: Template, container: Container, scope: Mapping[str, str]
) -> None:
    """Runs the pod and gives `node` its final phase. ConfigError, ServiceUnavailable: it could not be started."""
    files = PodFiles(run.folder / node.pod_name)
    files.prepare()
    node.folder = str(files.folder)
    where = f"template {template.name}"
    env = pod_environment(run, pod_place(run, node), container, files, scope)
    argv = [expand(substitute(word, scope, where), env) for word in (*container.command, *container.args)]
    deadline_s = parse_deadline(substitute(template.active_deadline_s, scope, where), where)
    once = {name: value for name, value in scope.items() if not name.startswith(("retries", "lastRetry."))}
    grace_s = grace_period_s(
        substitute(run.spec.pod_spec_patch, once, f"podSpecPatch of workflow {run.status.name}"),
        substitute(template.pod_spec_patch, scope, where),
    )
    kill: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    run.pods[node.name] = kill
    try:
        async with run.capacity():
            if run.shutdown:
                return never_started(run, node, run.shutdown)
            step = run.session.client.start(argv, env, run.session.settings.working_dir, files.log)
            pod = Pod(run, node, files, step, kill, grace_s)
            if not await pod.started():
                return never_started(run, node, kill.result())
            async with disturbed(run.session.settings.chaos, pod):
                code, reason = await pod.supervise(deadline_s)
    finally:
        del run.pods[node.name]
    conclude(run, node, template, files, scope, code, reason)


def never_started(run: "WorkflowRun", node: NodeStatus, reason: str) -> None:
    """The end of a pod that was stopped or deleted before it had a process."""
    node.exit_code = "-1"
    run.transition(node, "Error" if reason == POD_DELETED else "Failed", reason)


class Pod:
    """A process, asked for or running, and the reasons to end it early."""

    def __init__(
        self,
        run: "WorkflowRun",
        node: NodeStatus,
        files: PodFiles,
        step: StepProcess,
        kill: asyncio.Future[str],
        grace_s: float,
    ) -> None:
        self.run = run
        self.node = node
        self.grace_s = grace_s
        self.files = files
        self.step = step
        self.kill = kill

    async def started(self) -> bool:
        """Waits for the process. False: it shall end before it began; the server kills it in the moment it forks it.

        The server may be importing torch for seconds, or be gone: then this raises ServiceUnavailable.
        """
        waited_for: set[asyncio.Future[Any]] = {self.step.started, self.kill}
        await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
        if not self.step.started.done():
            self.run.session.client.signal(self.step, signal.SIGKILL)
            return False
        self.node.pid = self.step.started.result()
        return True

    async def supervise(self, deadline_s: float | None) -> tuple[int, str]:
        """(exit code, why it was asked to end or "") of a started process."""
        self.run.transition(self.node, "Running")
        loop = asyncio.get_running_loop()
        timer = None if deadline_s is None else loop.call_later(deadline_s, self.give_reason, DEADLINE)
        watcher = asyncio.create_task(self.watch_progress())
        try:
            waited_for: set[asyncio.Future[Any]] = {self.step.ended, self.kill}
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            if not self.step.ended.done():
                await self.terminate()
            code = await self.step.ended
        finally:
            watcher.cancel()
            if timer is not None:
                timer.cancel()
        self.read_progress()
        return code, self.kill.result() if self.kill.done() else ""

    def give_reason(self, reason: str) -> None:
        if not self.kill.done():
            self.kill.set_result(reason)

    def delete(self) -> None:
        """As `kubectl delete pod`."""
        self.give_reason(POD_DELETED)

    async def terminate(self) -> None:
        """SIGTERM, the grace period, SIGKILL."""
        session = self.run.session
        session.client.signal(self.step, signal.SIGTERM)
        hurry = asyncio.ensure_future(session.hurry.wait())
        waited_for: set[asyncio.Future[Any]] = {self.step.ended, hurry}
        await asyncio.wait(waited_for, timeout=self.grace_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        session.client.signal(self.step, signal.SIGKILL)

    async def watch_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_POLL_S)
            self.read_progress()

    def read_progress(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            lines = self.files.progress.read_text().split()
            if lines and re.fullmatch(r"\d+/\d+", lines[-1]) and lines[-1] != self.node.progress:
                self.node.progress = lines[-1]
                self.run.emit(self.node, "progress")


def conclude(
    run: "WorkflowRun",
    node: NodeStatus,
    template: Template,
    files: PodFiles,
    scope: Mapping[str, str],
    code: int,
    reason: str,
) -> None:
    """The phase and message that Argo's controller derives from how a pod ended."""
    node.exit_code = str(code)
    if reason == POD_DELETED:
        node.exit_code = "-1"
        run.transition(node, "Error", POD_DELETED)
    elif reason == DEADLINE:
        run.transition(node, "Failed", DEADLINE)
    elif code != 0:
        run.transition(node, "Failed", f"main: Error (exit code {code})")
    else:
        try:
            run.publish(node, *collect_files(template, files.outputs, scope))
        except ConfigError as error:
            run.transition(node, "Error", str(error))
        else:
            run.transition(node, "Succeeded")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlace:
    """What a pod knows of itself: variables that its controller sets, and the fields that a fieldRef can read."""

    variables: Mapping[str, str]
    fields: Mapping[str, str]


def pod_place(run: "WorkflowRun", node: NodeStatus) -> PodPlace:
    settings = run.session.settings
    return PodPlace(
        variables={
            "POD_NAME": node.pod_name,
            "NODE_NAME": settings.node_name,
            "ARGO_WORKFLOW": run.status.name,
            "ARGO_NODE": node.pod_name,
            "MOERL_ATTEMPT": str(node.attempt),
        },
        fields={
            "metadata.name": node.pod_name,
            "metadata.namespace": settings.namespace,
            "metadata.labels['workflows.argoproj.io/workflow']": run.status.name,
            "metadata.annotations['workflows.argoproj.io/node-name']": node.name,
            "spec.nodeName": settings.node_name,
        },
    )


def pod_environment(
    run: "WorkflowRun", place: PodPlace, container: Container, files: PodFiles, scope: Mapping[str, str]
) -> dict[str, str]:
    """This machine's environment, then the manifest's variables, then what only this machine can know."""
    settings = run.session.settings
    env = {**settings.base_env, **place.variables}
    for variable in container.env:
        value = _value(run, place, variable, scope)
        if value is not None:
            env[variable.name] = expand(value, env)
    env["MOERL_CAPACITY_TYPE"] = "local"
    env |= settings.extra_env
    env["MOERL_OUTPUTS_DIR"] = str(files.outputs)
    env["ARGO_PROGRESS_FILE"] = str(files.progress)
    if settings.chaos is not None:
        env[NOTICE_VARIABLE] = str(files.notice)
    return env


def _value(run: "WorkflowRun", place: PodPlace, variable: EnvVar, scope: Mapping[str, str]) -> str | None:
    """None: an optional reference to something that is not there."""
    settings = run.session.settings
    if variable.source == "literal":
        return substitute(variable.value, scope, f"env {variable.name}")
    if variable.source == "field":
        return _field(place, variable)
    kind = "configmap" if variable.source == "configMap" else "secret"
    objects = settings.config_maps if variable.source == "configMap" else settings.secrets
    name = substitute(variable.object_name, scope, f"env {variable.name}")
    value = objects.get(name, {}).get(variable.key)
    if value is None and not variable.optional:
        problem = (
            f"couldn't find key {variable.key} in {kind} {name}" if name in objects else f'{kind} "{name}" not found'
        )
        raise ConfigError(f"CreateContainerConfigError: {problem} (env {variable.name})")
    return value


def _field(place: PodPlace, variable: EnvVar) -> str:
    if variable.key not in place.fields:
        raise ConfigError(f"env {variable.name}: fieldPath {variable.key} is not known to the local executor")
    return place.fields[variable.key]


def expand(text: str, env: Mapping[str, str]) -> str:
    """Kubernetes' $(NAME) in command, args and env values; $$ is a dollar, an unknown name stays as it is."""

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return env.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)", replace, text)


def parse_deadline(text: str, where: str) -> float | None:
    if not text:
        return None
    if not re.fullmatch(r"[1-9]\d*", text):
        raise ConfigError(f"{where}: activeDeadlineSeconds {text!r} is not a whole number of at least 1")
    return float(text)


def grace_period_s(*pod_spec_patches: str) -> float:
    """terminationGracePeriodSeconds of podSpecPatches (YAML or JSON); the last one that says it wins, else 30 s."""
    grace_s = DEFAULT_GRACE_S
    for text in pod_spec_patches:
        try:
            patch = yaml.safe_load(text) or {}
            grace_s = float(patch.get("terminationGracePeriodSeconds", grace_s))
        except (yaml.YAMLError, AttributeError, TypeError, ValueError):
            raise ConfigError(f"podSpecPatch {text!r} is not a YAML mapping") from None
    return grace_s
