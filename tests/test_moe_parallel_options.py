from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moe.config import LossConfig, ModelConfig, MoeConfig, SamplingConfig, UpdateConfig
from moe.families import FAMILIES
from moe.parallel import ParallelLayout
from tests.parallel_updates import (
    SIZES,
    Case,
    Outcome,
    alone,
    finish,
    layout_of,
    run_alone,
    run_cases,
    trainer_of,
    whole_state,
)
from tests.ranks import run_ranks

EP2 = MoeConfig(dispatcher="all_to_all", expert_parallel_size=2)
FOUR_WAYS = {
    "EP2xDP2": Case(moe=EP2),
    "FSDP4xEP2": Case(moe=EP2, fsdp_size=4),
    "FSDP2xDP2": Case(fsdp_size=2),
}
DEEPSEEK = ModelConfig(
    family="deepseek_v3",
    hidden_size=32,
    num_experts=12,
    moe_intermediate_size=16,
    num_expert_groups=4,
    num_groups_per_token=2,
    initializer_range=0.3,
)


def assert_close(outcomes: Sequence[Outcome], expected: dict[str, Tensor], atol: float) -> None:
    state = whole_state(outcomes)
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def state_alone(case: Case) -> dict[str, Tensor]:
    return {name: tensor for name, (_, _, tensor) in run_alone(case).pieces.items()}


def run_on(world_size: int, cases: Sequence[Case]) -> list[list[Outcome]]:
    """For each case what its ranks have."""
    gangs = run_ranks(world_size, run_cases, list(cases))
    return [[outcomes[position] for outcomes in gangs] for position in range(len(cases))]


def test_every_family_trains_sharded_and_expert_parallel() -> None:
    sizes = replace(DEEPSEEK, num_expert_groups=1, num_groups_per_token=1)
    cases = [Case(moe=EP2, fsdp_size=2, model=replace(sizes, family=cast(Any, family))) for family in FAMILIES]
    for case, outcomes in zip(cases, run_on(2, cases), strict=True):
        assert_close(outcomes, state_alone(case), 5e-6)


def test_tied_weights_are_one_weight_on_every_layout() -> None:
    case = Case(moe=EP2, fsdp_size=2, tied=True)
    (outcomes,) = run_on(2, [case])
    expected = state_alone(case)
    assert "model.lm_head.weight" not in expected
    assert_close(outcomes, expected, 1e-6)


def test_the_balancing_bias_moves_by_the_counts_of_all_ranks() -> None:
    base = Case(moe=replace(EP2, bias_update_rate=0.01), model=DEEPSEEK, fsdp_size=2)
    (outcomes,) = run_on(2, [base])
    expected = state_alone(base)
    assert_close(outcomes, expected, 1e-5)
    biases = {name: tensor for name, tensor in expected.items() if name.endswith("e_score_correction_bias")}
    assert biases and all(float(bias.abs().max()) == pytest.approx(0.03, rel=1e-3) for bias in biases.values())


def test_ranks_whose_experts_get_no_token_keep_in_step() -> None:
    cases = [replace(case, idle_experts=True) for case in FOUR_WAYS.values()]
    for case, outcomes in zip(cases, run_on(4, cases), strict=True):
        assert_close(outcomes, state_alone(case), 1e-6)


def test_fewer_experts_than_shards_are_divided_evenly() -> None:
    sizes = ModelConfig(hidden_size=16, num_attention_heads=2, num_key_value_heads=1, num_experts=2)
    sizes = replace(sizes, num_experts_per_token=1, moe_intermediate_size=16, initializer_range=0.3)
    cases = [Case(fsdp_size=4, model=replace(sizes, family=cast(Any, family))) for family in ("qwen3_moe", "gpt_oss")]
    for case, outcomes in zip(cases, run_on(4, cases), strict=True):
        assert_close(outcomes, state_alone(case), 1e-6)
        held = [
            sum(tensor.numel() for name, (_, _, tensor) in outcome.pieces.items() if ".exp_avg" in name)
            for outcome in outcomes
        ]
        assert max(held) < 1.2 * min(held)


