import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe.config import ModelConfig
from moe.dispatch.base import ExpertGroup
from moe.dispatch.monitor import ExchangeMonitor
from moe.families import FAMILIES
from moe.model import build_model
from moe.router_load import RouterTrace, router_modules
from moe.routing import RouterControl, balance_biases, freeze, max_nodes_per_token, update_balance_bias

VOCAB = 13
IDS = torch.randint(3, VOCAB, (3, 6), generator=torch.Generator().manual_seed(0))


def model(family: str = "qwen3_moe", **sizes: Any) -> PreTrainedModel:
    groups = {"num_expert_groups": 4, "num_groups_per_token": 2} if family == "deepseek_v3" else {}
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 16}
    return build_model(ModelConfig(family=family, initializer_range=0.3, **(shape | groups | sizes)), VOCAB, seed=0)


def logits_and_gradients(
    own: PreTrainedModel, before_backward: Callable[[], None] = lambda: None
) -> tuple[Tensor, dict[str, Tensor]]:
    own.zero_grad()
    logits = own(input_ids=IDS, use_cache=False).logits
    before_backward()
    logits.square().sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in own.named_parameters() if p.grad is not None}


def chosen(own: PreTrainedModel) -> Tensor:
    """(T, L, K) experts of one forward pass."""
    with torch.no_grad(), RouterControl.of(own).recording() as trace:
        own(input_ids=IDS, use_cache=False)
    return stacked(trace)


def stacked(trace: RouterTrace) -> Tensor:
    return torch.stack([torch.cat(passes) for passes in trace.expert_ids_LTK], dim=1)


def rotated(ids_TLK: Tensor, num_experts: int) -> Tensor:
    """Other experts than these, still distinct."""
    return (ids_TLK + 1) % num_experts


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_the_routers_own_choice_changes_no_bit(family: str) -> None:
    own = model(family)
    plain_logits, plain = logits_and_gradients(own)
    ids_TLK = chosen(own)
    with RouterControl.of(own).replaying([ids_TLK]):
        logits, gradients = logits_and_gradients(own)
    assert torch.equal(logits, plain_logits)
    for name, gradient in plain.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-6, atol=1e-7, msg=name)
        assert bool(gradient.abs().sum() > 0) or "experts" in name or "sinks" in name, name


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_sends_tokens_elsewhere_with_gradient_to_the_router(family: str) -> None:
    own = model(family)
    ids_TLK = rotated(chosen(own), 8)
    control = RouterControl.of(own)
    with control.replaying([ids_TLK]), control.recording() as trace:
        logits, gradients = logits_and_gradients(own)
    assert torch.equal(stacked(trace), ids_TLK)
    assert not torch.allclose(logits, logits_and_gradients(own)[0])
    routers = [name for name in gradients if name.endswith(("gate.weight", "router.weight"))]
    assert len(routers) == 2
    assert all(bool(gradients[name].abs().sum() > 0) for name in routers)


def test_a_missing_row_leaves_the_token_to_the_router_and_is_not_expert_0() -> None:
    own = model()
    own_TLK = chosen(own)
    given_TLK = rotated(own_TLK, 8)
    given_TLK[::2, 0] = -1
    given_TLK[3, 1, 1] = -1
    control = RouterControl.of(own)
    with torch.no_grad(), control.replaying([given_TLK]), control.recording() as trace:
        own(input_ids=IDS, use_cache=False)
    replayed_TLK = stacked(trace)
    assert torch.equal(replayed_TLK[::2, 0], own_TLK[::2, 0])
    assert torch.equal(replayed_TLK[1::2, 0], given_TLK[1::2, 0])
    assert bool((replayed_TLK[3, 1] >= 0).all())
    assert replayed_TLK[3, 1].unique().numel() == 2


