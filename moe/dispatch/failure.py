"""Who is gone, when a collective between ranks fails.

On gloo a collective that fails raises where it was called. On NCCL it was only enqueued there: its failure is found by
torch's watchdog thread, which ends the process (SIGABRT) a minute later, while the main thread waits for the device.
TORCH_NCCL_BLOCKING_WAIT is no way out: it turns the watchdog off, and since torch 2.8 a collective that is not
asynchronous has no work to wait for, so that nothing would ever time out (ProcessGroupNCCL.cpp). Not yet run on NCCL.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from moe.dispatch.monitor import ExchangeFailed, ExchangeMonitor

_POLL_S = 0.4
_CONNECTION_ERRORS = (
    *("gloo", "timed out", "timeout", "connection", "socket", "nccl", "aborted"),
    "dispatch cpu wait",  # DeepEP 2
    "unspecified launch failure",  # a kernel of DeepEP or NCCL EP that has waited too long ends by a trap
)
"""Words, one of which is in every message of a backend that has lost a peer."""
_FAILED, _VERDICT = "moerl/lost_ranks/failed", "moerl/lost_ranks/verdict"


class LostRanks:
    """Diagnosis of a failed collective by way of the store that the ranks met at.

    The rank whose collective fails first asks in the store who is there. A thread of every rank answers, also while the
    rank waits in a collective that nobody will finish; it says whether the rank waits in one. Whoever has not answered
    within the grace is gone, or its process is stopped. The first verdict is everybody's. It is used once: the process
    groups are not usable afterwards, and a rank that is still waiting fails when the others end.

    With `end_process` the thread also looks for what NCCL's watchdogs have found. A rank whose main thread waits for
    the device can't raise an error, so the thread calls `end_process` with it, a grace after the verdict.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        monitor: ExchangeMonitor,
        *,
        grace_s: float = 5.0,
        store_rank: int | None = None,
        end_process: Callable[[ExchangeFailed], None] | None = None,
    ) -> None:
        """Starts the thread, and makes `monitor` explain its failures.

        `ranks` are all that take part, `rank` among them; `store_rank` is the one whose process serves the store (None:
        another process does). `end_process` is for ranks with NCCL.
        """
        cloneable: Any = store  # torch's stubs do not know it; a client of its own, as calls of one client wait in line
        self._store: Store = cloneable.clone()
        self._rank, self._ranks, self._monitor = rank, tuple(ranks), monitor
        self._grace_s, self._store_rank, self._end_process = grace_s, store_rank, end_process
        self._stopped = threading.Event()
        self._verdict = ""
        monitor.explain = self.explain
        threading.Thread(target=self._answer, name="lost-ranks", daemon=True).start()

    def stop(self) -> None:
        """End the thread: this rank does not answer any more."""
        self._stopped.set()

    def explain(self, error: Exception, place: str) -> Exception:
        """An ExchangeFailed of one line that names the lost ranks and `place`, within two grace periods and a second.

        An error that is not about a connection is a bug, and comes back as it is.
        """
        if not is_lost_connection(error):
            return error
        # A store whose process is stopped does not answer, and its client has no timeout.
        thread = threading.Thread(target=self._diagnose, daemon=True)
        thread.start()
        thread.join(2 * self._grace_s + 1.0)
        return self._failure(place, str(error).splitlines()[0][:200])

    def _failure(self, place: str, reason: str) -> ExchangeFailed:
        host = "its process" if self._store_rank is None else f"rank {self._store_rank}, which serves it,"
        verdict = self._verdict or f"the ranks' store does not answer: {host} is gone or stopped"
        return ExchangeFailed(f"{place}: {verdict} ({reason})")

    def _answer(self) -> None:
        fault = ""
        try:
            while not self._store.check([_FAILED]) and not fault:
                if self._stopped.wait(_POLL_S):
                    return
                fault = self._device_fault()
            self._store.set(_key("there", self._rank), self._place())
            if fault:
                self._diagnose()
            while not self._verdict and not self._store.check([_VERDICT]):
                if self._stopped.wait(_POLL_S):
                    return
            self._read_verdict()
        except RuntimeError:  # the process that serves the store is gone, which `_diagnose` finds as well
            if not fault:
                return
        # The main thread may have the error by itself, and then has more to do before the process ends.
        if self._end_process is not None and not self._stopped.wait(self._grace_s):
            place = self._monitor.place or f"optimizer step {self._monitor.step}, waiting for the device"
            self._end_process(self._failure(place, fault or "another rank's collective failed"))

    def _device_fault(self) -> str:
        return nccl_fault() if self._end_process is not None else ""

    def _place(self) -> str:
        """ "-" when this rank is surely in no collective: the host is ahead of what an accelerator still waits for."""
        return self._monitor.place or ("-" if self._end_process is None else "device")

    def _diagnose(self) -> None:
        try:
            self._store.set(_FAILED, "1")
            deadline_s = time.monotonic() + self._grace_s
            while self._absent("there") and time.monotonic() < deadline_s and not self._store.check([_VERDICT]):
                time.sleep(_POLL_S / 8)
            if not self._store.check([_VERDICT]):
                self._store.set(_VERDICT, self._judge(self._absent("there")))
            self._read_verdict()
            if self._rank == self._store_rank:  # the others must read it before this process ends
                deadline_s, present = time.monotonic() + self._grace_s, self._present()
                while present & self._absent("read") and time.monotonic() < deadline_s:
                    time.sleep(_POLL_S / 8)
        except RuntimeError:  # the process that serves the store is gone: `explain` says so if there is no verdict
            return

    def _judge(self, absent: set[int]) -> str:
        if absent:
            return f"{_names(absent)} gone or stopped"
        late = {rank for rank in self._ranks if self._store.get(_key("there", rank)) == b"-"}
        if late:
            return f"{_names(late)} alive but did not come to the exchange in time"
        return "the connection between ranks broke; all of them are alive"

    def _read_verdict(self) -> None:
        self._verdict = self._store.get(_VERDICT).decode()
        self._store.set(_key("read", self._rank), "1")

    def _absent(self, word: str) -> set[int]:
        return {rank for rank in self._ranks if not self._store.check([_key(word, rank)])}

    def _present(self) -> set[int]:
        return set(self._ranks) - self._absent("there")


def nccl_fault() -> str:
    """What the watchdogs of this process's NCCL groups have found (`nccl: TIMEOUT`); empty: nothing, or no NCCL."""
    device = torch.device("cuda")
    for group in list(dist.distributed_c10d._world.pg_map):
        backend: Any = group._get_backend(device) if device in group._device_types else None
        if backend is not None and backend.name() == "nccl" and (error := backend.get_error()).name != "SUCCESS":
            return f"nccl: {error.name}"
    return ""


def is_lost_connection(error: Exception) -> bool:
    """Whether a RuntimeError of torch.distributed says that a peer is gone or did not answer in time."""
    message = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in message for word in _CONNECTION_ERRORS)


def _names(ranks: set[int]) -> str:
    return f"rank {min(ranks)} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))} are"


def _key(word: str, rank: int) -> str:
    return f"moerl/lost_ranks/{word}/{rank}"