def test_the_samplers_routing_is_replayed_on_ranks() -> None:
    cases = [
        Case(moe=replace(EP2, routing_replay="sampler"), routed_by_sampler=True, sampling=SamplingConfig(top_p=0.9)),
        Case(moe=MoeConfig(routing_replay="sampler"), routed_by_sampler=True, fsdp_size=2),
    ]
    for case, outcomes in zip(cases, run_on(2, cases), strict=True):
        assert_close(outcomes, state_alone(case), 1e-6)
        assert outcomes[0].values["moe/replayed_share"] > 0.5
        assert not torch.equal(
            state_alone(case)["model.lm_head.weight"],
            state_alone(replace(case, moe=replace(case.moe, routing_replay="none")))["model.lm_head.weight"],
        )


def test_a_batch_without_routing_can_not_be_replayed() -> None:
    with pytest.raises(ValueError, match=r'moe\.routing_replay = "sampler": the batch carries no routing'):
        run_alone(Case(moe=MoeConfig(routing_replay="sampler")))


def resume(rank: int, world_size: int, case: Case, stored: dict[str, Tensor], progress: dict[str, Any]) -> Outcome:
    return go_on(case, layout_of(case, world_size), case.moe, stored, progress)


def go_on(
    case: Case, layout: ParallelLayout, moe: MoeConfig, stored: dict[str, Tensor], progress: dict[str, Any]
) -> Outcome:
    trainer = trainer_of(case, layout, moe, seed=5)
    for name, piece in trainer.prepare_load({name: tuple(tensor.shape) for name, tensor in stored.items()}).items():
        box = tuple(slice(at, at + size) for at, size in zip(piece.offset, piece.tensor.shape, strict=True))
        piece.tensor.copy_(stored[name][box])
    trainer.restore_progress(progress)
    return finish(trainer, replace(case, stop_after=0))


def interrupted(rank: int, world_size: int, case: Case) -> tuple[Outcome, dict[str, Any]]:
    trainer = trainer_of(case, layout_of(case, world_size), case.moe)
    return finish(trainer, case), trainer.progress()


@pytest.mark.parametrize("replay", ["none", "trainer"])
def test_a_batch_stopped_on_one_layout_goes_on_on_another(replay: Any) -> None:
    moe = replace(EP2, routing_replay=replay, aux_loss_coefficient=0.01)
    case = Case(moe=moe, fsdp_size=2, loss=LossConfig(algorithm="dapo", correction="tis"), stop_after=2)
    parts = run_ranks(2, interrupted, case)
    progress = parts[0][1]
    assert all(own == progress for _, own in parts) and len(progress["batch_history"]) == 2
    stored = whole_state([outcome for outcome, _ in parts])
    expected = {name: tensor for name, (_, _, tensor) in run_alone(replace(case, stop_after=0)).pieces.items()}
    wider = replace(case, moe=replace(moe, expert_parallel_size=4), fsdp_size=1)
    assert_close(run_ranks(4, resume, wider, stored, progress), expected, 1e-6)
    assert_close([go_on(case, ParallelLayout.single(), alone(case), stored, progress)], expected, 1e-6)
    straight = whole_state(run_on(2, [replace(case, stop_after=0)])[0])
    again = whole_state(run_ranks(2, resume, case, stored, progress))
    assert all(torch.equal(again[name], tensor) for name, tensor in straight.items())


def test_what_a_step_says_about_the_exchange() -> None:
    (outcomes,) = run_on(2, [Case(moe=EP2, ranks_per_node=1)])
    first = outcomes[0].router_steps[0]
    assert first["step"] == 1 and len(first["layers"]) == 2
    for layer in first["layers"]:
        assert layer["sent_bytes"] == layer["sent_off_node_bytes"] > 0
        assert layer["exchange_s"] > 0 and 0 < layer["exchange_share"] <= 1
        assert 1.0 <= layer["rank_imbalance"] == layer["node_imbalance"] <= 2.0
    step = outcomes[0].steps[0]
    assert step["moe/sent_bytes"] == sum(layer["sent_bytes"] for layer in first["layers"])
    assert step["moe/rank_imbalance"] == max(layer["rank_imbalance"] for layer in first["layers"])


