"""One attempt of a gang: every pod of a JobSet at once, until all have succeeded or one has failed."""

import asyncio
import contextlib
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steps.errors import Interrupted
from workflows.local.containers import PodFiles, PodPlace, pod_environment
from workflows.local.job_sets import JobSetSpec, launch_of
from workflows.local.warm_client import StepProcess

if TYPE_CHECKING:
    from workflows.local.run import WorkflowRun

_STOPPED_CODES = {0, Interrupted.exit_code, 128 + signal.SIGTERM, 128 + signal.SIGKILL}
"""Codes of ranks that may have ended because of another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an attempt ended; reason and message are those of the Job's Failed condition, "" after a success."""

    reason: str = ""
    message: str = ""
    exit_code: int = 0
    log: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process of a pod."""

    pod: int
    process: StepProcess
    log: Path


class GangAttempt:
    """Raises from `execute`: ConfigError, ServiceUnavailable."""

    def __init__(self, run: "WorkflowRun", spec: JobSetSpec, number: int) -> None:
        self.run = run
        self.spec = spec
        self.number = number
        self.end_asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ranks: list[Rank] = []
        self.evicted: int | None = None

    def ask_to_end(self) -> None:
        if not self.end_asked.done():
            self.end_asked.set_result(None)

    def evict(self, pod: str) -> bool:
        """As when the platform takes a pod away; False when it is none of this gang."""
        ranks = [rank for rank in self.ranks if self._pod_name(rank.pod) == pod]
        for rank in ranks:
            self.evicted = rank.pod
            self.run.session.client.signal(rank.process, signal.SIGTERM)
        return bool(ranks)

    async def execute(self) -> Ending | None:
        """None: it was asked to end. All ranks have ended when this returns."""
        self.ranks = self._start()
        timer = None if self.spec.deadline_s is None else asyncio.ensure_future(asyncio.sleep(self.spec.deadline_s))
        order = await self._until_decided(timer)
        deadline_passed = timer is not None and timer.done()
        if timer is not None:
            timer.cancel()
        await self._end_all()
        order += [rank for rank in self.ranks if rank not in order]
        codes = [(rank, await rank.process.ended) for rank in order]
        if self.end_asked.done():
            return None
        if deadline_passed:
            return Ending(reason="DeadlineExceeded", message="Job was active longer than specified deadline")
        return self._ending(codes)

    async def _until_decided(self, timer: "asyncio.Future[None] | None") -> list[Rank]:
        """Until all ranks have succeeded, one has failed, or it has to end: the ranks that ended, in that order."""
        order: list[Rank] = []
        while len(order) < len(self.ranks):
            running = {rank.process.ended for rank in self.ranks if rank not in order}
            waited_for: set[asyncio.Future[Any]] = {*running, self.end_asked, *([] if timer is None else [timer])}
            done, _ = await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            new = [rank for rank in self.ranks if rank.process.ended in done and rank not in order]
            order.extend(new)
            if not new or any(rank.process.ended.result() != 0 for rank in new):
                break
        return order

    async def _end_all(self) -> None:
        """SIGTERM, the pods' grace period (none after a second stop), SIGKILL."""
        session = self.run.session
        left = [rank.process for rank in self.ranks if not rank.process.ended.done()]
        if not left:
            return
        for process in left:
            session.client.signal(process, signal.SIGTERM)
        hurry = asyncio.ensure_future(session.hurry.wait())
        everyone = asyncio.gather(*(process.ended for process in left), return_exceptions=True)
        waited_for: set[asyncio.Future[Any]] = {everyone, hurry}
        await asyncio.wait(waited_for, timeout=self.spec.grace_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        for process in left:
            session.client.signal(process, signal.SIGKILL)
        await everyone

    def _ending(self, codes: list[tuple[Rank, int]]) -> Ending:
        """`codes` in the order in which the ranks ended; the first that failed for its own reason decides."""
        failed = [(rank, code) for rank, code in codes if code != 0]
        if not failed:
            return Ending()
        rank, code = next(((rank, code) for rank, code in failed if code not in _STOPPED_CODES), failed[0])
        pod = f"{self.run.session.settings.namespace}/{self._pod_name(rank.pod)}"
        for number, rule in enumerate(self.spec.pod_rules):
            if rule.applies(code, rank.pod == self.evicted):
                by_code = f"Container {self.spec.container_name} for pod {pod} failed with exit code {code}"
                what = f"Pod {pod} has condition DisruptionTarget" if rule.disruption else by_code
                message = f"{what} matching FailJob rule at index {number}"
                return Ending(reason="PodFailurePolicy", message=message, exit_code=code, log=rank.log)
        message = "Job has reached the specified backoff limit"
        return Ending(reason="BackoffLimitExceeded", message=message, exit_code=code, log=rank.log)

    def _pod_name(self, index: int) -> str:
        return f"{self.spec.name}-{self.spec.job}-0-{index}"

    def _start(self) -> list[Rank]:
        """All processes of all pods. They meet at a port that was free a moment ago."""
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
            port = str(free.getsockname()[1])
        ranks: list[Rank] = []
        for index in range(self.spec.pods):
            name = self._pod_name(index)
            files = PodFiles(self.run.folder / (f"{name}-restart-{self.number}" if self.number else name))
            files.prepare()
            env = self._pod_environment(index, name, files)
            launch = launch_of(self.spec.container, self.spec.pods, env, f"JobSet {self.spec.name}")
            for local_rank in range(launch.ranks or 1):
                own = env | (self._rank_variables(index, local_rank, launch.ranks, port) if launch.ranks else {})
                process = self.run.session.client.start(
                    launch.argv, own, self.run.session.settings.working_dir, files.log
                )
                ranks.append(Rank(pod=index, process=process, log=files.log))
        return ranks

    def _pod_environment(self, index: int, name: str, files: PodFiles) -> dict[str, str]:
        settings = self.run.session.settings
        place = PodPlace(
            variables={
                "POD_NAME": name,
                "NODE_NAME": settings.node_name,
                "JOB_COMPLETION_INDEX": str(index),
                "JOBSET_NAME": self.spec.name,
                "JOBSET_RESTART_ATTEMPT": str(self.number),
            },
            fields={
                "metadata.name": name,
                "metadata.namespace": settings.namespace,
                "metadata.labels['workflows.argoproj.io/workflow']": self.run.status.name,
                "metadata.labels['jobset.sigs.k8s.io/jobset-name']": self.spec.name,
                "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": str(self.number),
                "metadata.labels['batch.kubernetes.io/job-completion-index']": str(index),
                "spec.nodeName": settings.node_name,
            },
        )
        env = pod_environment(self.run, place, self.spec.container, files, {})
        del env["ARGO_PROGRESS_FILE"]  # these pods are no pods of Argo's
        return env

    def _rank_variables(self, pod: int, local_rank: int, local_size: int, port: str) -> dict[str, str]:
        """torchrun's. The loopback interface is named because gloo else takes the address of the host name."""
        return {
            "RANK": str(pod * local_size + local_rank),
            "WORLD_SIZE": str(self.spec.pods * local_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_size),
            "GROUP_RANK": str(pod),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        }
