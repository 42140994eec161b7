"""Log-probabilities of responses through the transformers forward of the model: what every objective starts from."""

import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from moe.batch import MicroBatch
from moe.losses import entropy
from moe.router_load import RouterTrace
from moe.routing import RouterControl
from moe.routing_replay import MISSING, MicroRouting


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
    nothing follows it. Padding goes to no expert.
    """

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0, *, two_passes: bool = False) -> None:
        """`temperature` divides the logits, as the sampler does, so that both mean the same distribution.

        `two_passes`: every micro-batch runs the responses' pass, also where each has a single token and nothing is left
        to compute: ranks that exchange tokens must run equally many. Raises ValueError when the model has no routers or
        its cache can't be shared by the responses to a prompt.
        """
        self.model = model
        self._temperature = temperature
        self._two_passes = two_passes
        self._routers = RouterControl.of(model)
        # transformers renamed the argument in 5.24.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        _check_cache(DynamicCache(config=model.config), type(model).__name__)

    def score(
        self, micro: MicroBatch, *, entropy_gradient: bool = False, routing: MicroRouting | None = None
    ) -> ResponseScores:
        """Score the responses of `micro`, on the experts of `routing` where it has them.

        Raises ValueError when `routing` is of another model, or replay is not known for the model's routers.
        """
        num_later = self._num_later(micro)
        replay = nullcontext() if routing is None else self._routers.replaying(_passes(micro, routing, num_later))
        weights_T = _token_weights(micro, num_later)
        num_prompt_tokens = micro.prompt_ids_UP.numel()
        unread = torch.split(weights_T == 0, [num_prompt_tokens, len(weights_T) - num_prompt_tokens])
        with replay, self._routers.skipping(unread), self._routers.recording() as trace:
            logits_BRV = self._logits(micro, num_later)
        log_distribution_BRV = torch.log_softmax(logits_BRV.float() / self._temperature, dim=-1)
        logprobs_BR = log_distribution_BRV.gather(-1, micro.response_ids_BR.unsqueeze(-1)).squeeze(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_BR = entropy(log_distribution_BRV)
        return ResponseScores(logprobs_BR, entropy_BR, trace, weights_T)

    def _num_later(self, micro: MicroBatch) -> int:
        """Positions of the responses' pass."""
        return max(micro.response_ids_BR.shape[1] - 1, int(self._two_passes))

    def _logits(self, micro: MicroBatch, num_later: int) -> Tensor:
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
        if num_later == 0:
            return first_B1V
        _repeat_cache(cache, micro.prompt_of_row_B)
        # Padding after a response needs no mask: attention is causal, and nobody reads what follows.
        prompt_mask_BP = micro.prompt_mask_UP.index_select(0, micro.prompt_of_row_B) if padded else None
        mask_BS = None if prompt_mask_BP is None else _extend(prompt_mask_BP, num_later)
        later_BRV = self._forward(
            cache,
            input_ids=micro.response_ids_BR[:, :num_later],
            attention_mask=mask_BS,
            position_ids=None if mask_BS is None else _positions(mask_BS)[:, micro.prompt_mask_UP.shape[1] :],
        )
        return torch.cat([first_B1V, later_BRV], dim=1)[:, : micro.response_ids_BR.shape[1]]

    def _forward(self, cache: DynamicCache, **inputs: Any) -> Tensor:
        logits: Tensor = self.model(use_cache=True, **{self._cache_argument: cache}, **inputs).logits
        return logits


def _check_cache(cache: DynamicCache, model_class: str) -> None:
    """Raise ValueError unless the cache holds keys and values only: they are what `_repeat_cache` repeats."""
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(
                f"model class {model_class}: its cache has a {type(layer).__name__}, and only keys and values can be "
                "shared by the responses to a prompt; use a family with plain or sliding-window attention"
            )


def _passes(micro: MicroBatch, routing: MicroRouting, num_later: int) -> list[Tensor]:
    """Experts of the prompts' pass, and of the responses' if there is one; a filling pass is the router's own."""
    if num_later == 0:
        return [routing.prompt_TLK]
    missing = len(micro.response_ids_BR) * num_later - len(routing.response_TLK)
    filler = routing.response_TLK.new_full((missing, *routing.response_TLK.shape[1:]), MISSING)
    return [routing.prompt_TLK, torch.cat([routing.response_TLK, filler])]


def _positions(mask_BS: Tensor) -> Tensor:
    return (mask_BS.long().cumsum(dim=1) - 1).clamp(min=0)


def _extend(mask_BP: Tensor, columns: int) -> Tensor:
    return torch.cat([mask_BP, mask_BP.new_ones(len(mask_BP), columns)], dim=1)


def _repeat_cache(cache: DynamicCache, rows_B: Tensor) -> None:
    """Give each response its prompt's keys and values; index_select has a far cheaper backward than indexing."""
    for layer in cache.layers:
        layer.keys = layer.keys.index_select(0, rows_B)
        layer.values = layer.values.index_select(0, rows_B)


def _token_weights(micro: MicroBatch, num_later: int) -> Tensor:
    """A prompt's token stands for all its responses; a response's last token and padding for nothing."""
    responses_U1 = torch.bincount(micro.prompt_of_row_B, minlength=len(micro.prompt_ids_UP)).unsqueeze(1)
    prompt_UP = micro.prompt_mask_UP * responses_U1
    fed_BR = micro.response_mask_BR[:, 1:]
    fed_BR = torch.cat([fed_BR, fed_BR.new_zeros(len(fed_BR), num_later - fed_BR.shape[1])], dim=1)
    return torch.cat([prompt_UP.reshape(-1), fed_BR.reshape(-1)]).float()
