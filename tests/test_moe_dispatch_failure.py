"""Real ranks that are killed or stopped in the middle of an exchange."""

import os
import re
import signal
import time
from datetime import timedelta
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe.dispatch import failure
from moe.dispatch.all_to_all import AllToAllDispatcher
from moe.dispatch.base import ExpertGroup
from moe.dispatch.exchange import Peers
from moe.dispatch.failure import LostRanks, is_lost_connection, nccl_fault
from moe.dispatch.monitor import ExchangeFailed, ExchangeMonitor
from tests.ranks import run_ranks

torch.set_num_threads(1)
LOST, GRACE_S, STEP, LAYER = 1, 1.0, 7, 3
EXCHANGES = {"dispatch": 1, "combine": 2, "combine backward": 3, "dispatch backward": 4}
"""Which call of `Peers.swap` moves the rows of a phase; the one before them moves the routes."""


def _watched(rank: int, world_size: int, timeout_s: float) -> tuple[ExpertGroup, LostRanks]:
    process_group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    monitor = ExchangeMonitor(step=STEP, layer=LAYER)
    store = dist.distributed_c10d._get_default_store()
    lost_ranks = LostRanks(store, rank, range(world_size), monitor, grace_s=GRACE_S)
    return ExpertGroup(process_group=process_group, rank=rank, size=world_size, monitor=monitor), lost_ranks


def _end_at(exchange: int, with_signal: signal.Signals) -> None:
    """Make this process end, or stop, at its n-th exchange of rows."""
    swap, calls = Peers.swap, iter(range(1_000_000))

    def counted(self: Peers, *arguments: Any) -> None:
        if next(calls) == exchange:
            os.kill(os.getpid(), with_signal)
        swap(self, *arguments)

    Peers.swap = counted  # type: ignore[method-assign]


def _step(group: ExpertGroup) -> Tensor:
    """Forward and backward pass of one layer; every rank sends to every other."""
    dispatcher = AllToAllDispatcher(group)
    hidden_TH = torch.randn(8, 4).requires_grad_()
    ids_TK = torch.arange(16).view(8, 2) % group.size
    dispatched = dispatcher.dispatch(hidden_TH, ids_TK, torch.ones(8, 2).requires_grad_(), group.size)
    output_TH = dispatcher.combine(dispatched.rows_SH * 2, dispatched)
    output_TH.sum().backward()
    return output_TH


def _survive(rank: int, world_size: int, exchange: int, with_signal: signal.Signals, timeout_s: float) -> Any:
    group, _ = _watched(rank, world_size, timeout_s)
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    _step(group)  # a whole pass succeeds first
    if rank == LOST:
        _end_at(exchange, with_signal)
    started_s = time.monotonic()
    try:
        _step(group)
    except ExchangeFailed as error:
        return str(error), time.monotonic() - started_s
    finally:
        time.sleep(GRACE_S)  # the others diagnose too, before the stopped rank is removed
        if rank == 0 and with_signal == signal.SIGSTOP:
            os.kill(pids[LOST], signal.SIGKILL)
    return "nothing failed", 0.0


@pytest.mark.parametrize("phase", EXCHANGES)
def test_survivors_name_a_killed_rank_and_where_it_was_lost(phase: str) -> None:
    results = run_ranks(3, _survive, EXCHANGES[phase], signal.SIGKILL, 60.0, may_die=(LOST,))
    for rank in (0, 2):
        message, seconds = results[rank]
        assert re.match(f"optimizer step 7, layer 3, {phase}: rank 1 is gone or stopped [(].*[)]$", message), message
        assert seconds < 30


def test_survivors_name_a_stopped_rank_after_the_timeout() -> None:
    results = run_ranks(3, _survive, EXCHANGES["combine"], signal.SIGSTOP, 1.0, may_die=(LOST,))
    for rank in (0, 2):
        message, seconds = results[rank]
        assert "optimizer step 7, layer 3, combine: rank 1 is gone or stopped" in message
        assert seconds < 30


def _late(rank: int, world_size: int) -> str:
    group, _ = _watched(rank, world_size, 1.0)
    if rank == LOST:
        time.sleep(4)
        return ""
    with pytest.raises(ExchangeFailed) as failure:
        _step(group)
    return str(failure.value)


def test_a_rank_that_is_alive_and_does_not_come_is_told_from_a_dead_one() -> None:
    results = run_ranks(2, _late)
    assert "dispatch: rank 1 is alive but did not come to the exchange in time" in results[0]


