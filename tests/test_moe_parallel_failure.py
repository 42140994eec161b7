import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from moe.config import MoeConfig
from moe.dispatch.failure import LostRanks
from moe.dispatch.monitor import ExchangeFailed
from moe.gradient_sync import GradientSync
from moe.update import PolicyTrainer
from tests.parallel_updates import Case, finish, layout_of, trainer_of
from tests.ranks import run_ranks

SHARDED = Case(moe=MoeConfig(dispatcher="all_to_all", expert_parallel_size=2), fsdp_size=4)


def update_until(rank: int, world_size: int, case: Case, owner: Any, method: str, sent: signal.Signals) -> str:
    """What a survivor says when rank 1 sends `sent` to itself at its second call of `method`."""
    original, calls = getattr(owner, method), 0

    def stop(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 2:
            os.kill(os.getpid(), sent)
        return original(*arguments, **keywords)

    setattr(owner, method, stop)
    layout, store = layout_of(case, world_size), dist.distributed_c10d._get_default_store()
    LostRanks(store, rank, range(world_size), layout.expert_group.monitor, grace_s=2.0)
    trainer = trainer_of(case, layout, case.moe)
    store.set(f"pid {rank}", str(os.getpid()))
    with pytest.raises(ExchangeFailed) as failed:
        finish(trainer, case)
    if rank == 0:  # a stopped process would never end
        os.kill(int(store.get("pid 1")), signal.SIGKILL)
    return str(failed.value)


@pytest.mark.parametrize(
    ("case", "owner", "method", "place"),
    [
        (Case(), GradientSync, "sum_replicas", "optimizer step 2, sum of gradients: rank 1 is gone"),
        (SHARDED, GradientSync, "norm", "optimizer step 2, norm of gradients: rank 1 is gone"),
        (SHARDED, PolicyTrainer, "_accumulate_gradients", "optimizer step 2, forward and backward passes: rank 1"),
    ],
)
def test_survivors_of_a_killed_rank_name_it_the_step_and_the_phase(
    case: Case, owner: Any, method: str, place: str
) -> None:
    messages = run_ranks(4, update_until, case, owner, method, signal.SIGKILL, may_die=(1,))
    for message in messages[:1] + messages[2:]:
        assert message.startswith(place), message


def test_survivors_of_a_hanging_rank_do_not_wait_longer_than_the_timeout() -> None:
    case = Case(moe=MoeConfig(exchange_timeout_s=2.0))
    arguments = (replace(case, fsdp_size=1), GradientSync, "sum_replicas", signal.SIGSTOP)
    messages = run_ranks(2, update_until, *arguments, may_die=(1,), timeout_s=60.0)
    assert messages[0].startswith("optimizer step 2, sum of gradients: rank 1 is gone or stopped")
