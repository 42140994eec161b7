"""Draws responses from a policy: batched, with a key-value cache, temperature, top-p and stop tokens.

The draw of token t of a response is a counter-based uniform of (seed, t), so a batch's responses depend on the weights,
the prompts and seeds of the batch, and nothing that was sampled before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moe.config import SamplingConfig
from moe.decoder import build_decoder
from moe.decoding import Decoder, DecodingSession, PromptBatch
from moe.divergence import Diverged
from moe.stop_strings import StopStrings

_COMPACT_BELOW = 0.5
"""Finished rows are dropped from the batch when at most this share of its rows is still being sampled."""


class SamplingStopped(Exception):
    """The `stop` callback asked to end the batch; nothing of it is returned. `num_tokens` were sampled in vain."""

    def __init__(self, message: str, num_tokens: int = 0) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens


@dataclass(frozen=True)
class SampledResponse:
    """One response. `response_ids` ends with the stop token, or the one that completes a stop string, when
    `finish_reason` is "stop"; one float32 log-probability a token, under the distribution that the token was drawn from
    (after temperature and top-p)."""

    response_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    expert_ids: Tensor | None = None
    """int16 (prompt and response tokens, layers with experts, experts a token) on the CPU, where it was recorded; a row
    of -1 is unknown, as that of the last token always is: it was not fed to the model."""


@dataclass(frozen=True)
class _Drawn:
    """What was drawn for a batch of B rows in T steps, on the model's device."""

    tokens_TB: Tensor
    """int64; pad after the stop token."""
    logprobs_TB: Tensor
    """float32; 0 after the stop token."""
    routing_TBLK: Tensor | None
    """int16: the experts of each drawn token, where it was fed to the model and they are recorded; else -1."""
    lengths: dict[int, int]
    """Tokens of the rows that a stop string has ended."""


