"""What a rollout engine must do; `torch_engine` is ours, others wrap the field's servers."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from moe.config import SamplingConfig
from moe.sampler import SampledResponse


class Engine(Protocol):
    """Samples from one publication. Token ids in, token ids and float32 log-probabilities out."""

    can_record_routing: ClassVar[bool]
    """Whether responses can come with the experts that their tokens went to."""

    @property
    def policy_version(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; DataError when the tokenizer can't represent it."""
        ...

    def decode(self, response_ids: Sequence[int]) -> str:
        """Response text without its stop token."""
        ...

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: SamplingConfig,
        *,
        greedy: bool = False,
        stop: Callable[[], bool] | None = None,
    ) -> list[SampledResponse]:
        """One response for each row of `prompts`; SamplingStopped as soon as `stop` says so."""
        ...
