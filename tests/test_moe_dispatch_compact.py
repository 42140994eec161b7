"""Autograd, counts and explanations around an exchange that sends a token once a rank (moe.dispatch.compact)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.dispatch import compact
from moe.dispatch.base import ExpertGroup
from moe.dispatch.monitor import ExchangeFailed, ExchangeMonitor
from tests.ranks import run_ranks


class Loopback:
    """One rank's exchange with itself; the call named `broken` fails as a torch collective does."""

    def __init__(self, broken: str = "") -> None:
        self.rows_per_expert: list[int] = []
        self.broken = broken

    def dispatch(self, hidden_TH, ids_TK, weights_TK):
        self.fail("dispatch")
        self.rows_per_expert = torch.bincount(ids_TK[ids_TK >= 0], minlength=4).tolist()
        return hidden_TH.clone(), ids_TK.clone(), weights_TK.clone()

    def combine(self, rows_RH):
        self.fail("combine")
        return rows_RH.clone()

    def dispatch_gradient(self, grad_RH, grad_weights_RK):
        self.fail("dispatch backward")
        return grad_RH.clone(), grad_weights_RK.clone()

    def combine_gradient(self, grad_TH):
        self.fail("combine backward")
        return grad_TH.clone()

    def fail(self, name: str) -> None:
        if name == self.broken:
            raise RuntimeError("Connection closed by peer")


def run_pass(broken: str = "") -> None:
    group = ExpertGroup(monitor=ExchangeMonitor(step=7, layer=3, explain=lambda e, place: ExchangeFailed(place)))
    hidden_TH = torch.ones(2, 8, dtype=torch.bfloat16, requires_grad=True)
    weights_TK = torch.ones(2, 2, requires_grad=True)
    passage = compact.Passage(Loopback(broken), group, group.monitor.layer, 4)
    dispatched = compact.dispatch(passage, hidden_TH, torch.tensor([[0, 3], [-1, 2]]), weights_TK)
    group.monitor.layer = 0  # the next layer's turn; this one's backward comes later
    compact.combine(2 * dispatched.rows_SH, dispatched).sum().backward()
    assert torch.equal(hidden_TH.grad, torch.tensor([[4.0], [2.0]]).expand(2, 8).bfloat16())
    assert torch.equal(weights_TK.grad, torch.tensor([[16.0, 16.0], [0.0, 16.0]]))
    assert group.monitor.take()[3].received_rows == 3


def test_a_pass_with_nothing_broken_has_exact_gradients():
    run_pass()


@pytest.mark.parametrize("phase", ["dispatch", "combine", "combine backward", "dispatch backward"])
def test_a_broken_exchange_names_step_layer_and_phase(phase):
    with pytest.raises(ExchangeFailed, match=f"^optimizer step 7, layer 3, {phase}$"):
        run_pass(phase)


@given(st.data())
def test_copies_are_the_distinct_other_ranks_and_nodes_of_each_token(data):
    size, per_rank, ranks_per_node = (data.draw(st.integers(1, n)) for n in (6, 3, 4))
    num_experts = size * per_rank
    experts = st.lists(st.integers(-1, num_experts - 1), min_size=3, max_size=3)
    ids = data.draw(st.lists(experts, max_size=5))
    rank = data.draw(st.integers(0, size - 1))
    group = ExpertGroup(rank=rank, size=size, ranks_per_node=ranks_per_node, monitor=ExchangeMonitor())
    ranks = [{expert // per_rank for expert in row if expert >= 0} for row in ids]
    nodes = [{other // ranks_per_node for other in row} for row in ranks]
    expected = [
        sum(len(row - {own}) for row in places) for places, own in ((ranks, rank), (nodes, rank // ranks_per_node))
    ]
    ids_TK = torch.tensor(ids, dtype=torch.int32).view(-1, 3)
    assert compact.count_copies(ids_TK, num_experts, group).tolist() == expected


def check_equality(rank, world_size):
    group = ExpertGroup(
        process_group=torch.distributed.group.WORLD, rank=rank, size=world_size, monitor=ExchangeMonitor()
    )
    compact.require_equal(group, {"moe.num_sms": 20})
    with pytest.raises(ValueError, match=r"moe.num_sms differs .* \(\[20, 21\]\): make it equal"):
        compact.require_equal(group, {"hidden_size": 8, "moe.num_sms": 20 + rank})


def test_unequal_constants_are_named_on_every_rank():
    run_ranks(2, check_equality)
