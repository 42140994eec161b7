"""Gangs of real ranks for tests: forked processes with a gloo process group."""

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120.0


class RankFailed(AssertionError):
    """A rank raised (its traceback is in the message), died, or did not end in time."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = TIMEOUT_S,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """Call `function(rank, world_size, *arguments)` in `world_size` forked ranks; what each returned, in rank order.

    The ranks find each other through a file. A rank in `may_die` may end without a result (None stands for it).
    """
    context = get_context("fork")
    with TemporaryDirectory() as folder:
        rendezvous = Path(folder) / "rendezvous"
        ranks: list[tuple[BaseProcess, Connection]] = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, world_size, rendezvous, sender, function, arguments))
            process.start()
            sender.close()
            ranks.append((process, receiver))
        try:
            return [_result(rank, *entry, timeout_s, rank in may_die) for rank, entry in enumerate(ranks)]
        finally:
            for process, receiver in ranks:
                if process.is_alive():
                    os.kill(process.pid or 0, signal.SIGKILL)
                process.join()
                receiver.close()


def _rank(
    rank: int,
    world_size: int,
    rendezvous: Path,
    sender: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        outcome = (True, function(rank, world_size, *arguments))
    except BaseException:
        outcome = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()
    os._exit(0)  # no exit functions of the test process, and no wait for a peer that is gone


def _result(rank: int, process: BaseProcess, receiver: Connection, timeout_s: float, may_die: bool) -> Any:
    if not wait([receiver], timeout_s):
        raise RankFailed(f"rank {rank} did not end within {timeout_s:g} s")
    try:
        succeeded, value = pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join()
        if may_die:
            return None
        raise RankFailed(f"rank {rank} died with exit code {process.exitcode}") from None
    if not succeeded:
        raise RankFailed(f"rank {rank} raised:\n{value}")
    return value
