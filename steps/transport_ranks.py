"""The ranks of `steps.transport_probe`: torchrun's, or forked here from a process that has loaded all they need."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from moe.config import MoeConfig
from moe.dispatch.monitor import ExchangeFailed
from moe.parallel import ParallelLayout
from moe.transport.probe import run_probe
from moe.transport.probe_exchange import ProbeShape
from steps.errors import ConfigError, Interrupted, StepError
from steps.gang import Member, joined, member_of_environment, run_local_ranks

Finish = Callable[[Mapping[str, Any], bool], int]
"""Gets the report, and whether this is the rank that prints it; returns the exit code."""


def run_probe_ranks(
    moe: MoeConfig,
    shape: Mapping[str, Any],
    repeats: int,
    ranks: int,
    finish: Finish,
    explain: Callable[[StepError], None],
) -> int:
    """The exit code; under torchrun that of this rank, else that of all `ranks` forked here.

    `shape` are the arguments of ProbeShape. `explain` tells the user an error; ranks that fail for the same reason say
    it once.
    """

    def rank(member: Member) -> int:
        torch.set_num_threads(1)
        try:
            report = _probe(member, moe, shape, repeats)
        except StepError as error:
            # Not asked when a rank is gone: the store may be as well, and each rank's line is its own.
            if isinstance(error, Interrupted) or _first_to_say(str(error)):
                explain(error)
            return error.exit_code
        return finish(report, member.rank == 0)

    def forked() -> None:
        member = member_of_environment()
        assert member is not None
        raise SystemExit(rank(member))

    member = member_of_environment()
    return run_local_ranks(ranks, forked) if member is None else rank(member)


def _probe(member: Member, moe: MoeConfig, shape: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    """This rank's part. Raises ConfigError for a limit or a missing library, Interrupted when a rank is gone."""
    with joined(member, moe.exchange_timeout_s) as world:
        device = torch.device("cuda", member.local_rank) if torch.cuda.is_available() else torch.device("cpu")
        try:
            layout = ParallelLayout.create(member.size, moe, fsdp_size=1, ranks_per_node=member.local_size)
            world.explain_failures_of(layout.expert_group.monitor)
            with layout.collective("transport probe"):
                return run_probe(moe, ProbeShape(**shape), layout.expert_group, device, repeats)
        except ExchangeFailed as error:
            raise Interrupted(f"rank {member.rank}: {error}") from None
        except ValueError as error:
            raise ConfigError(str(error)) from None


def _first_to_say(message: str) -> bool:
    """Whether no other rank has said this yet."""
    if not dist.is_initialized():
        return True
    try:
        return bool(dist.distributed_c10d._get_default_store().add(f"probe said {message}", 1) == 1)
    except dist.DistError:  # the rank that hosts the store has ended: better twice than not at all
        return True
