import pytest
import torch
from torch import Tensor, nn

from moe import gradient_sync
from moe.config import MoeConfig, OptimizerConfig
from moe.gradient_sync import GradientSync
from moe.optimizer import PolicyOptimizer
from moe.parallel import ParallelLayout
from tests.ranks import run_ranks


def optimizer_of(model: nn.Module) -> PolicyOptimizer:
    return PolicyOptimizer(model, OptimizerConfig(learning_rate=0.1, warmup_steps=4), "train.optimizer")


def step(model: nn.Module, optimizer: PolicyOptimizer) -> float:
    loss: Tensor = model(torch.ones(2, 3)).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return optimizer.step(float(loss.detach()))


def test_the_learning_rate_rises_linearly_and_stays() -> None:
    optimizer = optimizer_of(nn.Linear(3, 2))
    assert [optimizer.set_learning_rate(done) for done in (0, 1, 3, 4, 100)] == [0.025, 0.05, 0.1, 0.1, 0.1]


def test_a_step_returns_the_norm_and_clears_the_gradients() -> None:
    model = nn.Linear(3, 2)
    optimizer = optimizer_of(model)
    model(torch.ones(2, 3)).square().sum().backward()
    expected = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None])
    assert optimizer.step(1.0) == pytest.approx(float(expected.norm()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_moments_that_were_never_stored_are_forgotten_and_stored_ones_made() -> None:
    model = nn.Linear(3, 2)
    optimizer = optimizer_of(model)
    assert optimizer.state_pieces({}) == {}
    step(model, optimizer)
    stored = {name: piece.tensor.clone() for name, piece in optimizer.state_pieces({}).items()}
    assert sorted(stored) == sorted(f"{n}.{m}" for n in ("weight", "bias") for m in ("step", "exp_avg", "exp_avg_sq"))

    fresh = optimizer_of(nn.Linear(3, 2))
    fresh.prepare_load(stored)
    assert all(not piece.tensor.any() for piece in fresh.state_pieces({}).values())
    for name, piece in fresh.state_pieces({}).items():
        piece.tensor.copy_(stored[name])
    assert all(torch.equal(piece.tensor, stored[name]) for name, piece in fresh.state_pieces({}).items())
    fresh.prepare_load([])
    assert fresh.state_pieces({}) == {}


def test_a_state_of_another_model_is_refused() -> None:
    optimizer = optimizer_of(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"unknown tensor other\.step"):
        optimizer.prepare_load(["other.step"])
    with pytest.raises(ValueError, match="weight is incomplete"):
        optimizer.prepare_load(["weight.step", "weight.exp_avg"])


def synchronised(rank: int, world_size: int, bucket_bytes: int) -> tuple[list[Tensor], float]:
    """Two dense weights, the second in other dtype, and one of experts that two ranks divide and two replicate."""
    gradient_sync.BUCKET_BYTES = bucket_bytes
    moe = MoeConfig(dispatcher="all_to_all", expert_parallel_size=2)
    weights = {
        "a": torch.zeros(3),
        "b": torch.zeros(2, 2, dtype=torch.float64),
        "e": torch.zeros(2),
        "f": torch.zeros(4),
    }
    for name, weight in weights.items():
        if name != "f":
            weight.grad = torch.full_like(weight, rank + 1.0)
    sync = GradientSync(weights, {"e"}, ParallelLayout.create(world_size, moe, 1, 8))
    sync.sum_replicas()
    return [weight.grad for weight in weights.values() if weight.grad is not None], sync.norm()


@pytest.mark.parametrize("bucket_bytes", [1, 64 * 2**20])
def test_replicas_are_summed_and_every_element_counts_once(bucket_bytes: int) -> None:
    ranks = run_ranks(4, synchronised, bucket_bytes)
    for rank, (gradients, norm) in enumerate(ranks):
        dense, other, expert, missing = gradients
        assert dense.tolist() == [10.0] * 3 and other.tolist() == [[10.0] * 2] * 2
        assert expert.tolist() == [[4.0] * 2, [6.0] * 2][rank % 2], "ranks 0 and 2, and 1 and 3, hold the same experts"
        assert missing.tolist() == [0.0] * 4
        assert norm == pytest.approx((7 * 10.0**2 + 2 * 4.0**2 + 2 * 6.0**2) ** 0.5)
