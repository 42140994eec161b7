from dataclasses import replace

import pytest
import torch

from moe.config import LossConfig, MoeConfig, SamplingConfig, UpdateConfig
from tests.parallel_updates import WALL_CLOCK, Case, Outcome, run_alone, run_cases, whole_state
from tests.ranks import run_ranks

WEIGHTS_ATOL = 1e-6
"""float32 weights after three optimizer steps of size 1e-2: what another order of summation leaves."""


def ep(size: int = 0, **fields: object) -> MoeConfig:
    return MoeConfig(dispatcher="all_to_all", expert_parallel_size=size, **fields)  # type: ignore[arg-type]


LAYOUTS = {
    2: {
        "EP2": Case(moe=ep()),
        "DP2": Case(),
        "FSDP2": Case(fsdp_size=2),
        "FSDP2xEP2": Case(moe=ep(), fsdp_size=2),
    },
    3: {"EP3": Case(moe=ep()), "FSDP3": Case(fsdp_size=0), "FSDP3xEP3": Case(moe=ep(), fsdp_size=3)},
    4: {
        "EP4": Case(moe=ep()),
        "EP2xDP2": Case(moe=ep(2)),
        "FSDP2xDP2": Case(fsdp_size=2),
        "FSDP2xEP2xDP2": Case(moe=ep(2), fsdp_size=2),
        "FSDP4xEP2": Case(moe=ep(2), fsdp_size=4),
        "FSDP2xEP4": Case(moe=ep(4), fsdp_size=2),
        "EP4 on two nodes": Case(moe=ep(deduplicate="node"), ranks_per_node=2),
    },
}
SMALL = UpdateConfig(optimizer_steps_per_epoch=3, micro_batch_tokens=40)


def compare(alone: Outcome, ranks: list[Outcome]) -> None:
    state = whole_state(ranks)
    assert state.keys() == alone.pieces.keys()
    for name, (_, _, tensor) in alone.pieces.items():
        torch.testing.assert_close(state[name], tensor, atol=WEIGHTS_ATOL, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    for outcome in ranks:
        for own, expected in zip([*outcome.steps, outcome.values], [*alone.steps, alone.values], strict=True):
            shared = {name: value for name, value in own.items() if not name.startswith(WALL_CLOCK)}
            for name in shared.keys() - {"moe/rank_imbalance", "moe/node_imbalance"}:
                assert shared[name] == pytest.approx(expected[name], rel=2e-4, abs=2e-6), name
        assert outcome.steps == ranks[0].steps and outcome.router_steps == ranks[0].router_steps
        assert outcome.expert_load_LE == alone.expert_load_LE


def compare_all(world_size: int, cases: dict[str, Case]) -> None:
    gangs = run_ranks(world_size, run_cases, list(cases.values()))
    for position, (name, case) in enumerate(cases.items()):
        try:
            compare(run_alone(case), [outcomes[position] for outcomes in gangs])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_three_steps_on_ranks_are_three_steps_alone(world_size: int) -> None:
    compare_all(world_size, LAYOUTS[world_size])


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_clip_is_by_the_norm_of_the_whole_model(world_size: int) -> None:
    compare_all(world_size, {name: replace(case, max_grad_norm=0.05) for name, case in LAYOUTS[world_size].items()})


def test_losses_that_need_the_whole_batch_are_those_of_one_process() -> None:
    losses = {
        "aux": Case(moe=ep(aux_loss_coefficient=0.05), update=SMALL),
        "aux in one pass": Case(moe=ep(aux_loss_coefficient=0.05), fsdp_size=2),
        "kl": Case(moe=ep(), loss=LossConfig(kl_coefficient=0.1), fsdp_size=2),
        "nucleus": Case(moe=ep(), sampling=SamplingConfig(max_new_tokens=6, top_p=0.9), update=SMALL),
        "gspo": Case(moe=ep(), loss=LossConfig(algorithm="gspo", entropy_coefficient=0.01), update=SMALL),
        "correction": Case(loss=LossConfig(algorithm="dapo", correction="tis"), fsdp_size=2, update=SMALL),
        "frozen router": Case(moe=ep(freeze_router=True), fsdp_size=2),
        "recorded routing": Case(moe=ep(routing_replay="trainer"), update=SMALL),
    }
    compare_all(2, losses)


def test_ranks_without_a_row_take_part() -> None:
    few = Case(moe=ep(2), groups=3, group_size=2, update=SMALL)
    compare_all(4, {"few rows": few, "sharded": replace(few, fsdp_size=4)})


def test_a_batch_without_any_contribution_leaves_the_weights_alone_on_every_rank() -> None:
    case = Case(moe=ep(), fsdp_size=2, equal_rewards=True)
    (alone, ranks) = run_alone(case), [outcomes[0] for outcomes in run_ranks(2, run_cases, [case])]
    compare(alone, ranks)
    assert ranks[0].router_steps == [] and all(step["actor/grad_norm"] == 0.0 for step in ranks[0].steps)
