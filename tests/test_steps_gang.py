"""Gangs of local ranks: they meet, they stop together, and none outlives a failure."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe.dispatch.monitor import ExchangeFailed
from steps import gang
from steps.errors import ConfigError, ServiceUnavailable
from steps.interruption import Interruption
from tests.forked import Program
from tests.forked import start as fork

RANKS = 3
Body = Callable[[gang.Member], None]


def start(body: Body, *, grace_s: float = 20.0, before: Body | None = None) -> Program:
    """A launcher whose ranks do `before`, meet, and do `body`."""

    def rank_main() -> None:
        torch.set_num_threads(1)
        member = gang.member_of_environment()
        assert member is not None
        if before is not None:
            before(member)
        with gang.joined(member, timeout_s=60):
            body(member)

    def launch() -> int:
        gang.LOST_PEER_GRACE_S = grace_s
        return gang.run_local_ranks(RANKS, rank_main)

    return fork(launch)


def sleep(_member: gang.Member) -> None:
    time.sleep(1000)


def pid_of(folder: Path, rank: int) -> int:
    path = folder / f"pid-{rank}"
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    return int(path.read_text())


def wait_for(folder: Path, pattern: str, count: int) -> None:
    while len(list(folder.glob(pattern))) < count:
        time.sleep(0.01)


def stoppable(folder: Path, ending: Body = lambda member: None) -> Body:
    def body(member: gang.Member) -> None:
        interruption = Interruption()
        interruption.install()
        (folder / f"ready-{member.rank}").touch()
        while not interruption.requested:
            time.sleep(0.01)
        ending(member)
        sys.exit(75)

    return body


def test_ranks_meet_and_know_their_places() -> None:
    def body(member: gang.Member) -> None:
        total = torch.tensor([member.rank])
        dist.all_reduce(total)
        assert member == gang.Member(rank=dist.get_rank(), size=3, local_rank=dist.get_rank(), local_size=3)
        assert (total.item(), dist.get_world_size()) == (3, 3)

    assert start(body).finish() == (0, "")


def test_the_code_is_that_of_the_rank_that_failed_for_its_own_reason() -> None:
    def body(member: gang.Member) -> None:
        if member.rank == 1:
            sys.exit(78)
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError:
            sys.exit(75)

    assert start(body).finish() == (78, "")


def test_ranks_that_wait_for_one_that_failed_before_it_joined_are_not_waited_for() -> None:
    def fail(member: gang.Member) -> None:
        if member.rank == 0:
            sys.exit(69)

    assert start(sleep, grace_s=1000.0, before=fail).finish() == (69, "")


def test_rank_0_tells_the_others_and_hears_from_them() -> None:
    def body(member: gang.Member) -> None:
        assert gang.broadcast({"version": 3} if member.rank == 0 else None) == {"version": 3}
        assert gang.gather(member.rank * 2) == [0, 2, 4]

    assert start(body).finish() == (0, "")


def test_ranks_that_go_on_after_a_failure_are_killed() -> None:
    def body(member: gang.Member) -> None:
        if member.rank == 2:
            sys.exit(65)
        sleep(member)

    assert start(body, grace_s=0.2).finish() == (65, "")


def test_a_killed_rank_is_reported_as_its_signal(tmp_path: Path) -> None:
    def body(member: gang.Member) -> None:
        (tmp_path / f"pid-{member.rank}").write_text(str(os.getpid()))
        sleep(member)

    launcher = start(body, grace_s=0.2)
    os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
    assert launcher.finish() == (137, "")


def test_sigterm_reaches_every_rank_and_the_code_is_75(tmp_path: Path) -> None:
    launcher = start(stoppable(tmp_path))
    wait_for(tmp_path, "ready-*", RANKS)
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.finish() == (75, "")


def test_a_rank_that_stops_on_request_leaves_the_others_their_time(tmp_path: Path) -> None:
    def ending(member: gang.Member) -> None:
        if member.rank == 0:
            time.sleep(0.5)
        (tmp_path / f"ended-{member.rank}").touch()

    launcher = start(stoppable(tmp_path, ending), grace_s=0.0)
    wait_for(tmp_path, "ready-*", RANKS)
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.finish() == (75, "")
    assert len(list(tmp_path.glob("ended-*"))) == RANKS


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    def body(member: gang.Member) -> None:
        (tmp_path / f"pid-{member.rank}").write_text(str(os.getpid()))
        sleep(member)

    launcher = start(body)
    for rank in range(RANKS):
        pid_of(tmp_path, rank)
    os.kill(launcher.pid, signal.SIGKILL)
    assert launcher.finish() == (-signal.SIGKILL, "")


def test_ranks_are_not_left_behind_when_another_one_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start_rank = gang._Gang.start

    def start_two(self: gang._Gang, member: gang.Member, *arguments: object) -> None:
        if member.rank == 2:
            raise BlockingIOError(11, "no more processes")
        start_rank(self, member, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(gang._Gang, "start", start_two)
    code, output = start(sleep).finish()
    assert code == 1 and output.endswith("BlockingIOError: [Errno 11] no more processes\n")


def test_a_place_in_the_environment_is_complete_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert gang.member_of_environment() is None
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="MASTER_ADDR is missing"):
        gang.member_of_environment()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="LOCAL_RANK"):
        gang.member_of_environment()
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE = 'two'"):
        gang.member_of_environment()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert gang.member_of_environment() == gang.Member(rank=3, size=8, local_rank=1, local_size=2)
    for name, value in (("WORLD_SIZE", "3"), ("WORLD_SIZE", "7"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "0")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            with pytest.raises(ConfigError, match=f"{name} = {value}.*numbered one after the other"):
                gang.member_of_environment()


@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
def test_an_environment_without_nccls_watchdog_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    gang.check_nccl_environment()
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"environment variable {name} = 1: NCCL would have no watchdog"):
        gang.check_nccl_environment()


def test_more_ranks_than_gpus_on_a_node_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(gang.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gang.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gang.torch.cuda, "set_device", taken.append)
    with pytest.raises(ConfigError, match=r"train.ranks = 4: 4 ranks on a node with 2 GPU\(s\)"):
        gang.joined(gang.Member(size=4, local_size=4), 1.0).__enter__()
    with pytest.raises(SystemExit) as silent:
        gang.joined(gang.Member(rank=3, local_rank=3, size=4, local_size=4), 1.0).__enter__()
    assert silent.value.code == 78 and not taken


def test_a_rank_that_is_lost_while_all_meet_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(message: str) -> None:
        def fail(*_: object, **__: object) -> None:
            raise RuntimeError(message)

        monkeypatch.setattr(gang.dist, "init_process_group", fail)

    monkeypatch.setattr(gang, "rendezvous", lambda *_, **__: iter([(None, 0, 2)]))
    lose("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    with pytest.raises(ServiceUnavailable, match="rank 0 of 2 met no others at .* Connection closed by peer"):
        gang.joined(gang.Member(size=2), 1.0).__enter__()
    lose("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        gang.joined(gang.Member(size=2), 1.0).__enter__()


def test_a_rank_that_hangs_on_its_gpu_ends_as_one_to_be_run_again() -> None:
    lost = "optimizer step 2, metrics: rank 0 is gone or stopped"
    assert fork(lambda: gang._end_process(1, ExchangeFailed(lost))).finish() == (75, f"rank 1: {lost}\n")
