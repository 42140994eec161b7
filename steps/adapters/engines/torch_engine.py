"""The default engine: `moe.sampler` in this process, on CPU or GPU."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from moe.config import SamplingConfig
from moe.model import default_device, load_model
from moe.sampler import SampledResponse, Sampler
from moe.tokenizer import decode_response, encode_prompt, load_tokenizer
from steps.errors import DataError


class TorchEngine:
    """Samples from a model in memory; `load` takes one from a publication folder."""

    can_record_routing: ClassVar[bool] = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        policy_version: int,
        *,
        record_routing: bool = False,
    ) -> None:
        self.policy_version = policy_version
        self._tokenizer = tokenizer
        self._sampler = Sampler(model, (tokenizer.eos_token_id,), tokenizer.pad_token_id, record_routing=record_routing)

    @classmethod
    def load(cls, folder: Path, policy_version: int, *, record_routing: bool = False) -> "TorchEngine":
        # Workers are made more, not wider: one core each.
        torch.set_num_threads(1)
        model = load_model(folder).to(default_device())
        return cls(model, load_tokenizer(folder), policy_version, record_routing=record_routing)

    def encode(self, text: str) -> list[int]:
        try:
            return encode_prompt(self._tokenizer, text)
        except ValueError as error:
            raise DataError(str(error)) from None

    def decode(self, response_ids: Sequence[int]) -> str:
        return decode_response(self._tokenizer, list(response_ids))

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: SamplingConfig,
        *,
        greedy: bool = False,
        stop: Callable[[], bool] | None = None,
    ) -> list[SampledResponse]:
        return self._sampler.sample(prompts, seeds, sampling, greedy=greedy, stop=stop)