@pytest.mark.parametrize(
    ("layout", "dtype", "replay"),
    [("EP2xDP2", "float32", "none"), ("FSDP4xEP2", "float32", "none")]
    + [("EP2xDP2", "bfloat16", "sampler"), ("FSDP4xEP2", "bfloat16", "trainer")],
)
def test_recomputed_activations_change_no_bit(layout: str, dtype: Any, replay: Any) -> None:
    moe = replace(EP2, aux_loss_coefficient=0.05, routing_replay=replay)
    case = replace(FOUR_WAYS[layout], moe=moe, routed_by_sampler=replay == "sampler")
    update = UpdateConfig(optimizer_steps_per_epoch=3, compute_dtype=dtype, micro_batch_tokens=100)
    whats: tuple[Any, ...] = ("none", "experts", "moe")
    recompute = [replace(case, update=replace(update, recompute=what)) for what in whats]
    none, experts, moe = (whole_state(outcomes) for outcomes in run_on(4, recompute))
    for name, tensor in none.items():
        assert torch.equal(experts[name], tensor), name
        assert torch.equal(moe[name], tensor), name


def test_a_dropped_route_is_counted_once_however_often_its_pass_is_run() -> None:
    def dropped(outcome: Outcome) -> list[float]:
        return [step["moe/dropped_routes"] for step in outcome.steps]

    update = UpdateConfig(optimizer_steps_per_epoch=3, micro_batch_tokens=15)
    # The entropy keeps the same rows in all three, at next to no weight.
    base = Case(moe=replace(EP2, capacity_factor=0.5), update=update, loss=LossConfig(entropy_coefficient=1e-9))
    cases = [
        base,
        replace(base, moe=replace(base.moe, aux_loss_coefficient=1e-9)),
        replace(base, update=replace(update, recompute="moe")),
    ]
    once, counted_first, recomputed = run_on(2, cases)
    assert min(dropped(once[0])) > 0
    assert dropped(once[0]) == dropped(counted_first[0]) == dropped(recomputed[0])
    assert once[0].steps[0]["moe/sent_bytes"] < counted_first[0].steps[0]["moe/sent_bytes"]


def test_bfloat16_passes_train_float32_weights() -> None:
    def with_dtype(case: Case, dtype: Any) -> Case:
        update = UpdateConfig(optimizer_steps_per_epoch=3, compute_dtype=dtype)
        return replace(case, update=update, model=replace(SIZES, initializer_range=0.05))

    def moved(outcomes: Sequence[Outcome]) -> float:
        weights = {name: tensor for name, tensor in whole_state(outcomes).items() if name.startswith("model.")}
        assert all(tensor.dtype == torch.float32 for tensor in weights.values())
        return max(float((tensor - exact.pieces[name][2]).abs().max()) for name, tensor in weights.items())

    exact = run_alone(with_dtype(Case(), "float32"))
    gangs = [[run_ranks(1, run_cases, [with_dtype(Case(), "bfloat16")])[0][0]]]
    gangs += run_on(4, [with_dtype(case, "bfloat16") for case in FOUR_WAYS.values()])
    for outcomes in gangs:
        # Three steps of up to 1e-2 each; bfloat16 has 8 bits.
        assert 1e-5 < moved(outcomes) < 5e-3
        for own, expected in zip(outcomes[0].steps, exact.steps, strict=True):
            assert own["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=0.01)
    (wide,) = run_on(4, [with_dtype(FOUR_WAYS["EP2xDP2"], "float32")])
    assert gangs[1][0].steps[0]["moe/sent_bytes"] < 0.7 * wide[0].steps[0]["moe/sent_bytes"]
