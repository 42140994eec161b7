"""One GRPO update of a tiny model, alone or on a gang of ranks, for tests that compare the two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.batch import TrainingBatch
from moe.config import LossConfig, ModelConfig, MoeConfig, OptimizerConfig, SamplingConfig, UpdateConfig
from moe.model import build_model
from moe.parallel import ParallelLayout, parallelize
from moe.router_load import router_modules
from moe.update import PolicyTrainer, UpdateStopped
from moe.update_metrics import StepMetrics

VOCAB = 11
SAMPLING = SamplingConfig(max_new_tokens=6, temperature=0.8)
SIZES = ModelConfig(
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_experts=12,
    moe_intermediate_size=16,
    initializer_range=0.3,
)
WALL_CLOCK = ("perf/", "timing_s/", "moe/exchange_", "moe/sent_")
"""Metrics that an update on several ranks doesn't share with one alone."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One update: how it is divided, and what it computes."""

    moe: MoeConfig = field(default_factory=MoeConfig)
    fsdp_size: int = 1
    ranks_per_node: int = 8
    loss: LossConfig = field(default_factory=LossConfig)
    update: UpdateConfig = field(default_factory=lambda: UpdateConfig(optimizer_steps_per_epoch=3))
    sampling: SamplingConfig = SAMPLING
    max_grad_norm: float = 1e3
    model: ModelConfig = SIZES
    groups: int = 6
    group_size: int = 4
    equal_rewards: bool = False
    tied: bool = False
    """Whether embeddings and output share their weights."""
    idle_experts: bool = False
    """Whether the routers begin by sending every token to the same experts."""
    routed_by_sampler: bool = False
    """Whether the batch carries a (random) routing."""
    stop_after: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a rank has after the update; `pieces` are (whole shape, offset, tensor) of its part of the state."""

    pieces: dict[str, tuple[tuple[int, ...], tuple[int, ...], Tensor]]
    steps: list[dict[str, float]]
    values: dict[str, float]
    router_steps: list[dict[str, Any]]
    expert_load_LE: list[list[float]]


def batch_of(case: Case) -> TrainingBatch:
    """Random responses, some of one token; a group is degenerate, and a reward is missing."""
    generator = torch.Generator().manual_seed(3)

    def integers(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    rows = case.groups * case.group_size
    responses = [integers(3, VOCAB, integers(1, 7)[0]) for _ in range(rows)]
    rewards: list[float | None] = [float(reward) for reward in integers(0, 4, rows)]
    rewards[: case.group_size] = [0.25] * case.group_size
    rewards[-1] = None
    if case.equal_rewards:
        rewards = [1.0] * rows
    prompts = [[1, *range(3, 5 + row // case.group_size % 4)] for row in range(rows)]
    routings: list[Tensor | None] = []
    if case.routed_by_sampler:
        shapes = [(len(prompt) + len(response), 2, 12) for prompt, response in zip(prompts, responses, strict=True)]
        routings = [torch.rand(shape, generator=generator).topk(2).indices.short() for shape in shapes]
    return TrainingBatch.from_rows(
        prompts=prompts,
        routings=routings,
        responses=responses,
        logprobs=[[-2.0] * len(response) for response in responses],
        versions=[[0] * len(response) for response in responses],
        rewards=rewards,
        groups=[row // case.group_size for row in range(rows)],
    )


Place = Callable[[PreTrainedModel, MoeConfig, UpdateConfig, ParallelLayout], PreTrainedModel]


def in_place(model: PreTrainedModel, moe: MoeConfig, update: UpdateConfig, layout: ParallelLayout) -> PreTrainedModel:
    """This rank's part of `model`, on the CPU."""
    parallelize(model, moe, update, layout)
    return model


