"""JobSets on this machine: gangs of local processes that run, fail, restart and end as JobSet's controller has it.

A pod's ranks are forked from the warm server with the variables that torchrun would set; all of them meet on the
loopback interface. The status is that of JobSet (pkg/controllers/failure_policy.go of kubernetes-sigs/jobset).
"""

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steps.errors import ConfigError, ServiceUnavailable
from workflows.local.gang_attempt import Ending, GangAttempt
from workflows.local.job_sets import JobSetSpec, parse_job_set
from workflows.local.status import check_name

if TYPE_CHECKING:
    from workflows.local.run import WorkflowRun
    from workflows.local.session import Session


class ResourceDeleted(Exception):
    """The object went away while it was watched."""


class JobSets:
    """The JobSets of a namespace, by name. One that has ended stays, for later submissions too, until it is deleted."""

    def __init__(self, session: "Session") -> None:
        self.session = session
        self.gangs: dict[str, Gang] = {}

    async def apply(self, manifest: dict[str, Any], run: "WorkflowRun", *, create: bool, owned: bool) -> dict[str, Any]:
        """Creates the JobSet, or finds it, and returns it once it has ended. Cancelling this leaves the JobSet running.

        ConfigError: the manifest can't be used, or (`create`) the name is taken. ResourceDeleted: somebody deleted it.
        """
        spec = parse_job_set(manifest)
        if spec.name not in self.gangs:
            ended = self._load(spec.name)
            if ended is not None and not create:
                return ended
            if ended is None:
                self.gangs[spec.name] = Gang(run, spec, owned=owned)
                create = False
        if create:
            raise ConfigError(f'jobsets.jobset.x-k8s.io "{spec.name}" already exists')
        gang = self.gangs[spec.name]
        await asyncio.wait([gang.task])
        if self.gangs.get(spec.name) is not gang:
            raise ResourceDeleted
        gang.task.result()
        document = {**manifest, "status": gang.status()}
        self._save(spec.name, document)
        return document

    async def delete(self, name: str) -> None:
        """Ends what runs of it, within its grace period; nothing happens when there is none."""
        gang = self.gangs.pop(name, None)
        if gang is not None:
            await gang.end()
        self._path(name).unlink(missing_ok=True)

    async def delete_owned(self, workflow: str) -> None:
        for name in [name for name, gang in self.gangs.items() if gang.owner == workflow]:
            await self.delete(name)

    def evict(self, pod: str) -> bool:
        """As the drain of a node does it: SIGTERM, and the pod gets the condition DisruptionTarget. False: not here."""
        attempts = [gang.attempt for gang in self.gangs.values() if gang.attempt is not None and not gang.task.done()]
        return any(attempt.evict(pod) for attempt in attempts)

    async def end_all(self) -> None:
        """Nothing runs here beyond the submission, as it would on a cluster: what nobody deleted ends now."""
        running = [gang for gang in self.gangs.values() if not gang.task.done()]
        await asyncio.gather(*(gang.end() for gang in running))

    def _path(self, name: str) -> Path:
        return self.session.settings.root / ".jobsets" / f"{check_name(name)}.json"

    def _load(self, name: str) -> dict[str, Any] | None:
        path = self._path(name)
        if not path.exists():
            return None
        document: dict[str, Any] = json.loads(path.read_text())
        return document

    def _save(self, name: str, document: dict[str, Any]) -> None:
        path = self._path(name)
        temporary = path.with_suffix(".tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_text(json.dumps(document))
            os.replace(temporary, path)
        except OSError as error:
            raise ServiceUnavailable(f"can't write {path}: {error.strerror}") from None


class Gang:
    """One JobSet: its attempts, one after another."""

    def __init__(self, run: "WorkflowRun", spec: JobSetSpec, *, owned: bool) -> None:
        self.run = run
        self.spec = spec
        self.owner = run.status.name if owned else ""
        self.restarts = 0
        self.counted_restarts = 0
        self.terminal_state = ""
        self.reason = ""
        self.message = ""
        self.failure = Ending()
        self.attempt: GangAttempt | None = None
        self.task = asyncio.create_task(self._execute())

    async def end(self) -> None:
        """SIGTERM to every pod, their grace period, SIGKILL."""
        if self.attempt is None:
            self.task.cancel()
        else:
            self.attempt.ask_to_end()
        await asyncio.wait([self.task])

    def status(self) -> dict[str, Any]:
        """The part of the object's `status` that conditions may read; `local` tells of the process that failed last."""
        condition = {"type": self.terminal_state, "status": "True", "reason": self.reason, "message": self.message}
        return {
            "restarts": self.restarts,
            "restartsCountTowardsMax": self.counted_restarts,
            "terminalState": self.terminal_state,
            "conditions": [condition],
            "local": {"exitCode": self.failure.exit_code, "log": str(self.failure.log or "")},
        }

    async def _execute(self) -> None:
        # A gang starts whole or not at all, so it takes one place on the machine however many ranks it has.
        async with self.run.session.capacity:
            while not self.terminal_state:
                self.attempt = GangAttempt(self.run, self.spec, self.restarts)
                ending = await self.attempt.execute()
                if ending is None:
                    return
                self._react(ending)

    def _react(self, ending: Ending) -> None:
        if not ending.reason:
            self._finish("Completed", "AllJobsCompleted", "jobset completed successfully")
            return
        self.failure = ending
        rules = (rule.action for rule in self.spec.rules if rule.applies(ending.reason, ending.message))
        action = next(rules, "RestartJobSet")
        first_failed = f" (first failed job: {self.spec.name}-{self.spec.job}-0)"
        if self.spec.max_restarts is None:
            self._finish("Failed", "FailedJobs", f"jobset failed due to one or more job failures{first_failed}")
        elif action == "FailJobSet":
            message = f"applying FailJobSet failure policy action{first_failed}"
            self._finish("Failed", "FailJobSetFailurePolicyAction", message)
        elif action == "RestartJobSet" and self.counted_restarts >= self.spec.max_restarts:
            message = f"jobset failed due to reaching max number of restarts{first_failed}"
            self._finish("Failed", "ReachedMaxRestarts", message)
        else:
            self.restarts += 1
            self.counted_restarts += action == "RestartJobSet"

    def _finish(self, state: str, reason: str, message: str) -> None:
        self.terminal_state, self.reason, self.message = state, reason, message
