"""Carries out a chaos plan while a workflow runs: signals to pods, notices, a locked database, damaged files.

What really happened is appended to a log, one JSON object a line, each written before its deed: an executor that is
killed in between repeats nothing, since a pod's attempts are counted over all submissions. Events of a fault:
`struck`, then `released` (freeze, database), `killed` (the end of a notice) or `damaged` (cache, checkpoint), then
`ended` with the exit code, when the executor has seen the pod's end; or only `missed`: the pod ended first.
"""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steps.adapters.store import explained_os_errors
from workflows.local import chaos_damage
from workflows.local.chaos_plan import Fault

if TYPE_CHECKING:
    from workflows.local.containers import Pod

PROGRESS_POLL_S = 0.01
NOTICE_VARIABLE = "MOERL_NOTICE_FILE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What faults other than signals reach: a run's SQLite file, its store and its node's cache."""

    database: Path
    store: Path
    cache: Path


class Chaos:
    """The faults of one plan; `log` is the file that tells what became of them."""

    def __init__(self, faults: Sequence[Fault], log: Path, surroundings: Surroundings) -> None:
        self._faults = {fault.target: (index, fault) for index, fault in enumerate(faults)}
        self._log = log
        self._surroundings = surroundings

    async def disturb(self, pod: "Pod") -> None:
        """Strikes the pod if the plan has a fault for it; returns when it has ended, with what follows its end done."""
        index, fault = self._faults.get(target_of(pod), (0, None))
        if fault is None:
            return
        started_at_s = time.time()
        if not await self._is_due(pod, fault):
            self._write(index, "missed", step=fault.step, iteration=fault.iteration, attempt=fault.attempt)
            return
        self._write(
            index,
            "struck",
            kind=fault.kind,
            step=fault.step,
            iteration=fault.iteration,
            worker=fault.worker,
            attempt=fault.attempt,
            workflow=pod.run.status.name,
            pod=pod.node.pod_name,
            started_at_s=started_at_s,
        )
        await self._strike(pod, index, fault)
        await asyncio.wait([pod.step.ended])
        if pod.step.ended.exception() is None:
            self._write(index, "ended", code=pod.step.ended.result())
        if fault.kind in ("cache", "checkpoint"):
            self._write(index, "damaged", what=self._damage(pod, fault))

    async def _is_due(self, pod: "Pod", fault: Fault) -> bool:
        """Waits for the fault's moment; False when the pod has ended before, or was asked to."""
        while done_fraction(pod.files.progress) < fault.at_progress:
            if not await self._lives_on(pod, PROGRESS_POLL_S):
                return False
        return await self._lives_on(pod, fault.after_s)

    async def _lives_on(self, pod: "Pod", seconds: float) -> bool:
        waited_for: set[asyncio.Future[Any]] = {pod.step.ended, pod.kill}
        done, _ = await asyncio.wait(waited_for, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return not done

    async def _strike(self, pod: "Pod", index: int, fault: Fault) -> None:
        client = pod.run.session.client
        if fault.kind == "delete":
            pod.delete()
        elif fault.kind == "notice":
            write_notice(pod.files.notice, time.time() + fault.seconds)
            if await self._lives_on(pod, fault.seconds):
                self._write(index, "killed")
                client.signal(pod.step, signal.SIGKILL)
        elif fault.kind == "freeze":
            client.signal(pod.step, signal.SIGSTOP)
            await self._lives_on(pod, fault.seconds)
            self._write(index, "released")
            client.signal(pod.step, signal.SIGCONT)
        elif fault.kind == "database":
            await asyncio.to_thread(chaos_damage.lock_database, self._surroundings.database, fault.seconds)
            self._write(index, "released")
        else:
            client.signal(pod.step, signal.SIGTERM if fault.kind == "sigterm" else signal.SIGKILL)

    def _damage(self, pod: "Pod", fault: Fault) -> str:
        if fault.kind == "checkpoint":
            run_id = pod.run.status.parameters["run"]
            return chaos_damage.truncate_partial_checkpoint(self._surroundings.store, run_id, fault.iteration)
        return chaos_damage.damage_cache(self._surroundings.cache, fault.damage)

    def _write(self, index: int, event: str, **details: Any) -> None:
        line = json.dumps({"fault": index, "event": event, "at_s": time.time(), **details}) + "\n"
        with explained_os_errors(f"can't write {self._log}"):
            descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)


@asynccontextmanager
async def disturbed(chaos: Chaos | None, pod: "Pod") -> AsyncIterator[None]:
    """The block during which a pod runs; left when its fault is over, too."""
    if chaos is None:
        yield
        return
    task = asyncio.create_task(chaos.disturb(pod))
    try:
        yield
    finally:
        if not pod.step.ended.done():
            task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


def target_of(pod: "Pod") -> tuple[str, int, int, int]:
    """(step, iteration, worker, attempt) as a plan names them; 0 and -1 where there is no iteration, no worker."""
    iteration = _number(pod.run.status.parameters, "iteration", 0)
    return pod.node.template, iteration, _number(pod.node.inputs, "worker", -1), pod.node.attempt


def _number(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name, "")
    return int(text) if text.isdecimal() else default


def done_fraction(progress: Path) -> float:
    """The largest N/M that the step has reported so far."""
    try:
        pairs = re.findall(r"^(\d+)/([1-9]\d*)$", progress.read_text(), re.MULTILINE)
    except FileNotFoundError:
        return 0.0
    return max((int(done) / int(total) for done, total in pairs), default=0.0)


def write_notice(path: Path, at_s: float) -> None:
    """As a cloud would tell it: the pod will be gone at this time. Whole or not there."""
    partial = path.with_suffix(".partial")
    with explained_os_errors(f"can't write {path}"):
        partial.write_text(json.dumps({"reason": "chaos", "kind": "stop", "at": at_s}))
        partial.replace(path)
