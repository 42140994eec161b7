"""Ranks that train together: who this process is among them, and a launcher for ranks on one machine.

On a cluster, torchrun starts the ranks and tells each its place through the environment (RANK, WORLD_SIZE, ...).
Without that, `run_local_ranks` forks them from the running process, so that they share what it has imported already,
and sets the same variables. Either way a rank then calls `joined`.
"""

import ctypes
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from moe.dispatch.failure import LostRanks, is_lost_connection
from moe.dispatch.monitor import ExchangeFailed, ExchangeMonitor
from steps.errors import ConfigError, Interrupted, ServiceUnavailable, StepError

LOST_PEER_GRACE_S = 15.0
"""How long ranks may go on after another one failed: enough to say who is missing, then they are killed."""
TOLD_WITHIN_S = 2.0
"""How long a rank that lost another one waits for a word about why."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""torchrun's variable: whoever started the ranks serves the store that they meet at, not rank 0."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """The place of a process in its gang; consecutive ranks, `local_size` at a time, are on one node."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def member_of_environment() -> Member | None:
    """This process's place as torchrun's variables tell it; None when there are none.

    Raises ConfigError naming the variable that is missing, no whole number, or at odds with the others.
    """
    if "RANK" not in os.environ:
        return None
    if not os.environ.get("MASTER_ADDR"):
        raise ConfigError("environment variable MASTER_ADDR is missing: RANK is set, so torchrun must set this too")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    values = {name: os.environ.get(name, "") for name in names}
    for name, value in values.items():
        if not value.isdecimal():
            raise ConfigError(f"environment variable {name} = {value!r}: RANK is set, so torchrun must set this too")
    rank, size, local_rank, local_size, _ = (int(value) for value in values.values())
    if rank >= size or local_size == 0 or size % local_size or rank % local_size != local_rank:
        told = ", ".join(f"{name} = {value}" for name, value in values.items() if name != "MASTER_PORT")
        raise ConfigError(f"{told}: every node must have LOCAL_WORLD_SIZE ranks, numbered one after the other")
    return Member(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


class World:
    """The ranks that have met, seen from one of them."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        # torchrun and our launcher serve the store themselves; otherwise rank 0 does.
        store_rank = None if os.environ.get(_AGENT_STORE) == "True" else 0
        end_process = partial(_end_process, rank) if torch.cuda.is_available() else None
        self._diagnose = partial(LostRanks, store, rank, range(size), store_rank=store_rank, end_process=end_process)
        self._diagnosis: LostRanks | None = None

    def explain_failures_of(self, monitor: ExchangeMonitor) -> None:
        """From now on, what fails between the ranks is told with the names of those that are gone. Call it once."""
        self._diagnosis = self._diagnose(monitor)

    def leave(self) -> None:
        """Part in good order, with the others still there."""
        if self._diagnosis is not None:
            self._diagnosis.stop()
        dist.destroy_process_group()


class RankFailed(StepError):
    """Another rank failed for a reason of its own: this one ends with that rank's code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _Failures:
    """What ranks leave in the store that they met at about why they end."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def tell(self, code: int, reason: str) -> None:
        word = json.dumps([code, reason])
        _within(TOLD_WITHIN_S, lambda: self._store.set(_failed_key(self._rank), word))

    def told(self, loss: str) -> RankFailed | None:
        """The lowest other rank's, as soon as there is one; `loss` is what is known of one that had no last word."""
        found: list[RankFailed] = []

        def ask() -> None:
            deadline_s = time.monotonic() + TOLD_WITHIN_S
            others = [rank for rank in range(self._size) if rank != self._rank]
            while not found and time.monotonic() < deadline_s:
                for rank in [rank for rank in others if self._store.check([_failed_key(rank)])][:1]:
                    code, reason = json.loads(self._store.get(_failed_key(rank)))
                    found.append(RankFailed(f"rank {rank}: {reason}" if reason else loss, code))
                time.sleep(0.02)

        _within(TOLD_WITHIN_S, ask)
        return found[0] if found else None


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Do it, but wait no longer: the client of a store whose process is stopped has no timeout of its own."""

    def act() -> None:
        with suppress(RuntimeError):  # the process that serves the store is gone
            action()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)


_failures: _Failures | None = None


def tell_failure(code: int, reason: str) -> None:
    """Let the other ranks know why this one ends, if they have met."""
    if _failures is not None:
        _failures.tell(code, reason)


def told_failure(loss: ExchangeFailed) -> RankFailed | None:
    """Why the rank ended that `loss` is about; None when nobody knows."""
    return None if _failures is None else _failures.told(str(loss))


@contextmanager
def joined(member: Member, timeout_s: float) -> Iterator[World]:
    """Be a rank of the torch.distributed world of `member.size` processes inside the block.

    Collectives of CPU tensors use gloo, of GPU tensors NCCL; a rank waits at most `timeout_s` for the others. Raises
    ServiceUnavailable when they don't meet, and ConfigError for fewer GPUs than ranks on this node (if it has any) and
    for an environment in which NCCL would wait forever.
    """
    on_gpu, timeout = torch.cuda.is_available(), timedelta(seconds=timeout_s)
    if on_gpu:
        check_nccl_environment()
        _take_gpu(member)
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        store.set(_joined_key(rank), "")
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0]
        raise ServiceUnavailable(f"rank {member.rank} of {member.size} met no others at {where}: {reason}") from None
    global _failures
    _failures = _Failures(store, rank, size)
    world = World(store, rank, size)
    yield world
    world.leave()  # not after an error: the others may be gone, and the process ends anyway


def _take_gpu(member: Member) -> None:
    """A GPU of its own for each rank of a node."""
    gpus = torch.cuda.device_count()
    if member.local_size <= gpus:
        torch.cuda.set_device(member.local_rank)
    elif member.local_rank == 0:
        raise ConfigError(
            f"train.ranks = {member.size}: {member.local_size} ranks on a node with {gpus} GPU(s); start at most one "
            "for each, or set CUDA_VISIBLE_DEVICES to nothing to train on CPUs"
        )
    else:
        raise SystemExit(ConfigError.exit_code)  # local rank 0 says why


def check_nccl_environment() -> None:
    """Raise ConfigError when a variable turns off the watchdog that notices lost ranks (see `moe.dispatch.failure`)."""
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if os.environ.get(name, "0").lower() not in ("", "0", "n", "no", "f", "false"):
            raise ConfigError(
                f"environment variable {name} = {os.environ[name]}: NCCL would have no watchdog, and wait forever for "
                "a lost rank; unset it"
            )


def _end_process(rank: int, failure: ExchangeFailed) -> None:
    """For a rank that hangs in the driver: what `main` would do, without it. The ledger's entry stays open."""
    print(f"rank {rank}: {failure}", file=sys.stderr, flush=True)
    os._exit(Interrupted.exit_code)


def broadcast(value: Any) -> Any:
    """Rank 0's `value`, on every rank of the world (this process alone: its own)."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def gather(value: Any) -> list[Any]:
    """The `value` of every rank of the world, in order of the ranks, on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def run_local_ranks(size: int, body: Callable[[], None]) -> int:
    """Run `body` in `size` forked ranks of this machine; the exit code of all of them together.

    Call it while this process has no other thread and no open connection. SIGTERM and SIGINT go on to the ranks. When
    one fails, the others get LOST_PEER_GRACE_S. The result is 0, 75 when the ranks were asked to stop, or else the code
    of the rank that failed for its own reason (128 + n when signal n killed it).
    """
    gang = _Gang()
    with socket.create_server(("127.0.0.1", 0)) as rendezvous, gang.supervised():
        for rank in range(size):
            gang.start(Member(rank=rank, size=size, local_rank=rank, local_size=size), rendezvous, body)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        # After the forks, because the store's server has a thread.
        store = TCPStore(
            "127.0.0.1",
            rendezvous.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=rendezvous.detach(),
        )
        return gang.wait(store)


class _Gang:
    """The parent's view of its ranks."""

    def __init__(self) -> None:
        self.ranks: list[BaseProcess] = []
        self.stopping = False
        self._inherited: dict[signal.Signals, Any] = {}

    @contextmanager
    def supervised(self) -> Iterator[None]:
        """Pass stop signals on to the ranks inside the block, and leave none of them running after it.

        The signals are blocked first, until the caller has started all ranks.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self._inherited = {number: signal.signal(number, self._forward) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for process in self.ranks:
                process.kill()
                process.join()
            for number, handler in self._inherited.items():
                signal.signal(number, handler)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.stopping = True
        for process in self.ranks:
            if process.pid is not None and process.exitcode is None:
                with suppress(ProcessLookupError):  # it has ended, and this handler interrupts the code that notes so
                    os.kill(process.pid, number)

    def start(self, member: Member, rendezvous: socket.socket, body: Callable[[], None]) -> None:
        port = rendezvous.getsockname()[1]

        def rank_main() -> None:
            _die_with(parent_pid)
            rendezvous.close()
            for number, handler in self._inherited.items():
                signal.signal(number, handler)
            os.environ.update(_environment(member, port))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            body()

        parent_pid = os.getpid()
        process = get_context("fork").Process(target=rank_main, name=f"rank {member.rank}")
        process.start()
        self.ranks.append(process)

    def wait(self, store: TCPStore) -> int:
        """Until all have ended; `run_local_ranks` says what the result means."""
        running = dict(enumerate(self.ranks))
        own_codes: list[int] = []
        deadline_s = math.inf
        while running and time.monotonic() < deadline_s:
            left_s = None if deadline_s == math.inf else deadline_s - time.monotonic()
            connection.wait([process.sentinel for process in running.values()], left_s)
            for rank in [rank for rank, process in running.items() if process.exitcode is not None]:
                code = shell_code(running.pop(rank).exitcode or 0)
                own_codes.append(code)
                if self._is_failure(code):
                    if not self.stopping and code != Interrupted.exit_code and not store.check([_failed_key(rank)]):
                        store.set(_failed_key(rank), json.dumps([code, ""]))  # it was killed: it had no last word
                    # Nobody has more to say about a rank that never came than that rank itself.
                    grace_s = LOST_PEER_GRACE_S if store.check([_joined_key(rank)]) else 0.0
                    deadline_s = min(deadline_s, time.monotonic() + grace_s)
        return self._result(own_codes)

    def _is_failure(self, code: int) -> bool:
        """When all were asked to stop, one that has done so leaves the others as long as they need."""
        return code != 0 and not (self.stopping and code == Interrupted.exit_code)

    def _result(self, codes: Sequence[int]) -> int:
        """`codes` in the order in which the ranks ended by themselves."""
        stopped = {Interrupted.exit_code} | ({128 + number for number in STOP_SIGNALS} if self.stopping else set())
        failures = [code for code in codes if code not in stopped and code != 0]
        if failures:
            return failures[0]
        return Interrupted.exit_code if any(codes) else 0


def _joined_key(rank: int) -> str:
    return f"moerl/joined/{rank}"


def _failed_key(rank: int) -> str:
    return f"moerl/failed/{rank}"


def _environment(member: Member, port: int) -> dict[str, str]:
    """What torchrun would set. The loopback interface is named because gloo else takes the address of the host name.

    Huge pages (where the system leaves them to programs) make torch's large temporaries several times cheaper to touch.
    """
    values = {
        "RANK": str(member.rank),
        "WORLD_SIZE": str(member.size),
        "LOCAL_RANK": str(member.local_rank),
        "LOCAL_WORLD_SIZE": str(member.local_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        _AGENT_STORE: "True",
    }
    defaults = {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0", "THP_MEM_ALLOC_ENABLE": "1"}
    return values | {name: os.environ.get(name, value) for name, value in defaults.items()}


def _die_with(parent_pid: int) -> None:
    """The kernel kills this process when its parent ends, even by SIGKILL (Linux; elsewhere a no-op)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(128 + signal.SIGKILL)


def shell_code(exitcode: int) -> int:
    """128 + n for death by signal n, as Kubernetes shows it."""
    return exitcode if exitcode >= 0 else 128 - exitcode
