from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, Qwen3NextConfig

from moe.batch import BatchCutter, TrainingBatch
from moe.config import ModelConfig, MoeConfig
from moe.dispatch.base import ExpertGroup
from moe.dispatch.monitor import ExchangeMonitor
from moe.families import FAMILIES, attention_of
from moe.forward import ResponseScorer, _check_cache
from moe.model import attach_dispatcher, build_model

VOCAB = 40
PROMPTS = [[5, 6, 7, 8, 9, 10, 11]] * 2 + [[12, 13, 14]] * 3
LENGTHS = (6, 2, 1, 5, 4)


def model(family: str, **config: Any) -> PreTrainedModel:
    groups = {"num_expert_groups": 4, "num_groups_per_token": 2} if family == "deepseek_v3" else {}
    cfg = ModelConfig(family=family, initializer_range=0.2, **groups)
    if not config:
        return build_model(cfg, VOCAB, seed=0)
    configuration = FAMILIES[family].configure(cfg, VOCAB)
    configuration.update(config)
    torch.manual_seed(0)
    own = FAMILIES[family].model_class._from_config(
        configuration, dtype=torch.float32, attn_implementation=attention_of(family)
    )
    return own


def batch() -> TrainingBatch:
    generator = torch.Generator().manual_seed(1)
    responses = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    return TrainingBatch.from_rows(
        prompts=PROMPTS,
        responses=responses,
        logprobs=[[0.0] * length for length in LENGTHS],
        versions=[[0] * length for length in LENGTHS],
        rewards=[0.0] * len(LENGTHS),
        groups=[0, 0, 1, 1, 1],
    )


def plain_logprobs(own: PreTrainedModel, prompt: list[int], response: list[int]) -> Tensor:
    logits = own(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response).unsqueeze(-1)).squeeze(-1)


CASES = [(family, {}) for family in FAMILIES] + [
    ("gpt_oss", {"sliding_window": 4}),
    ("mixtral", {"sliding_window": 4}),
    ("deepseek_v3", {"first_k_dense_replace": 1}),
    ("deepseek_v3", {"q_lora_rank": 24}),
]


@pytest.mark.parametrize(("family", "config"), CASES)
def test_scores_and_gradients_are_those_of_separate_sequences(family: str, config: dict[str, Any]) -> None:
    """Prompts are shared and padded, windows slide past their ends, latent attention is cached compressed."""
    own, rows = model(family, **config), batch()
    (micro,) = BatchCutter(rows, 0).micro_batches(range(len(rows)), 10_000)
    scored = ResponseScorer(own).score(micro).logprobs_BR
    responses = rows.response_ids.split(rows.response_lens_N.tolist())
    losses = []
    for position, row in enumerate(micro.rows_B.tolist()):
        expected = plain_logprobs(own, PROMPTS[row], responses[row].tolist())
        torch.testing.assert_close(scored[position, : LENGTHS[row]], expected, atol=1e-4, rtol=1e-4)
        losses.append(expected.sum())
    parameters = [p for p in own.parameters() if p.requires_grad]
    separate = torch.autograd.grad(torch.stack(losses).sum(), parameters, allow_unused=True)
    shared = torch.autograd.grad(scored[micro.response_mask_BR].sum(), parameters, allow_unused=True)
    for gradient, expected_gradient in zip(shared, separate, strict=True):
        assert (gradient is None) == (expected_gradient is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, expected_gradient, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_goes_to_no_expert(family: str) -> None:
    own, rows, group = model(family), batch(), ExpertGroup(monitor=ExchangeMonitor())
    attach_dispatcher(own, MoeConfig(dispatcher="all_to_all"), group)
    (micro,) = BatchCutter(rows, 0).micro_batches(range(len(rows)), 10_000)
    scores = ResponseScorer(own).score(micro)
    read = int((scores.token_weights_T > 0).sum())
    # Both prompts, and all but the last token of each response.
    assert read == 7 + 3 + sum(LENGTHS) - len(LENGTHS) < len(scores.token_weights_T)
    received = [layer.received_rows for layer in group.monitor.take().values()]
    assert received == [read * 2] * 2


def test_a_cache_of_more_than_keys_and_values_is_refused() -> None:
    cache = DynamicCache(config=Qwen3NextConfig(num_hidden_layers=4))
    with pytest.raises(
        ValueError, match="its cache has a LinearAttentionLayer, and only keys and values can be shared"
    ):
        _check_cache(cache, "Qwen3NextForCausalLM")
