import importlib
import inspect
from typing import Any

import pytest
import torch

from moe.routing_rules import weights_rule

HIDDEN, EXPERTS, TOP_K = 8, 6, 3
ROUTERS = [
    ("qwen2_moe", "Qwen2MoeTopKRouter"),
    ("qwen3_moe", "Qwen3MoeTopKRouter"),
    ("olmoe", "OlmoeTopKRouter"),
    ("flex_olmo", "FlexOlmoTopKRouter"),
    ("mixtral", "MixtralTopKRouter"),
    ("deepseek_v3", "DeepseekV3TopkRouter"),
    ("dots1", "Dots1TopkRouter"),
    ("glm4_moe", "Glm4MoeTopkRouter"),
    ("gpt_oss", "GptOssTopKRouter"),
]


class _Config:
    """Answers what the routers' constructors ask."""

    hidden_size, num_experts_per_tok = HIDDEN, TOP_K
    num_experts = num_local_experts = n_routed_experts = EXPERTS
    norm_topk_prob, routed_scaling_factor, n_group, topk_group = True, 2.5, 3, 2


def router(family: str, name: str, normalise: bool) -> Any:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = _Config()
    config.norm_topk_prob = normalise
    own = getattr(module, name)(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [*own.parameters(), *own.buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return own


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "name"), ROUTERS)
def test_the_rule_gives_the_routers_own_weights_and_gradient(
    family: str, name: str, dtype: torch.dtype, normalise: bool
) -> None:
    own = router(family, name, normalise).to(dtype)
    hidden = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits_TE, weights_TK, ids_TK = own(hidden)
    rule_TK = weights_rule(own)(own, logits_TE, ids_TK)
    assert rule_TK.dtype == weights_TK.dtype
    assert torch.equal(rule_TK, weights_TK)
    factor = torch.randn(20, TOP_K, generator=torch.Generator().manual_seed(2))
    (expected,) = torch.autograd.grad((weights_TK.float() * factor).sum(), own.weight, retain_graph=True)
    (found,) = torch.autograd.grad((rule_TK.float() * factor).sum(), own.weight)
    torch.testing.assert_close(found, expected)


def test_every_router_class_with_a_rule_is_tested() -> None:
    source = inspect.getsource(inspect.getmodule(weights_rule) or weights_rule)
    named = {line.split('"')[1] for line in source.splitlines() if 'Router": ' in line}
    assert named == {name for _, name in ROUTERS}
