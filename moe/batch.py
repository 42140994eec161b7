"""One iteration's training input: ragged responses, and how they are cut into mini-batches and micro-batches.

Responses to one prompt share a group. A micro-batch holds each distinct prompt once, left-padded, and its responses
right-padded: attention makes the prompt's hidden states equal for all its responses, so they are computed once.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from safetensors.torch import load, save
from torch import Tensor

from moe.divergence import Diverged

_DTYPES = {
    "prompt_ids": torch.int32,
    "prompt_lens_N": torch.int32,
    "response_ids": torch.int32,
    "response_lens_N": torch.int32,
    "logprobs": torch.float32,
    "versions": torch.int32,
    "rewards_N": torch.float32,
    "reward_ok_N": torch.bool,
    "group_N": torch.int32,
}
_ROUTING = {"prompt_routing_PLK": "prompt_ids", "response_routing_RLK": "response_ids"}
"""Fields of an optional routing, and the flat field that each runs along."""
_OPTIONAL = {*_ROUTING, "sampled"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBatch:
    """N responses; every field is a CPU tensor, 1-D but for the routing; flat fields hold the rows one after another.

    Raises ValueError naming the field when dtypes, lengths or group indices don't fit together, and Diverged when the
    sampler's log-probabilities are not finite.
    """

    prompt_ids: Tensor
    """int32, flat over prompt tokens."""
    prompt_lens_N: Tensor
    """int32, at least 1."""
    response_ids: Tensor
    """int32, flat over response tokens, the stop token included, and those of a tool or environment between turns."""
    response_lens_N: Tensor
    """int32, at least 1."""
    logprobs: Tensor
    """float32, flat: the sampler's log-probability of each response token."""
    versions: Tensor
    """int32, flat: the policy version that sampled each response token."""
    rewards_N: Tensor
    """float32; 0 where there is none."""
    reward_ok_N: Tensor
    """bool: whether the response has a usable reward."""
    group_N: Tensor
    """int32 dense group index, 0..K-1, every index used."""
    prompt_routing_PLK: Tensor | None = None
    """int16 (prompt tokens, layers with experts, experts a token): the experts that the sampler sent each prompt token
    to; a row of -1 is missing. None, as the responses' is, when no sample has a routing."""
    response_routing_RLK: Tensor | None = None
    """int16, of the response tokens; the row of a response's last token is missing."""
    sampled: Tensor | None = None
    """bool, flat: whether the policy sampled each response token; only those are trained on. None: it sampled all."""

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.dim() != 1:
                raise ValueError(f"batch {name}: expected a 1-D {dtype} tensor, got {tensor.dtype} {tensor.shape}")
        self._check_lengths()
        self._check_routing()
        self._check_sampled()

    def _check_lengths(self) -> None:
        for name in ("response_lens_N", "rewards_N", "reward_ok_N", "group_N"):
            if len(getattr(self, name)) != len(self.prompt_lens_N):
                raise ValueError(f"batch {name}: {len(getattr(self, name))} rows, expected {len(self.prompt_lens_N)}")
        if len(self) == 0:
            raise ValueError("batch prompt_lens_N: the batch is empty; sample at least one group")
        for lens, flat_names in (
            ("prompt_lens_N", ("prompt_ids",)),
            ("response_lens_N", ("response_ids", "logprobs", "versions")),
        ):
            lens_N = getattr(self, lens)
            if int(lens_N.min()) < 1:
                raise ValueError(f"batch {lens}: a row has no token; every prompt and response needs at least one")
            for name in flat_names:
                if len(getattr(self, name)) != int(lens_N.sum()):
                    raise ValueError(f"batch {name}: {len(getattr(self, name))} tokens, {lens} sums to {lens_N.sum()}")
        if not bool(torch.isfinite(self.logprobs).all()):
            raise Diverged(
                "batch logprobs: not all finite; the policy that sampled has diverged, go back to an older one"
            )
        if not torch.equal(torch.unique(self.group_N), torch.arange(self.num_groups, dtype=torch.int32)):
            raise ValueError("batch group_N: group indices must be dense, 0..K-1, each used")

    def _check_routing(self) -> None:
        shapes = set()
        for name, tokens in _ROUTING.items():
            ids_TLK = getattr(self, name)
            shapes.add(None if ids_TLK is None else tuple(ids_TLK.shape[1:]))
            if ids_TLK is None:
                continue
            if ids_TLK.dtype != torch.int16 or ids_TLK.dim() != 3 or len(ids_TLK) != len(getattr(self, tokens)):
                raise ValueError(
                    f"batch {name}: expected an int16 (tokens of {tokens}, layers, experts a token) tensor, got "
                    f"{ids_TLK.dtype} {tuple(ids_TLK.shape)}"
                )
        if len(shapes) > 1:
            raise ValueError(f"batch {' and '.join(_ROUTING)}: give both, with equal layers and experts a token")

    def _check_sampled(self) -> None:
        if self.sampled is None:
            return
        if self.sampled.dtype != torch.bool or self.sampled.shape != self.response_ids.shape:
            raise ValueError(
                f"batch sampled: expected a bool for each of {len(self.response_ids)} response tokens, got "
                f"{self.sampled.dtype} {tuple(self.sampled.shape)}"
            )
        if int(self.sampled_lens_N.min()) < 1:
            raise ValueError("batch sampled: a response has no token of the policy; leave it out")

    def __len__(self) -> int:
        return len(self.prompt_lens_N)

    @property
    def sampled_lens_N(self) -> Tensor:
        """int32: tokens of each response that the policy sampled."""
        if self.sampled is None:
            return self.response_lens_N
        ends_N = self.response_lens_N.long().cumsum(0)
        totals = self.sampled.cumsum(0)[ends_N - 1]
        return totals.diff(prepend=totals.new_zeros(1)).to(torch.int32)

    @property
    def num_groups(self) -> int:
        return int(self.group_N.max()) + 1

    @classmethod
    def from_rows(
        cls,
        *,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
        versions: Sequence[Sequence[int]],
        rewards: Sequence[float | None],
        groups: Sequence[int],
        routings: Sequence[Tensor | None] = (),
        masks: Sequence[Sequence[bool] | None] = (),
    ) -> "TrainingBatch":
        """Build a batch from N ragged rows; a reward of None means that the response has no usable reward.

        `routings`: none, or for each row int16 (prompt and response tokens, layers, experts a token), or None. `masks`:
        none, or for each row whether the policy sampled each response token, or None where it sampled all.
        """

        def flatten(rows: Sequence[Sequence[int]] | Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
            return torch.tensor([value for row in rows for value in row], dtype=dtype)

        def lengths(rows: Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor([len(row) for row in rows], dtype=torch.int32)

        return cls(
            prompt_ids=flatten(prompts, torch.int32),
            prompt_lens_N=lengths(prompts),
            response_ids=flatten(responses, torch.int32),
            response_lens_N=lengths(responses),
            logprobs=flatten(logprobs, torch.float32),
            versions=flatten(versions, torch.int32),
            rewards_N=torch.tensor([reward or 0.0 for reward in rewards], dtype=torch.float32),
            reward_ok_N=torch.tensor([reward is not None for reward in rewards], dtype=torch.bool),
            group_N=torch.tensor(list(groups), dtype=torch.int32),
            sampled=_flat_masks(masks, responses),
            **_flat_routing(routings, [len(row) for row in prompts], [len(row) for row in responses]),
        )

    def to_tensors(self) -> dict[str, Tensor]:
        """Every field by its name, without those that there are not."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "TrainingBatch":
        """Raises ValueError naming the missing or unknown tensors, or the field that is malformed."""
        if wrong := sorted((tensors.keys() - _OPTIONAL) ^ _DTYPES.keys()):
            raise ValueError(f"batch tensors: missing or unknown {wrong}; write it anew")
        return cls(**tensors)

    def to_bytes(self) -> bytes:
        """The batch as a safetensors file; equal batches give equal bytes."""
        return bytes(save(self.to_tensors()))

    @classmethod
    def from_bytes(cls, data: bytes) -> "TrainingBatch":
        """Raises ValueError when the bytes are not a safetensors file of a batch."""
        try:
            tensors = load(data)
        except Exception as error:  # safetensors raises its own SafetensorError, not exported with a stable base
            raise ValueError(f"batch: not a safetensors file ({error}); write it anew") from error
        return cls.from_tensors(tensors)


def _flat_masks(masks: Sequence[Sequence[bool] | None], responses: Sequence[Sequence[int]]) -> Tensor | None:
    """None when every row is the policy's own."""
    if all(mask is None for mask in masks):
        return None
    rows = zip(masks, responses, strict=True)
    return torch.tensor([bit for mask, row in rows for bit in (mask or [True] * len(row))], dtype=torch.bool)


def _flat_routing(
    routings: Sequence[Tensor | None], prompt_lens: Sequence[int], response_lens: Sequence[int]
) -> dict[str, Tensor]:
    """The routing fields of a batch, -1 where a row has none; empty when no row has one."""
    first = next((routing for routing in routings if routing is not None), None)
    if first is None:
        return {}
    prompts, responses = [], []
    for row, (routing, prompt, response) in enumerate(zip(routings, prompt_lens, response_lens, strict=True)):
        own = first.new_full((prompt + response, *first.shape[1:]), -1) if routing is None else routing
        if own.shape != (prompt + response, *first.shape[1:]):
            raise ValueError(
                f"batch row {row}: routing of shape {tuple(own.shape)}, expected {prompt + response} tokens of "
                f"{tuple(first.shape[1:])} layers and experts a token; samples of one batch come from one model"
            )
        prompts.append(own[:prompt])
        responses.append(own[prompt:])
    return {"prompt_routing_PLK": torch.cat(prompts), "response_routing_RLK": torch.cat(responses)}


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """B responses to U distinct prompts, padded: P prompt positions, R response positions."""

    rows_B: Tensor
    """int64: row of each response in the batch."""
    prompt_of_row_B: Tensor
    """int64: index into the U prompts."""
    prompt_ids_UP: Tensor
    """int64, left-padded."""
    prompt_mask_UP: Tensor
    """bool."""
    prompt_flat_UP: Tensor
    """int64: position of each prompt token in the batch's flat fields (a repeated one where padded)."""
    response_ids_BR: Tensor
    """int64, right-padded."""
    response_mask_BR: Tensor
    """bool."""
    sampled_BR: Tensor
    """bool: tokens that the policy sampled."""
    flat_BR: Tensor
    """int64: position of each response token in the batch's flat fields (a repeated one where padded)."""


class BatchCutter:
    """Cuts rows of a batch into micro-batches; prompts are compared once."""

    def __init__(self, batch: TrainingBatch, pad_id: int, device: torch.device | str = "cpu") -> None:
        self._batch = batch
        self._pad_id = pad_id
        self._device = device
        self._prompt_starts_N = _starts(batch.prompt_lens_N)
        self._response_starts_N = _starts(batch.response_lens_N)
        self._prompt_lens = batch.prompt_lens_N.tolist()
        self._response_lens = batch.response_lens_N.tolist()
        self._first_row_of_prompt = self._find_equal_prompts()

    def _find_equal_prompts(self) -> list[int]:
        """For each row, the first row with the same prompt, whose tokens also went to the same experts if recorded."""
        flat, routing = self._batch.prompt_ids.tolist(), self._batch.prompt_routing_PLK
        first: dict[tuple[tuple[int, ...], bytes], int] = {}
        starts = self._prompt_starts_N.tolist()
        return [
            first.setdefault(
                (
                    tuple(flat[start : start + length]),
                    b"" if routing is None else routing[start : start + length].numpy().tobytes(),
                ),
                row,
            )
            for row, (start, length) in enumerate(zip(starts, self._prompt_lens, strict=True))
        ]

    def micro_batches(self, rows: Sequence[int], max_tokens: int) -> Iterator[MicroBatch]:
        """All of `rows`, shortest responses first, in as few micro-batches of at most `max_tokens` padded tokens.

        A row that alone exceeds `max_tokens` gets a micro-batch of its own. The cut depends on the set of rows only.
        """
        order = sorted(
            rows,
            key=lambda row: (self._response_lens[row], self._prompt_lens[row], self._first_row_of_prompt[row], row),
        )
        chunk: list[int] = []
        prompts: set[int] = set()
        longest_prompt = 0
        for row in order:
            count = len(prompts) + (self._first_row_of_prompt[row] not in prompts)
            widest = max(longest_prompt, self._prompt_lens[row])
            # Sorted: this row's response is the longest so far.
            if chunk and count * widest + (len(chunk) + 1) * self._response_lens[row] > max_tokens:
                yield self._pad(chunk)
                chunk, prompts, widest = [], set(), self._prompt_lens[row]
            chunk.append(row)
            prompts.add(self._first_row_of_prompt[row])
            longest_prompt = widest
        if chunk:
            yield self._pad(chunk)

    def _pad(self, rows: Sequence[int]) -> MicroBatch:
        batch, device = self._batch, self._device
        firsts = [self._first_row_of_prompt[row] for row in rows]
        position = {first: index for index, first in enumerate(dict.fromkeys(firsts))}
        rows_B, prompts_U = torch.tensor(rows), torch.tensor(list(position))
        prompt_flat_UP, prompt_mask_UP = _positions(
            self._prompt_starts_N[prompts_U], batch.prompt_lens_N[prompts_U].long(), left=True
        )
        flat_BR, mask_BR = _positions(self._response_starts_N[rows_B], batch.response_lens_N[rows_B].long(), left=False)
        sampled_BR = mask_BR if batch.sampled is None else mask_BR & batch.sampled[flat_BR]
        return MicroBatch(
            rows_B=rows_B,
            prompt_of_row_B=torch.tensor([position[first] for first in firsts], device=device),
            prompt_ids_UP=batch.prompt_ids[prompt_flat_UP].long().masked_fill(~prompt_mask_UP, self._pad_id).to(device),
            prompt_mask_UP=prompt_mask_UP.to(device),
            prompt_flat_UP=prompt_flat_UP,
            response_ids_BR=batch.response_ids[flat_BR].long().masked_fill(~mask_BR, self._pad_id).to(device),
            response_mask_BR=mask_BR.to(device),
            sampled_BR=sampled_BR.to(device),
            flat_BR=flat_BR,
        )


def _starts(lens_N: Tensor) -> Tensor:
    lens_N = lens_N.long()
    return lens_N.cumsum(0) - lens_N


def _positions(starts: Tensor, lens: Tensor, *, left: bool) -> tuple[Tensor, Tensor]:
    """Flat position of each cell of the padded matrix, and the mask of cells that hold a token."""
    width = int(lens.max())
    columns = torch.arange(width).unsqueeze(0)
    if left:
        columns = columns - (width - lens).unsqueeze(1)
    mask = (columns >= 0) & (columns < lens.unsqueeze(1))
    return starts.unsqueeze(1) + columns.clamp(min=0).minimum(lens.unsqueeze(1) - 1), mask


def mini_batches(group_N: Tensor, count: int, seed: int, epoch: int) -> list[list[int]]:
    """Rows of each mini-batch: whole groups, shuffled by (seed, epoch), in `count` parts of as equal size as possible.

    Fewer parts when there are fewer groups; each part's rows are in ascending order.
    """
    num_groups = int(group_N.max()) + 1
    digest = hashlib.sha256(f"mini-batches/{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    order_K = torch.randperm(num_groups, generator=generator)
    parts = order_K.tensor_split(min(count, num_groups))
    return [torch.isin(group_N.long(), part).nonzero().squeeze(1).tolist() for part in parts]
