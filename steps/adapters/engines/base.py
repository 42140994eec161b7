"""What a rollout engine must do; `torch_engine` is ours, `server_engine` is a vLLM or SGLang server."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from moe.config import SamplingConfig
from moe.sampler import SampledResponse
from moe.tokenizer import PromptContent

OnResponse = Callable[[int, SampledResponse], None]
"""Called with a row's number and its response, on the thread that called `sample`."""


class Engine(Protocol):
    """Samples from one publication. Token ids in, token ids and float32 log-probabilities out."""

    can_record_routing: ClassVar[bool]
    """Whether responses can come with the experts that their tokens went to."""

    streams_responses: ClassVar[bool]
    """Whether a response comes as soon as it is finished and depends on nothing that is sampled beside it. If not, the
    same batch must always be sampled together."""

    @property
    def policy_version(self) -> int: ...

    def encode(self, content: PromptContent) -> list[int]:
        """Token ids of a prompt's text, or of its messages by the chat template; DataError when there are none."""
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
        on_response: OnResponse | None = None,
    ) -> list[SampledResponse]:
        """One response for each row of `prompts`; SamplingStopped as soon as `stop` says so.

        `on_response` hears of each response once, as it comes, from an engine that `streams_responses`; others don't
        call it. A response that it has heard of is good, whatever becomes of the others.
        """
        ...

    def refresh(self, folder: Path, policy_version: int) -> None:
        """Sample from another publication from now on; DataError when the engine does not serve those weights."""
        ...

    def report(self) -> dict[str, Any]:
        """Engine, its version, the publication that it serves, how experts exchange tokens: requested, observed."""
        ...

    def close(self) -> None:
        """Let go of what this process holds of the engine; a server that others use goes on."""
        ...