def test_routing_of_another_shape_or_number_of_passes_is_refused() -> None:
    own = model()
    control, ids_TLK = RouterControl.of(own), chosen(own)

    def replay(*passes: Tensor) -> None:
        with torch.no_grad(), control.replaying(passes):
            own(input_ids=IDS, use_cache=False)

    with pytest.raises(ValueError, match="2 layers with 2 experts a token"):
        replay(ids_TLK[:, :1])
    with pytest.raises(ValueError, match="17 tokens given, the pass has 18"):
        replay(ids_TLK[:-1])
    with pytest.raises(ValueError, match="more passes were run than given"):
        replay()
    with pytest.raises(ValueError, match="2 passes were given and fewer were run"):
        replay(ids_TLK, ids_TLK)
    assert torch.equal(chosen(own), ids_TLK)


class _Returns(nn.Module):
    """A router whose output the test decides."""

    def __init__(self, returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.returns = returns
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def forward(self, hidden_TH: Tensor) -> Any:
        return self.returns(hidden_TH)


class _Model(nn.Module):
    """Declares its routers as transformers' models do."""

    def __init__(self, *returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.routers = nn.ModuleList(_Returns(each) for each in returns)
        self._can_record_outputs = {"router_logits": type("Recorder", (), {"target_class": _Returns})()}
        text = type("Text", (), {"num_experts_per_tok": 2})()
        self.config = type("Config", (), {"get_text_config": lambda self: text})()


def test_recording_believes_the_routers_choice_and_takes_the_top_logits_of_one_that_returns_none() -> None:
    tells = _Model(
        lambda logits: (logits, logits[:, :2], torch.zeros(len(logits), 2, dtype=torch.long)),
        lambda logits: logits,
        lambda logits: (logits, logits.softmax(-1)),
    )
    control = RouterControl.of(tells)
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 1.0, 4.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    with control.recording() as trace:
        for part in (logits[:2], logits[2:]):
            for router in tells.routers:
                router(part)
    tells.routers[0](logits)
    assert [[len(ids) for ids in layer] for layer in trace.expert_ids_LTK] == [[2, 1]] * 3
    ids = [torch.cat(layer).tolist() for layer in trace.expert_ids_LTK]
    assert ids == [[[0, 0]] * 3, [[1, 3], [0, 2], [3, 2]], [[1, 3], [0, 2], [3, 2]]]
    assert torch.equal(torch.cat(trace.logits_LTE[0]), logits)


def test_an_unknown_router_is_refused_by_name_for_replay_and_recomputation() -> None:
    unknown = _Model(lambda logits: (logits, logits, logits))
    control = RouterControl.of(unknown)
    with pytest.raises(ValueError, match="router class _Returns: its weights for given experts are not known"):
        with control.replaying([torch.zeros(1, 1, 2, dtype=torch.long)]):
            pass
    with pytest.raises(ValueError, match="router class _Returns"):
        control.recompute_blocks(unknown)


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(ValueError, match="class _Model declares no router"):
        RouterControl.of(_Model())


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_blocks_give_the_same_bits(family: str) -> None:
    own = model(family)
    plain_logits, plain = logits_and_gradients(own)
    RouterControl.of(own).recompute_blocks(own)
    logits, gradients = logits_and_gradients(own)
    assert torch.equal(logits, plain_logits)
    assert gradients.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-6, atol=1e-7, msg=name)


def test_recomputation_keeps_the_routing_of_the_forward_pass_when_the_router_would_choose_anew() -> None:
    """The selection bias decides the choice and nothing else, so the gradients must not notice that it has changed."""
    own = model("deepseek_v3")
    _, plain = logits_and_gradients(own)
    before_TLK = chosen(own)
    RouterControl.of(own).recompute_blocks(own)

    def turn_the_router() -> None:
        with torch.no_grad():
            for bias_E in balance_biases(own):
                bias_E.copy_(torch.linspace(-5, 5, 8))

    _, gradients = logits_and_gradients(own, turn_the_router)
    assert not torch.equal(chosen(own), before_TLK)
    for name, gradient in plain.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-6, atol=1e-7, msg=name)


