"""What the sampler asks of a decoder: prompts in, next-token logits out, step by step."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class PromptBatch:
    """Distinct prompts, left-padded, and how often each is sampled.

    `ids_UP` int64 (distinct prompts, padded length); `valid_UP` bool, False at padding; `copies_U` int64: the rows of
    prompt u are `copies_U[u]` consecutive rows of the batch, those of prompt 0 from `first_row` on.
    """

    ids_UP: Tensor
    valid_UP: Tensor
    copies_U: Tensor
    first_row: int = 0

    def split(self, size: int) -> list["PromptBatch"]:
        """Consecutive parts of at most `size` prompts, each with its place in the whole batch."""
        parts, first_row = [], self.first_row
        fields = (torch.split(field, size) for field in (self.ids_UP, self.valid_UP, self.copies_U))
        for ids, valid, copies in zip(*fields, strict=True):
            parts.append(PromptBatch(ids, valid, copies, first_row))
            first_row += int(copies.sum())
        return parts

    @property
    def is_padded(self) -> bool:
        """Whether some prompt is shorter than the longest."""
        return not bool(self.valid_UP.all())

    def positions_UP(self) -> Tensor:
        """Position of each token in its own prompt, int64; 0 at padding."""
        return (self.valid_UP.cumsum(1) - 1).clamp(min=0)


@dataclass
class RoutingRecord:
    """Experts that a session's tokens went to, int16; L layers with experts, K experts a token, -1 where unknown."""

    prompt_UPLK: Tensor
    """Of the distinct prompts, -1 at padding."""
    step_BLK: Tensor
    """Of the tokens of the last `step`."""


class DecodingSession(Protocol):
    """One batch being decoded. `logits_BV` are float32 logits of the next token."""

    @property
    def logits_BV(self) -> Tensor: ...

    @property
    def routing(self) -> RoutingRecord | None:
        """None unless the session was opened to record it."""

    def step(self, tokens_B: Tensor) -> None:
        """Append one int64 token to every row and update `logits_BV`."""

    def keep(self, rows: Tensor) -> None:
        """Drop every row but the int64 indices `rows`; `logits_BV` is stale until the next `step`."""


class Decoder(Protocol):
    """Starts decoding sessions on the weights it read at the last `refresh`."""

    def refresh(self) -> None:
        """Read the model's weights again."""

    def open_session(
        self, prompts: PromptBatch, max_new_tokens: int, *, record_routing: bool = False
    ) -> DecodingSession:
        """Prefill `prompts`, with room for `max_new_tokens` more."""


def prompt_routing(valid_UP: Tensor, chosen: list[Tensor]) -> Tensor:
    """int16 (U, P, L, K) of each layer's experts: of all tokens, (U * P, K), or of the prompts' last, (U, K)."""
    num_prompts, length = valid_UP.shape
    routing_UPLK = torch.full(
        (num_prompts, length, len(chosen), chosen[0].shape[-1]), -1, dtype=torch.int16, device=valid_UP.device
    )
    for layer, ids_TK in enumerate(chosen):
        ids_UPK = ids_TK.view(num_prompts, -1, ids_TK.shape[-1])
        routing_UPLK[:, -ids_UPK.shape[1] :, layer] = ids_UPK.to(torch.int16)
    routing_UPLK[~valid_UP] = -1
    return routing_UPLK
