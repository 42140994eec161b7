"""The default engine: `moe.sampler` in this process, on CPU or GPU."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from moe.config import SamplingConfig
from moe.model import default_device, load_model
from moe.sampler import SampledResponse, Sampler
from moe.tokenizer import PromptContent, decode_response, load_tokenizer
from steps.adapters.engines.base import OnResponse
from steps.adapters.engines.tokens import encode


class TorchEngine:
    """Samples from a model in memory; `load` takes one from a publication folder."""

    can_record_routing: ClassVar[bool] = True
    streams_responses: ClassVar[bool] = False

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
        self._record_routing = record_routing
        self._sampler = Sampler(
            model,
            (tokenizer.eos_token_id,),
            tokenizer.pad_token_id,
            tokenizer=tokenizer,
            record_routing=record_routing,
        )

    @classmethod
    def load(cls, folder: Path, policy_version: int, *, record_routing: bool = False) -> "TorchEngine":
        # Workers are made more, not wider: one core each.
        torch.set_num_threads(1)
        model = load_model(folder).to(default_device())
        return cls(model, load_tokenizer(folder), policy_version, record_routing=record_routing)

    def encode(self, content: PromptContent) -> list[int]:
        return encode(self._tokenizer, content)

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
        on_response: OnResponse | None = None,
    ) -> list[SampledResponse]:
        return self._sampler.sample(prompts, seeds, sampling, greedy=greedy, stop=stop)

    def refresh(self, folder: Path, policy_version: int) -> None:
        loaded = TorchEngine.load(folder, policy_version, record_routing=self._record_routing)
        self.policy_version, self._sampler, self._tokenizer = policy_version, loaded._sampler, loaded._tokenizer

    def report(self) -> dict[str, Any]:
        return {"engine": "torch", "engine_version": torch.__version__, "policy_version": self.policy_version}

    def close(self) -> None:
        """Nothing is held but memory."""