class Sampler:
    """Samples from `model`, on its device. Call `refresh` after its weights have changed."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer_eos_ids: tuple[int, ...],
        pad_id: int,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        record_routing: bool = False,
        decoder: Decoder | None = None,
    ) -> None:
        """`tokenizer`: what stop strings are found with.

        `record_routing`: responses come with the experts that their tokens went to.

        `decoder`: in place of the fastest one for the model, which reads all experts from this process's memory.
        """
        self._model, self._tokenizer = model, tokenizer
        self._record_routing = record_routing
        self._pad_id = pad_id
        self._decoder = decoder or build_decoder(model)
        self._stop_ids = frozenset(tokenizer_eos_ids)
        self._is_stop_V = torch.zeros(model.config.get_text_config().vocab_size, dtype=torch.bool)
        self._is_stop_V[list(tokenizer_eos_ids)] = True
        self._is_stop_V = self._is_stop_V.to(model.device)

    def refresh(self) -> None:
        """Read the model's weights again."""
        self._decoder.refresh()

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        cfg: SamplingConfig,
        greedy: bool = False,
        stop: Callable[[], bool] | None = None,
    ) -> list[SampledResponse]:
        """One response a prompt, in order. `seeds` are unsigned 64-bit, one a prompt.

        Equal consecutive prompts (a group) are prefilled once. `greedy` takes the most likely token; its
        log-probability is still the one under temperature and top-p. Raises SamplingStopped when `stop`, polled each
        decode step, returns True, ValueError for a prompt that is empty or too long and for stop strings without a fast
        tokenizer, and Diverged when log-probabilities are not finite.
        """
        if len(seeds) != len(prompts):
            raise ValueError(f"seeds: {len(seeds)} for {len(prompts)} prompts; give one a prompt")
        if not prompts:
            return []
        self._check_lengths(prompts, cfg)
        was_training = self._model.training
        self._model.eval()
        try:
            batch = self._group(prompts)
            session = self._decoder.open_session(batch, cfg.max_new_tokens, record_routing=self._record_routing)
            drawn = self._decode(session, seeds, cfg, greedy, stop)
        finally:
            self._model.train(was_training)
        responses = self._responses(drawn)
        if session.routing is None or drawn.routing_TBLK is None:
            return responses
        prompt_UPLK = session.routing.prompt_UPLK.cpu()
        prompt_of_row = torch.arange(len(prompt_UPLK)).repeat_interleave(batch.copies_U.cpu()).tolist()
        return [
            replace(response, expert_ids=_join(prompt_UPLK[u, -len(prompt) :], routing_TLK, len(response.response_ids)))
            for response, prompt, u, routing_TLK in zip(
                responses, prompts, prompt_of_row, drawn.routing_TBLK.cpu().unbind(1), strict=True
            )
        ]

    def _check_lengths(self, prompts: Sequence[Sequence[int]], cfg: SamplingConfig) -> None:
        shortest, longest = min(map(len, prompts)), max(map(len, prompts))
        if shortest == 0:
            raise ValueError("prompt: a prompt has no tokens; give it at least one")
        if longest > cfg.max_prompt_tokens:
            raise ValueError(
                f"rollout.sampling.max_prompt_tokens {cfg.max_prompt_tokens}: a prompt has {longest} tokens; "
                "shorten it or raise the limit"
            )
        positions = self._model.config.get_text_config().max_position_embeddings
        if longest + cfg.max_new_tokens > positions:
            raise ValueError(
                f"rollout.sampling.max_new_tokens {cfg.max_new_tokens}: with a prompt of {longest} tokens it exceeds "
                f"the model's {positions} positions; lower it, shorten the prompt or raise "
                "model.max_position_embeddings"
            )

    def _group(self, prompts: Sequence[Sequence[int]]) -> PromptBatch:
        distinct: list[Sequence[int]] = []
        copies: list[int] = []
        for prompt in prompts:
            if distinct and list(prompt) == list(distinct[-1]):
                copies[-1] += 1
            else:
                distinct.append(prompt)
                copies.append(1)
        longest = max(map(len, distinct))
        padded = [[self._pad_id] * (longest - len(prompt)) + list(prompt) for prompt in distinct]
        lengths_U = torch.tensor([len(prompt) for prompt in distinct])
        valid_UP = torch.arange(longest) >= longest - lengths_U.unsqueeze(1)
        device = self._model.device
        return PromptBatch(
            torch.tensor(padded, device=device), valid_UP.to(device), torch.tensor(copies, device=device)
        )

    def _decode(
        self,
        session: DecodingSession,
        seeds: Sequence[int],
        cfg: SamplingConfig,
        greedy: bool,
        stop: Callable[[], bool] | None,
    ) -> _Drawn:
        device, batch = session.logits_BV.device, len(seeds)
        uniforms_TB = counter_uniforms(seeds, cfg.max_new_tokens).to(device)
        tokens_TB = torch.full((cfg.max_new_tokens, batch), self._pad_id, device=device)
        logprobs_TB = torch.zeros(cfg.max_new_tokens, batch, device=device)
        routing_TBLK = None
        if session.routing is not None:
            shape_LK = session.routing.prompt_UPLK.shape[2:]
            routing_TBLK = session.routing.prompt_UPLK.new_full((cfg.max_new_tokens, batch, *shape_LK), -1)
        rows = torch.arange(batch, device=device)
        finished = torch.zeros(batch, dtype=torch.bool, device=device)
        num_live, num_drawn = batch, 0
        stop_strings = StopStrings(self._tokenizer, cfg.stop, batch) if cfg.stop else None
        lengths: dict[int, int] = {}
        for t in range(cfg.max_new_tokens):
            if stop is not None and stop():
                raise SamplingStopped(f"sampling stopped after {t} of {cfg.max_new_tokens} tokens", num_drawn)
            logprobs_BV = sampling_logprobs(session.logits_BV, cfg.temperature, cfg.top_p)
            token_B1 = logprobs_BV.argmax(-1, keepdim=True) if greedy else _draw(logprobs_BV, uniforms_TB[t])
            tokens_B = token_B1.squeeze(1)
            tokens_TB[t].index_copy_(0, rows, tokens_B)
            logprobs_TB[t].index_copy_(0, rows, logprobs_BV.gather(1, token_B1).squeeze(1))
            finished |= self._is_stop_V.index_select(0, tokens_B)
            if stop_strings is not None:
                drawn = zip(rows.tolist(), tokens_B.tolist(), finished.tolist(), strict=True)
                ended = [not is_finished and stop_strings.ends(row, token) for row, token, is_finished in drawn]
                finished |= torch.tensor(ended, device=device)
                lengths |= dict.fromkeys(rows[torch.tensor(ended, device=device)].tolist(), t + 1)
            num_drawn += num_live
            num_live = len(rows) - int(finished.sum())
            if num_live == 0 or t + 1 == cfg.max_new_tokens:
                break
            if num_live <= _COMPACT_BELOW * len(rows):
                live = (~finished).nonzero().squeeze(1)
                session.keep(live)
                rows, tokens_B, finished = rows[live], tokens_B[live], finished[live]
                uniforms_TB = uniforms_TB.index_select(1, live)
            session.step(tokens_B)
            if session.routing is not None and routing_TBLK is not None:
                routing_TBLK[t].index_copy_(0, rows, session.routing.step_BLK)
        return _Drawn(tokens_TB, logprobs_TB, routing_TBLK, lengths)

    def _responses(self, drawn: _Drawn) -> list[SampledResponse]:
        if not bool(torch.isfinite(drawn.logprobs_TB).all()):
            raise Diverged("model: log-probabilities are not finite; the weights diverged, use an earlier version")
        rows = zip(drawn.tokens_TB.t().tolist(), drawn.logprobs_TB.t().tolist(), strict=True)
        return [
            _cut(tokens, logprobs, self._stop_ids, drawn.lengths.get(row))
            for row, (tokens, logprobs) in enumerate(rows)
        ]


