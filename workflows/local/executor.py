"""A cluster of one machine: runs rendered Argo manifests as processes, with Argo's own rules.

It covers the part of Argo that docs/local-executor.md lists and refuses the rest by name. Differences that a
person may notice: backoff waits are scaled down (`backoff_scale`), every pod runs as this user on this machine, and a
workflow that is submitted again is resumed, its failed children included (on a cluster: `argo retry` for each).
"""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from steps.errors import ConfigError
from workflows.local.chaos import Chaos
from workflows.local.events import Event
from workflows.local.parsing import parse_template_manifest, parse_workflow
from workflows.local.session import Session, Settings
from workflows.local.status import WorkflowStatus, load_status
from workflows.local.warm_client import DEFAULT_PRELOAD, SINGLE_THREADED, Preload, WarmClient, WarmServer

# A pod sees what its manifest gives it: what a user's shell says about runs must not leak in.
_NOT_INHERITED = ("MOERL_", "ARGO_", "MLFLOW_")


class LocalCluster:
    """Holds templates, config maps and secrets, and runs workflows. Close it, or use it in a `with` block.

    root: one folder a workflow: `workflow.json`, and for each pod `main.log`, `outputs/`, `progress`.
    working_dir: the steps' current directory, where `python -m` finds their modules.
    extra_env: variables that win over the manifests' own.
    max_parallel_pods: the machine's capacity (default: its CPUs); more pods wait in phase Pending.
    backoff_scale: 1.0 waits as long as the manifests say; 0 not at all.
    chaos: faults that are to strike the pods.
    preload: modules that the warm server imports once for all steps; the default suits this project's own.
    Raises ConfigError for a template that uses what is not known here.
    """

    def __init__(
        self,
        root: Path,
        *,
        config_maps: Mapping[str, Mapping[str, str]],
        secrets: Mapping[str, Mapping[str, str]],
        templates: Sequence[Mapping[str, Any]],
        on_event: Callable[[Event], None],
        working_dir: Path,
        extra_env: Mapping[str, str] | None = None,
        max_parallel_pods: int | None = None,
        backoff_scale: float = 0.05,
        chaos: Chaos | None = None,
        preload: Preload = DEFAULT_PRELOAD,
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        # First: it imports torch while we read manifests.
        self._server = WarmServer(log=root / "warm-server.log", cwd=working_dir, preload=preload)
        self._session: Session | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requested = False
        try:
            specs = dict(filter(None, (parse_template_manifest(manifest) for manifest in templates)))
        except ConfigError:
            self._server.close()
            raise
        self._settings = Settings(
            root=root.resolve(),
            config_maps=config_maps,
            secrets=secrets,
            templates=specs,
            on_event=on_event,
            working_dir=working_dir.resolve(),
            base_env=_base_env(),
            extra_env=dict(extra_env or {}),
            max_parallel_pods=max_parallel_pods or os.cpu_count() or 1,
            backoff_scale=backoff_scale,
            chaos=chaos,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the warm server and whatever still runs."""
        self._server.close()

    @property
    def root(self) -> Path:
        return self._settings.root

    def submit(self, workflow: Mapping[str, Any]) -> WorkflowStatus:
        """Runs a manifest of kind Workflow to its end and returns its status; blocks.

        A workflow of this name that ran before is resumed: what succeeded is kept with its outputs, everything else
        runs again. Raises ConfigError for a manifest that can't be run and ServiceUnavailable when another process
        runs it; a step's failure is in the status.
        """
        return asyncio.run(self._submit(workflow))

    async def _submit(self, workflow: Mapping[str, Any]) -> WorkflowStatus:
        parsed = parse_workflow(dict(workflow))
        async with WarmClient(self._server) as client:
            self._session = Session(self._settings, client)
            self._loop = asyncio.get_running_loop()
            if self._stop_requested:
                self._session.stop()
            try:
                status = await self._session.start(parsed)
                await self._session.finish()
                return status
            finally:
                self._session = self._loop = None
                self._stop_requested = False

    def stop(self) -> None:
        """Ends the submission from another thread or a signal handler; returns at once.

        Running steps get SIGTERM, their grace period, SIGKILL. What has not begun never does. Then the exit handlers
        run, as after `argo stop`. A second call is `argo terminate`: no grace, no exit handler. The status is persisted
        as Failed, "Stopped with strategy 'Stop'"; `submit` returns.
        """
        self._stop_requested = True
        self._call(lambda session: session.stop())

    def delete_pod(self, workflow: str, node_name: str) -> None:
        """Takes a pod away as `kubectl delete pod` does (SIGTERM, grace, SIGKILL): its node ends in Error.

        A pod of a gang is named by itself, and evicted.
        """
        self._call(lambda session: session.delete_pod(workflow, node_name))

    def _call(self, action: Callable[[Session], object]) -> None:
        loop, session = self._loop, self._session
        if loop is not None and session is not None:
            loop.call_soon_threadsafe(action, session)

    def status(self, workflow: str) -> WorkflowStatus | None:
        """The persisted status; None when no workflow of this name ran here."""
        return load_status(self._settings.root, workflow)


def _base_env() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    # `python` in a manifest is the image's interpreter; here, ours.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    return env | {"PYTHONUNBUFFERED": "1"} | SINGLE_THREADED
