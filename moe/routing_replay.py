"""Routing replay: the experts that the tokens of a batch went to once, and go to again in training.

R2 keeps the trainer's own choice when the batch begins; R3 takes the sampler's (arXiv 2507.18071, section 5.3, and
arXiv 2510.11370). L layers with experts, K experts a token; a row of -1 is missing: the router decides.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.batch import MicroBatch, TrainingBatch
from moe.router_load import RouterTrace

MISSING = -1


@dataclass(frozen=True, slots=True)
class RoutingRows:
    """Expert ids of a batch's tokens, int16 on the CPU, flat as the batch's own fields are."""

    prompt_ids_PLK: Tensor
    """(prompt tokens, L, K). Of rows with equal prompts, the first one's is used."""
    response_ids_RLK: Tensor
    """(response tokens, L, K); the last token of a response is never fed to the model, so its row means nothing."""

    @classmethod
    def missing(cls, batch: TrainingBatch, num_layers: int, top_k: int) -> "RoutingRows":
        """Rows of -1 for every token of `batch`."""

        def rows(tokens: int) -> Tensor:
            return torch.full((tokens, num_layers, top_k), MISSING, dtype=torch.int16)

        return cls(rows(len(batch.prompt_ids)), rows(len(batch.response_ids)))

    @classmethod
    def of_batch(cls, batch: TrainingBatch) -> "RoutingRows | None":
        """What the sampler recorded; None when the batch carries no routing."""
        if batch.prompt_routing_PLK is None or batch.response_routing_RLK is None:
            return None
        return cls(batch.prompt_routing_PLK, batch.response_routing_RLK)

    def check(self, num_layers: int, top_k: int, num_experts: int) -> None:
        """Raise ValueError unless the rows fit a model of that shape."""
        for ids_TLK in (self.prompt_ids_PLK, self.response_ids_RLK):
            if ids_TLK.shape[1:] != (num_layers, top_k):
                raise ValueError(
                    f"batch routing: {ids_TLK.shape[1]} layers of {ids_TLK.shape[2]} experts a token, the model has "
                    f"{num_layers} of {top_k}; sample and train the same model"
                )
            if len(ids_TLK) and int(ids_TLK.max()) >= num_experts:
                raise ValueError(
                    f"batch routing: expert {int(ids_TLK.max())} does not exist, the model has {num_experts}; sample "
                    "and train the same model"
                )

    def coverage(self, response_lens_N: Tensor) -> float:
        """Share of the rows that are there, 0 to 1, of those of response tokens that are fed to the model: of each
        response all but the last."""
        fed_R = torch.ones(len(self.response_ids_RLK), dtype=torch.bool)
        fed_R[response_lens_N.long().cumsum(0) - 1] = False
        present_RL = (self.response_ids_RLK[fed_R] >= 0).all(dim=-1)
        return float(present_RL.double().mean()) if present_RL.numel() else 1.0


@dataclass(frozen=True, slots=True)
class MicroRouting:
    """Expert ids of one micro-batch's two passes, int16 on its device: all prompts, then all responses but their last
    position."""

    prompt_TLK: Tensor
    response_TLK: Tensor


def micro_routing(rows: RoutingRows, micro: MicroBatch) -> MicroRouting:
    """The rows of a micro-batch in the order of its forward passes; -1 at padding."""
    device = micro.prompt_mask_UP.device
    prompt_UPLK = rows.prompt_ids_PLK[micro.prompt_flat_UP]
    prompt_UPLK[~micro.prompt_mask_UP.cpu()] = MISSING
    response_BRLK = rows.response_ids_RLK[micro.flat_BR[:, :-1]]
    # Position t is fed when there is a token t + 1.
    response_BRLK[~micro.response_mask_BR[:, 1:].cpu()] = MISSING
    return MicroRouting(prompt_UPLK.flatten(0, 1).to(device), response_BRLK.flatten(0, 1).to(device))


def collect_routing(trace: RouterTrace, micro: MicroBatch, rows: RoutingRows) -> None:
    """Write the experts that a micro-batch's passes chose (`ResponseScores.trace`) into `rows`, in place."""
    chosen_TLK = torch.stack([torch.cat(passes) for passes in trace.expert_ids_LTK], dim=1).to(torch.int16).cpu()
    mask_UP, mask_BR = micro.prompt_mask_UP.cpu(), micro.response_mask_BR.cpu()
    num_prompt_tokens = mask_UP.numel()
    rows.prompt_ids_PLK[micro.prompt_flat_UP[mask_UP]] = chosen_TLK[:num_prompt_tokens][mask_UP.reshape(-1)]
    fed_BR = mask_BR[:, 1:]
    later_TLK = chosen_TLK[num_prompt_tokens:][: fed_BR.numel()]
    rows.response_ids_RLK[micro.flat_BR[:, :-1][fed_BR]] = later_TLK[fed_BR.reshape(-1)]