def _cut(tokens: list[int], logprobs: list[float], stop_ids: frozenset[int], length: int | None) -> SampledResponse:
    """`length`: of a response that a stop string has ended."""
    if length is None:
        length = next((index + 1 for index, token in enumerate(tokens) if token in stop_ids), None)
    reason: Literal["stop", "length"] = "length" if length is None else "stop"
    return SampledResponse(tokens[:length], logprobs[:length], reason)


def _join(prompt_PLK: Tensor, routing_TLK: Tensor, length: int) -> Tensor:
    """Experts of a prompt and a response of `length` tokens. Whether the last one was fed depends on the batch."""
    joined_TLK = torch.cat([prompt_PLK, routing_TLK[:length]])
    joined_TLK[-1] = -1
    return joined_TLK


def sampling_logprobs(logits_BV: Tensor, temperature: float, top_p: float) -> Tensor:
    """Float32 log-probabilities of the distribution that is sampled: log-softmax of logits / temperature, restricted to
    the smallest set of most likely tokens whose probability reaches `top_p`, and renormalised (Holtzman et al. 2020,
    "The Curious Case of Neural Text Degeneration", section 3.1). Tokens outside the set are -inf."""
    scaled = logits_BV if temperature == 1.0 else logits_BV / temperature
    logprobs = torch.log_softmax(scaled, -1)
    if top_p >= 1.0:
        return logprobs
    ordered, order = logprobs.sort(-1, descending=True)
    probs = ordered.exp()
    is_outside_ordered = probs.cumsum(-1) - probs >= top_p
    outside = torch.empty_like(is_outside_ordered).scatter_(1, order, is_outside_ordered)
    return torch.log_softmax(logprobs.masked_fill(outside, float("-inf")), -1)


def _draw(logprobs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Inverse of the cumulative distribution at the uniforms: int64 (B, 1). A token of probability 0 is never drawn."""
    cumulative = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
    targets = uniforms_B.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).clamp_(max=logprobs_BV.shape[1] - 1)


_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def counter_uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Uniforms in [0, 1), float64 (count, len(seeds)): element (t, b) is number t of the splitmix64 stream that starts
    at `seeds[b]` (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"), its top 52 bits."""
    signed = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]
    counters_T1 = torch.arange(1, count + 1, dtype=torch.int64).unsqueeze(1)
    z = torch.tensor(signed, dtype=torch.int64) + counters_T1 * _GOLDEN
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 12).double() * 2.0**-52


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift of int64: torch shifts the sign in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
