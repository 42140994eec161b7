"""What the doubles of inference servers serve: a publication's real weights, with the faults that a server can have."""

import threading
from pathlib import Path

import torch
from torch import Tensor, nn

from moe.config import SamplingConfig
from moe.experts import expert_modules
from moe.model import load_model
from moe.sampler import SampledResponse, Sampler
from moe.tokenizer import load_tokenizer

FAULTS = ("", "old weights", "tensor swapped", "expert rows permuted", "wrong dtype")


class ServedPolicy:
    """Loads publications in place, as a server does; `fault` strikes from the second one on."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.fault = ""
        self.label = "default"
        self._lock = threading.Lock()
        self.model, self.tokenizer = load_model(folder), load_tokenizer(folder)
        self.vocab_size = self.model.config.vocab_size

    def load(self, folder: Path) -> None:
        with self._lock:
            if self.fault != "old weights":
                self.model = load_model(folder)
                _damage(self.model, self.fault)

    def score(self, ids: list[int]) -> list[float]:
        """Log-probabilities at temperature 1 of all tokens but the first."""
        with self._lock, torch.no_grad():
            logits_TV = self.model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
        logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
        return logprobs_TV.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()

    def sample(
        self, ids: list[int], seed: int, sampling: SamplingConfig, stop_id: int, *, greedy: bool, routing: bool
    ) -> SampledResponse:
        with self._lock:
            sampler = Sampler(self.model, (stop_id,), 0, tokenizer=self.tokenizer, record_routing=routing)
            return sampler.sample([ids], [seed], sampling, greedy=greedy)[0]


def routing_of(response: SampledResponse) -> Tensor:
    """(tokens without the last, layers, experts a token), as servers return it: they know all of these."""
    assert response.expert_ids is not None
    return response.expert_ids[:-1].clamp(min=0)


@torch.no_grad()
def _damage(model: nn.Module, fault: str) -> None:
    first = expert_modules(model)[0]
    if fault == "tensor swapped":
        attention = model.get_submodule("model.layers.0.self_attn")
        query, output = attention.get_parameter("q_proj.weight"), attention.get_parameter("o_proj.weight")
        kept = query.clone()
        query.copy_(output)
        output.copy_(kept)
    elif fault == "expert rows permuted":
        first.get_parameter("down_proj")[1] = first.get_parameter("down_proj")[1].roll(1, 0)
    elif fault == "wrong dtype":
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
