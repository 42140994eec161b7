import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moe.config import ModelConfig, MoeConfig
from moe.dispatch.base import ExpertGroup
from moe.dispatch.monitor import ExchangeMonitor
from moe.experts import EXPERTS_IMPLEMENTATION, expert_modules, experts_forward, set_recompute
from moe.model import attach_dispatcher, build_model

torch.set_num_threads(1)
IDS = torch.randint(3, 16, (3, 11), generator=torch.Generator().manual_seed(0))


def _loss_and_grads(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model(input_ids=IDS, use_cache=False).logits
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(logits.square().mean(), list(parameters.values()))
    return logits.detach(), dict(zip(parameters, grads, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_outputs_and_gradients_equal_the_dense_reference(dtype: torch.dtype, tolerance: float) -> None:
    ours = build_model(ModelConfig(), vocab_size=16, seed=3).to(dtype)
    reference = copy.deepcopy(ours)
    reference.set_experts_implementation("eager")
    (logits, grads), (want_logits, want_grads) = _loss_and_grads(ours), _loss_and_grads(reference)
    torch.testing.assert_close(logits, want_logits, rtol=0, atol=tolerance)
    for name, want in want_grads.items():
        torch.testing.assert_close(grads[name], want, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "olmoe"])
def test_other_families_give_their_own_outputs(family: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_local_experts": 4} if family in ("gpt_oss", "mixtral") else {"num_experts": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
    config = AutoConfig.for_model(family, vocab_size=16, num_experts_per_tok=2, **sizes, **experts, **heads)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    want = model(input_ids=IDS, use_cache=False).logits
    attach_dispatcher(model, MoeConfig())
    torch.testing.assert_close(model(input_ids=IDS, use_cache=False).logits, want, rtol=0, atol=1e-5)


def test_widths_that_the_fused_kernel_refuses_still_work() -> None:
    ours = build_model(ModelConfig(hidden_size=40, moe_intermediate_size=33), vocab_size=16, seed=0)
    reference = copy.deepcopy(ours)
    reference.set_experts_implementation("eager")
    want = reference(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(ours(input_ids=IDS, use_cache=False).logits, want, rtol=0, atol=1e-6)


def test_no_tokens_give_no_outputs() -> None:
    experts = expert_modules(build_model(ModelConfig(), vocab_size=16, seed=0))[0]
    hidden = torch.empty(0, 96, requires_grad=True)
    output = experts_forward(experts, hidden, torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    output.sum().backward()
    assert output.shape == (0, 96)


def test_masked_routes_contribute_nothing() -> None:
    experts = expert_modules(build_model(ModelConfig(), vocab_size=16, seed=0))[0]
    hidden, weights = torch.randn(4, 96), torch.rand(4, 2)
    ids = torch.tensor([[0, 1], [2, -1], [-1, -1], [7, 3]])
    output = experts_forward(experts, hidden, ids, weights)
    assert torch.equal(output[2], torch.zeros(96))
    alone = experts_forward(experts, hidden[1:2], ids[1:2, :1], weights[1:2, :1])
    torch.testing.assert_close(output[1:2], alone)


def test_every_model_has_its_own_implementation_name() -> None:
    first, second = (build_model(ModelConfig(), vocab_size=16, seed=0) for _ in range(2))
    second.set_experts_implementation("eager")
    assert first.config._experts_implementation == EXPERTS_IMPLEMENTATION


def _experts(dtype: torch.dtype, family_bias: bool = False) -> Any:
    """The experts module of a tiny layer, with biases (gpt_oss) or without."""
    if not family_bias:
        return expert_modules(build_model(ModelConfig(), vocab_size=16, seed=0).to(dtype))[0]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = AutoConfig.for_model("gpt_oss", vocab_size=16, num_local_experts=4, num_experts_per_tok=2, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    attach_dispatcher(model, MoeConfig())
    return expert_modules(model)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family_bias", [False, True])
def test_experts_without_rows_get_gradients_of_zero(dtype: torch.dtype, family_bias: bool) -> None:
    """A gradient of None would leave the rank out of the exchange of gradients."""
    experts = _experts(dtype, family_bias)
    hidden = torch.empty(0, experts.down_proj.shape[2 if family_bias else 1], dtype=dtype, requires_grad=True)
    output = experts_forward(experts, hidden, torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2, dtype=dtype))
    output.sum().backward()
    for name, parameter in experts.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_recomputed_experts_give_the_same_gradients_bit_for_bit() -> None:
    experts = _experts(torch.float32)
    hidden, weights = torch.randn(6, 96), torch.rand(6, 2)
    ids = torch.rand(6, 8).topk(2).indices
    grads, products = [], []
    for recompute in (False, True):
        set_recompute(experts, recompute)
        with _CountProducts() as counted:
            output = experts_forward(experts, hidden, ids, weights)
            grads.append(torch.autograd.grad(output.square().sum(), list(experts.parameters())))
        products.append(counted.number)
    assert products[1] == products[0] + 1  # the first product once more: nothing needs the second one's output
    for kept, recomputed in zip(*grads, strict=True):
        assert torch.equal(kept, recomputed)


class _CountProducts(TorchDispatchMode):
    """Counts the forward grouped products (the backward's own are of the transposed operands as well)."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += "grouped_mm" in str(func)
        return func(*args, **(kwargs or {}))


def test_weights_of_another_dtype_are_cast_and_get_their_gradient() -> None:
    experts = _experts(torch.float32)
    hidden = torch.randn(5, 96).bfloat16().requires_grad_()
    ids, weights = torch.rand(5, 8).topk(2).indices, torch.rand(5, 2)
    output = experts_forward(experts, hidden, ids, weights)
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    assert experts.down_proj.grad.dtype == torch.float32 and experts.down_proj.grad.any()


def test_exchanges_are_recorded_under_the_layer_of_their_module() -> None:
    model = build_model(ModelConfig(), vocab_size=16, seed=0)
    monitor = ExchangeMonitor()
    attach_dispatcher(model, MoeConfig(dispatcher="all_to_all"), ExpertGroup(monitor=monitor))
    model(input_ids=IDS, use_cache=False)
    rows = {layer: record.received_rows for layer, record in monitor.take().items()}
    assert rows == {0: IDS.numel() * 2, 1: IDS.numel() * 2}