def test_recomputation_keeps_a_replayed_routing_after_the_replay_has_ended() -> None:
    own = model()
    ids_TLK = rotated(chosen(own), 8)

    def gradients() -> dict[str, Tensor]:
        own.zero_grad()
        with RouterControl.of(own).replaying([ids_TLK]):
            loss = own(input_ids=IDS, use_cache=False).logits.square().sum()
        loss.backward()
        return {name: p.grad.clone() for name, p in own.named_parameters() if p.grad is not None}

    plain = gradients()
    RouterControl.of(own).recompute_blocks(own)
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-6, atol=1e-7, msg=name)


def test_the_backward_pass_really_computes_the_block_again() -> None:
    own = model()
    calls: list[int] = []
    router_modules(own)[0].register_forward_hook(lambda *_: calls.append(len(calls)))
    logits_and_gradients(own)
    assert len(calls) == 1
    RouterControl.of(own).recompute_blocks(own)
    logits_and_gradients(own)
    assert len(calls) == 3


def test_a_copied_model_has_its_own_control() -> None:
    own = model()
    RouterControl.of(own)
    twin = copy.deepcopy(own)
    ids_TLK = rotated(chosen(own), 8)
    with torch.no_grad(), RouterControl.of(twin).replaying([ids_TLK]), RouterControl.of(twin).recording() as trace:
        assert torch.equal(rotated(chosen(own), 8), ids_TLK)
        twin(input_ids=IDS, use_cache=False)
    assert torch.equal(stacked(trace), ids_TLK)


def test_frozen_routers_get_no_gradient() -> None:
    own = model("gpt_oss")
    freeze(own)
    _, gradients = logits_and_gradients(own)
    assert not [name for name in gradients if ".router." in name]
    assert [name for name in gradients if ".experts." in name]


def test_the_balance_bias_steps_towards_the_mean_load() -> None:
    own = model("deepseek_v3", num_experts=8)
    counts = torch.tensor([[4, 4, 4, 4, 4, 4, 4, 4], [9, 1, 4, 4, 4, 4, 4, 2]], dtype=torch.float64)
    update_balance_bias(own, counts, 0.25)
    update_balance_bias(own, counts, 0.25)
    even, uneven = balance_biases(own)
    assert even.tolist() == [0.0] * 8
    assert uneven.tolist() == [-0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5]
    assert uneven.dtype == torch.float32


def test_repeated_bias_updates_even_out_the_load_without_touching_the_weights() -> None:
    own = model("deepseek_v3", num_expert_groups=1, num_groups_per_token=1)
    before = {name: p.clone() for name, p in own.named_parameters()}

    def counts_LE() -> Tensor:
        ids_TLK = chosen(own)
        return torch.stack([ids_TLK[:, layer].reshape(-1).bincount(minlength=8) for layer in range(2)]).double()

    first = counts_LE().amax(dim=1)
    for _ in range(200):
        update_balance_bias(own, counts_LE(), 0.01)
    assert bool((counts_LE().amax(dim=1) < first).all())
    assert all(torch.equal(p, before[name]) for name, p in own.named_parameters())


def test_a_family_without_a_balance_bias_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="family qwen3_moe has no balancing bias"):
        update_balance_bias(model(), torch.ones(2, 8), 0.1)


def group(size: int, ranks_per_node: int) -> ExpertGroup:
    return ExpertGroup(size=size, ranks_per_node=ranks_per_node, monitor=ExchangeMonitor())


def test_a_limited_choice_of_groups_bounds_the_nodes_of_a_token() -> None:
    limited = model("deepseek_v3", num_experts=16, num_experts_per_token=4, num_groups_per_token=2)
    assert max_nodes_per_token(limited, group(16, 4)) == 2
    assert max_nodes_per_token(limited, group(16, 8)) == 2
    assert max_nodes_per_token(limited, group(8, 1)) == 4
    assert max_nodes_per_token(limited, group(8, 8)) == 1
    assert max_nodes_per_token(model(), group(8, 2)) == 2


def test_groups_that_straddle_nodes_are_refused() -> None:
    limited = model("deepseek_v3", num_experts=24, num_experts_per_token=4, num_groups_per_token=2)
    with pytest.raises(ValueError, match="groups of 6 experts do not align with nodes of 8"):
        max_nodes_per_token(limited, group(6, 2))