def _all_reduce(rank: int, world_size: int) -> str:
    """A ring: not every survivor is a neighbour of the lost rank."""
    group, lost_ranks = _watched(rank, world_size, 60.0)
    values = torch.ones(1000)
    dist.all_reduce(values, group=group.process_group)
    if rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    group.monitor.place = "gradients"
    try:
        dist.all_reduce(values, group=group.process_group)
    except RuntimeError as error:
        return str(lost_ranks.explain(error, "optimizer step 7, gradients"))
    return "nothing failed"


def test_any_collective_can_be_explained_and_waiting_ranks_are_not_blamed() -> None:
    results = run_ranks(4, _all_reduce, may_die=(LOST,))
    for rank in (0, 2, 3):
        assert results[rank].startswith("optimizer step 7, gradients: rank 1 is gone or stopped ("), results[rank]


def _without_store(rank: int, world_size: int) -> str:
    monitor = ExchangeMonitor()
    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, world_size=1, is_master=False, wait_for_workers=False)
    lost_ranks = LostRanks(client, rank, range(2), monitor, grace_s=GRACE_S, store_rank=1)
    lost_ranks.stop()
    del store
    return str(lost_ranks.explain(RuntimeError("Connection closed by peer"), "optimizer step 1, gradients"))


def test_without_the_store_the_rank_that_serves_it_is_named() -> None:
    message = run_ranks(1, _without_store)[0]
    assert "the ranks' store does not answer: rank 1, which serves it, is gone or stopped" in message


@pytest.mark.parametrize(
    "message",
    [
        "DeepEP error: CPU recv timeout",
        "DeepEP error: timeout (dispatch CPU)",
        "DeepEP error (csrc/elastic/buffer.hpp:1063): Dispatch CPU wait, rank: 0",
        "CUDA error: unspecified launch failure",
    ],
)
def test_what_the_libraries_raise_for_a_lost_rank_is_known(message: str) -> None:
    assert is_lost_connection(RuntimeError(message))


def test_a_bug_is_not_taken_for_a_lost_rank() -> None:
    bug = RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")
    assert not is_lost_connection(bug)
    lost_ranks = LostRanks(dist.HashStore(), 0, [0], ExchangeMonitor())
    assert lost_ranks.explain(bug, "optimizer step 1, layer 0, dispatch") is bug
    lost_ranks.stop()


def _hanging_device(rank: int, world_size: int) -> str:
    """As on NCCL: the main thread waits for the device, and only one rank's watchdog has found something."""
    ended: SimpleQueue[str] = SimpleQueue()
    monitor = ExchangeMonitor(step=STEP)
    monitor.place = "" if rank == 0 else f"optimizer step {STEP}, layer {LAYER}, combine"
    failure.nccl_fault = lambda: "nccl: TIMEOUT" if rank == 0 else ""
    LostRanks(
        dist.distributed_c10d._get_default_store(),
        rank,
        range(world_size),
        monitor,
        grace_s=GRACE_S,
        end_process=lambda error: ended.put(str(error)),
    )
    dist.barrier()
    if rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    message = ended.get(timeout=60)
    time.sleep(GRACE_S)  # the store is served by rank 0 until the others have read the verdict
    return message


def test_ranks_that_hang_on_the_device_are_ended_with_the_name_of_the_lost_rank() -> None:
    results = run_ranks(3, _hanging_device, may_die=(LOST,))
    waiting = "optimizer step 7, waiting for the device: rank 1 is gone or stopped (nccl: TIMEOUT)"
    assert results[0] == waiting
    combine = "optimizer step 7, layer 3, combine: rank 1 is gone or stopped (another rank's collective failed)"
    assert results[2] == combine


@pytest.mark.parametrize(
    ("error", "fault"), [("SUCCESS", ""), ("TIMEOUT", "nccl: TIMEOUT"), ("COMM_ERROR", "nccl: COMM_ERROR")]
)
def test_a_fault_of_nccl_is_read_from_its_groups(error: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        _device_types = (torch.device("cuda"),)

        def __init__(self, name: str, error: str) -> None:
            self.name, self.error = name, error

        def _get_backend(self, _: torch.device) -> Any:
            return SimpleNamespace(get_error=lambda: SimpleNamespace(name=self.error), name=lambda: self.name)

    groups = dist.distributed_c10d._world.pg_map
    monkeypatch.setitem(groups, Group("gloo", "not supported"), ("gloo", None))  # type: ignore[arg-type]
    monkeypatch.setitem(groups, Group("nccl", error), ("nccl", None))  # type: ignore[arg-type]
    assert nccl_fault() == fault
