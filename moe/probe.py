"""A publication's probe: a fixed text of tokens and the log-probabilities that its weights give it, by our own forward.

An engine that serves the publication must give the same; one that serves other weights, or these in a wrong order, does
not. The tokens are drawn at random, so that they visit the experts of every layer.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe.checkpoint_files import TensorSpec, write_json
from moe.config import MoeConfig
from moe.model import attach_dispatcher, place_tensor
from moe.publication_weights import Read, weight_specs

PROBE_FILE = "probe.json"
PROBE_TOKENS = 256
"""At most; 8 of 128 experts a token leave an expert out with a probability of 1e-7 a layer."""
_SEED = 20
_LAYER = re.compile(r"^(.*\.layers\.\d+)\.")


@dataclass(frozen=True, slots=True)
class Probe:
    """T tokens, and T - 1 float32 log-probabilities: of each token but the first, given those before it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def probe_tokens(vocab_size: int, max_positions: int) -> list[int]:
    """The probe's tokens for a model: at most PROBE_TOKENS, one fewer than its positions."""
    generator = torch.Generator().manual_seed(_SEED)
    count = min(PROBE_TOKENS, max_positions - 1)
    return [int(token) for token in torch.randint(vocab_size, (count,), generator=generator)]


def write_probe(model: PreTrainedModel, read: Read, stored: torch.dtype, folder: Path) -> None:
    """Write the probe of the weights that `read` gives in the dtype `stored`, computed in float32 on the CPU.

    `model` lies on the meta device; it is filled layer by layer and emptied again, so that memory holds one layer.
    """
    config = model.config.get_text_config()
    token_ids = probe_tokens(config.vocab_size, config.max_position_embeddings)
    attach_dispatcher(model, MoeConfig())
    logits_TV = _stream_forward(model, read, stored, torch.tensor([token_ids]))
    logprobs_TV = torch.log_softmax(logits_TV[:-1], dim=-1)
    logprobs_T = logprobs_TV.gather(1, torch.tensor(token_ids[1:]).unsqueeze(1)).squeeze(1)
    write_json(folder / PROBE_FILE, {"token_ids": token_ids, "logprobs": logprobs_T.tolist()})


def read_probe(folder: Path) -> Probe:
    """Raises ValueError of one line when the folder has no probe, or one that is malformed."""
    path = folder / PROBE_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        probe = Probe(tuple(map(int, raw["token_ids"])), tuple(map(float, raw["logprobs"])))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; publish the policy again") from None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: not a probe ({error}); publish the policy again") from None
    if len(probe.logprobs) != len(probe.token_ids) - 1 or not all(map(math.isfinite, probe.logprobs)):
        raise ValueError(f"{path}: {len(probe.logprobs)} log-probabilities for {len(probe.token_ids)} tokens")
    return probe


def largest_difference(probe: Probe, logprobs: Sequence[float]) -> tuple[float, int]:
    """Largest |difference| of the probe's log-probabilities to an engine's, and the token where it is.

    Infinite where the engine's is not finite or their count differs.
    """
    if len(logprobs) != len(probe.logprobs):
        return math.inf, 0
    gaps = [abs(a - b) if math.isfinite(b) else math.inf for a, b in zip(probe.logprobs, logprobs, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    return gaps[worst], worst + 1


@torch.no_grad()
def _stream_forward(model: Any, read: Read, stored: torch.dtype, ids_1T: Tensor) -> Tensor:
    """Float32 logits (T, V)."""
    by_layer: dict[str, list[TensorSpec]] = defaultdict(list)
    for spec in weight_specs(model, stored):
        layer = _LAYER.match(spec.name)
        by_layer[layer[1] if layer else ""].append(spec)
    for spec in by_layer.pop("", []):
        place_tensor(model, spec.name, _in_float32(read, spec))
    model.tie_weights()
    handles = []
    for name, specs in by_layer.items():
        layer_module = model.get_submodule(name)
        handles.append(layer_module.register_forward_pre_hook(partial(_fill, model, specs, read)))
        handles.append(layer_module.register_forward_hook(partial(_empty, model, specs)))
    try:
        logits_1TV: Tensor = model.eval()(input_ids=ids_1T, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return logits_1TV[0].float()


def _fill(model: nn.Module, specs: Sequence[TensorSpec], read: Read, *_: Any) -> None:
    for spec in specs:
        place_tensor(model, spec.name, _in_float32(read, spec))


def _empty(model: nn.Module, specs: Sequence[TensorSpec], *_: Any) -> None:
    for spec in specs:
        place_tensor(model, spec.name, torch.empty(spec.shape, device="meta"))


def _in_float32(read: Read, spec: TensorSpec) -> Tensor:
    """The weight as it is published, for a forward in float32 on the CPU."""
    return read(spec.name, spec.dtype).to("cpu", torch.float32)
