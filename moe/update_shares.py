"""How the ranks share the rows of a batch, in equally many passes, and what they compute of it together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe.batch import BatchCutter, MicroBatch, TrainingBatch
from moe.divergence import Diverged
from moe.forward import ResponseScorer, ResponseScores
from moe.parallel import ParallelLayout
from moe.routing_replay import MISSING, RoutingRows, collect_routing, micro_routing


@dataclass(frozen=True, slots=True)
class Pass:
    """One micro-batch of a rank's share, or a filler, whose weights are all zero.

    A rank without rows left runs fillers: the others wait for it in every exchange of tokens and every gathering of
    weights.
    """

    micro: MicroBatch
    is_filler: bool

    def token_weights_T(self, scores: ResponseScores) -> Tensor:
        return torch.zeros_like(scores.token_weights_T) if self.is_filler else scores.token_weights_T


class BatchShares:
    """The rows of one batch, as this rank of `layout` works on them."""

    def __init__(self, batch: TrainingBatch, cutter: BatchCutter, max_tokens: int, layout: ParallelLayout) -> None:
        self.batch, self.layout = batch, layout
        self._cutter, self._max_tokens = cutter, max_tokens
        self._lens_N = batch.response_lens_N.tolist()
        self._groups_N = batch.group_N.tolist()

    def passes(self, rows: Sequence[int]) -> list[Pass]:
        """This rank's share of `rows`, cut into micro-batches; equally many on every rank, none for no rows at all."""
        own = share_of_rows(rows, self._groups_N, self._lens_N, self.layout.rank, self.layout.ranks)
        passes = [Pass(micro, False) for micro in self._cutter.micro_batches(own, self._max_tokens)]
        count = int(self.layout.max(torch.tensor(len(passes)), "count of micro-batches"))
        if count > len(passes):
            passes += [self._filler(min(rows, key=lambda row: (self._lens_N[row], row)))] * (count - len(passes))
        return passes

    def _filler(self, row: int) -> Pass:
        (micro,) = self._cutter.micro_batches([row], self._max_tokens)
        nothing_BR = torch.zeros_like(micro.response_mask_BR)
        return Pass(replace(micro, response_mask_BR=nothing_BR, sampled_BR=nothing_BR), True)

    @torch.no_grad()
    def score(
        self,
        scorer: ResponseScorer,
        rows: Sequence[int],
        routing: RoutingRows | None = None,
        collected: RoutingRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the sampled tokens of `rows`, flat over the response tokens, and which these are.

        Equal on every rank. Tokens go to the experts of `routing`; where they went is written into `collected`.
        """
        logprobs = torch.zeros_like(self.batch.logprobs)
        seen = torch.zeros_like(logprobs)
        for own in self.passes(rows):
            micro = own.micro
            scores = scorer.score(micro, routing=None if routing is None else micro_routing(routing, micro))
            if not own.is_filler:
                mask_BR = micro.sampled_BR
                flat = micro.flat_BR[mask_BR.cpu()]
                logprobs[flat] = scores.logprobs_BR[mask_BR].cpu()
                seen[flat] = 1.0
                if collected is not None:
                    collect_routing(scores.trace, micro, collected)
        logprobs, seen = self.layout.sum(torch.stack([logprobs, seen]), "log-probabilities").unbind()
        if not bool(torch.isfinite(logprobs).all()):
            raise Diverged(
                "model: log-probabilities are not finite; the weights diverged, go back to an earlier version and "
                "lower train.optimizer.learning_rate"
            )
        if collected is not None and self.layout.ranks > 1:
            _merge(collected.prompt_ids_PLK, self.layout)
            _merge(collected.response_ids_RLK, self.layout)
        return logprobs, seen > 0


def share_of_rows(
    rows: Sequence[int], groups_N: Sequence[int], lens_N: Sequence[int], rank: int, ranks: int
) -> list[int]:
    """The part of `rows` that `rank` works on: about equally many response tokens each, few groups divided.

    A group's prompt is computed once on each rank that has a row of it.
    """
    if ranks == 1:
        return list(rows)
    ordered = sorted(rows, key=lambda row: (groups_N[row], row))
    total = sum(lens_N[row] for row in ordered)
    own, before = [], 0
    for row in ordered:
        # A row goes to the rank in whose stretch of the tokens its middle lies.
        if (2 * before + lens_N[row]) * ranks // (2 * total) == rank:
            own.append(row)
        before += lens_N[row]
    return own


def _merge(ids_TLK: Tensor, layout: ParallelLayout) -> None:
    """Complete the rows that this rank has with those of the others, in place.

    Where two ranks computed the same token (a prompt whose group is divided) the lower one's choice holds: rounding may
    have made them choose differently.
    """
    ours_T = (ids_TLK >= 0).flatten(1).all(dim=1)
    first_T = -layout.max(torch.where(ours_T, -layout.rank, -layout.ranks), "recorded routing")
    own_TLK = ids_TLK.int().masked_fill((first_T != layout.rank).view(-1, 1, 1), MISSING)
    ids_TLK.copy_(layout.max(own_TLK, "recorded routing"))


def agree_to_stop(should_stop: Callable[[], bool], layout: ParallelLayout) -> bool:
    """Whether any rank was asked to stop."""
    return bool(layout.max(torch.tensor(int(should_stop())), "request to stop"))
