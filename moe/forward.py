"""Log-probabilities of responses through the transformers forward of the model: what every objective starts from."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from moe.batch import MicroBatch
from moe.losses import entropy
from moe.router_load import RouterTrace, record_routers, router_modules


@dataclass(frozen=True, slots=True)
class ResponseScores:
    """Scores of a micro-batch's responses, B x R."""

    logprobs_BR: Tensor
    """float32 log-probability of each response token at the sampling temperature; meaningless where padded."""
    entropy_BR: Tensor
    """float32, nats; without gradient unless it was asked for."""
    trace: RouterTrace
    token_weights_T: Tensor
    """float32: how many sequences each token of `trace` stands for."""


class ResponseScorer:
    """Scores responses under `model`, computing each distinct prompt once for all its responses.

    The prompts run first and fill a key/value cache; the cache is repeated for each response (differentiably), and the
    responses run on it. Logits are computed for response positions only. The last token of a response is never fed:
    nothing follows it.
    """

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        """`temperature` divides the logits, as the sampler does, so that both mean the same distribution."""
        self.model = model
        self._temperature = temperature
        self._routers = router_modules(model)
        self._top_k = int(model.config.get_text_config().num_experts_per_tok)
        # transformers renamed the argument in 5.24.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def score(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> ResponseScores:
        with record_routers(self._routers, self._top_k) as trace:
            logits_BRV = self._logits(micro)
        log_distribution_BRV = torch.log_softmax(logits_BRV.float() / self._temperature, dim=-1)
        logprobs_BR = log_distribution_BRV.gather(-1, micro.response_ids_BR.unsqueeze(-1)).squeeze(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_BR = entropy(log_distribution_BRV)
        return ResponseScores(logprobs_BR, entropy_BR, trace, _token_weights(micro))

    def _logits(self, micro: MicroBatch) -> Tensor:
        cache = DynamicCache(config=self.model.config)
        padded = not bool(micro.prompt_mask_UP.all())
        prompt_logits_U1V = self._forward(
            cache,
            input_ids=micro.prompt_ids_UP,
            attention_mask=micro.prompt_mask_UP if padded else None,
            position_ids=_positions(micro.prompt_mask_UP) if padded else None,
            logits_to_keep=1,
        )
        first_B1V = prompt_logits_U1V.index_select(0, micro.prompt_of_row_B)
        if micro.response_ids_BR.shape[1] == 1:
            return first_B1V
        _repeat_cache(cache, micro.prompt_of_row_B)
        # Padding after a response needs no mask: attention is causal, and nobody reads what follows.
        prompt_mask_BP = micro.prompt_mask_UP.index_select(0, micro.prompt_of_row_B) if padded else None
        mask_BS = None if prompt_mask_BP is None else _extend(prompt_mask_BP, micro.response_ids_BR.shape[1] - 1)
        later_BRV = self._forward(
            cache,
            input_ids=micro.response_ids_BR[:, :-1],
            attention_mask=mask_BS,
            position_ids=None if mask_BS is None else _positions(mask_BS)[:, micro.prompt_mask_UP.shape[1] :],
        )
        return torch.cat([first_B1V, later_BRV], dim=1)

    def _forward(self, cache: DynamicCache, **inputs: Any) -> Tensor:
        logits: Tensor = self.model(use_cache=True, **{self._cache_argument: cache}, **inputs).logits
        return logits


def _positions(mask_BS: Tensor) -> Tensor:
    return (mask_BS.long().cumsum(dim=1) - 1).clamp(min=0)


def _extend(mask_BP: Tensor, columns: int) -> Tensor:
    return torch.cat([mask_BP, mask_BP.new_ones(len(mask_BP), columns)], dim=1)


def _repeat_cache(cache: DynamicCache, rows_B: Tensor) -> None:
    """Give each response its prompt's keys and values; index_select has a far cheaper backward than indexing."""
    for layer in cache.layers:
        layer.keys = layer.keys.index_select(0, rows_B)
        layer.values = layer.values.index_select(0, rows_B)


def _token_weights(micro: MicroBatch) -> Tensor:
    """A prompt's token stands for all its responses; a response's last token and padding for nothing."""
    responses_U1 = torch.bincount(micro.prompt_of_row_B, minlength=len(micro.prompt_ids_UP)).unsqueeze(1)
    prompt_UP = micro.prompt_mask_UP * responses_U1
    return torch.cat([prompt_UP.reshape(-1), micro.response_mask_BR[:, 1:].reshape(-1)]).float()