def trainer_of(
    case: Case, layout: ParallelLayout, moe: MoeConfig, seed: int = 0, place: Place = in_place
) -> PolicyTrainer:
    """A trainer on this rank's part of a fresh model, which `place` makes of the whole."""

    def build(model_seed: int) -> PreTrainedModel:
        model: Any = build_model(case.model, VOCAB, model_seed)
        if case.tied:
            model.config.tie_word_embeddings = True
            model.lm_head.weight = model.model.embed_tokens.weight
        if case.idle_experts:
            for router in router_modules(model):
                router.get_parameter("weight").detach().zero_()
        return place(model, moe, case.update, layout)

    return PolicyTrainer(
        build(seed),
        loss=case.loss,
        # A large epsilon keeps AdamW from amplifying rounding where the gradient is nearly zero.
        optimizer=OptimizerConfig(
            learning_rate=1e-2, warmup_steps=2, epsilon=1e-3, max_grad_norm=case.max_grad_norm, weight_decay=0.1
        ),
        update=case.update,
        moe=moe,
        sampling=case.sampling,
        reference_model=build(1) if case.loss.kl_coefficient else None,
        layout=layout,
    )


def run_alone(case: Case) -> Outcome:
    """The update in this process."""
    return _run(case, ParallelLayout.single(), alone(case))


def alone(case: Case) -> MoeConfig:
    """The routing options of the case, with all experts here."""
    return MoeConfig(
        aux_loss_coefficient=case.moe.aux_loss_coefficient,
        bias_update_rate=case.moe.bias_update_rate,
        freeze_router=case.moe.freeze_router,
        routing_replay=case.moe.routing_replay,
    )


def run_cases(rank: int, world_size: int, cases: Sequence[Case]) -> list[Outcome]:
    """The updates as one rank of a gang."""
    return [_run(case, layout_of(case, world_size), case.moe) for case in cases]


def layout_of(case: Case, world_size: int) -> ParallelLayout:
    return ParallelLayout.create(world_size, case.moe, case.fsdp_size, case.ranks_per_node)


def _run(case: Case, layout: ParallelLayout, moe: MoeConfig) -> Outcome:
    return finish(trainer_of(case, layout, moe), case)


def finish(trainer: PolicyTrainer, case: Case) -> Outcome:
    """Run the case's batch from where `trainer` is in it, up to `stop_after` steps of it if that is given."""
    steps: list[dict[str, float]] = []

    def on_step(step: StepMetrics) -> None:
        steps.append(step.values)

    def should_stop() -> bool:
        # Only one rank is asked to.
        return trainer.layout.rank == trainer.layout.ranks - 1 and trainer.batch_step == case.stop_after

    try:
        result = trainer.run_batch(batch_of(case), 7, trainer.batch_step, on_step, should_stop)
    except UpdateStopped:
        return Outcome(pieces_of(trainer), steps, {}, [], [])
    return Outcome(pieces_of(trainer), steps, result.values, result.router_steps, result.expert_load_LE)


def pieces_of(trainer: PolicyTrainer) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], Tensor]]:
    pieces = trainer.state_pieces().items()
    return {name: (piece.full_shape, piece.offset, piece.tensor.clone()) for name, piece in pieces}


def whole_state(outcomes: Sequence[Outcome]) -> dict[str, Tensor]:
    """The state that the ranks hold together; ranks that hold the same element must agree on it, bit for bit."""
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for outcome in outcomes:
        assert outcome.pieces.keys() == outcomes[0].pieces.keys()
        for name, (full_shape, offset, tensor) in outcome.pieces.items():
            target = whole.setdefault(name, torch.zeros(full_shape, dtype=tensor.dtype))
            known = filled.setdefault(name, torch.zeros(full_shape, dtype=torch.bool))
            box = tuple(slice(start, start + size) for start, size in zip(offset, tensor.shape, strict=True))
            assert torch.equal(target[box][known[box]], tensor[known[box]]), f"{name}: replicas differ"
            target[box], known[box] = tensor, True
    assert all(known.all() for known in filled.values()), "an element that no rank holds"
    return whole
