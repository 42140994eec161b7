"""The probe of a publication: our forward of the weights as they are published, one layer in memory at a time."""

from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from moe.config import ModelConfig
from moe.model import build_model, empty_model, load_model
from moe.probe import PROBE_TOKENS, largest_difference, probe_tokens, read_probe, write_probe
from moe.publication import save_publication
from moe.tokenizer import build_char_tokenizer

FAMILIES = get_args(get_type_hints(ModelConfig)["family"])
VOCABULARY = 13


def publish(folder: Path, family: str = "qwen3_moe", dtype: str = "float32", seed: int = 0) -> None:
    shape = ModelConfig(family=family, hidden_size=32, moe_intermediate_size=32, num_experts=4)  # type: ignore[arg-type]
    save_publication(build_model(shape, VOCABULARY, seed), build_char_tokenizer("0123456789"), folder, dtype)


def full_forward(folder: Path, token_ids: tuple[int, ...]) -> list[float]:
    with torch.no_grad():
        logits_TV = load_model(folder, "float32")(input_ids=torch.tensor([token_ids])).logits[0, :-1]
    logprobs_TV = torch.log_softmax(logits_TV.float(), dim=-1)
    return logprobs_TV.gather(1, torch.tensor(token_ids[1:]).unsqueeze(1)).squeeze(1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_gives_what_the_whole_model_gives(tmp_path: Path, family: str) -> None:
    publish(tmp_path, family)
    probe = read_probe(tmp_path)
    assert largest_difference(probe, full_forward(tmp_path, probe.token_ids))[0] < 1e-6


def test_the_probe_is_of_the_rounded_weights_that_are_published(tmp_path: Path) -> None:
    publish(tmp_path, dtype="bfloat16")
    probe = read_probe(tmp_path)
    assert largest_difference(probe, full_forward(tmp_path, probe.token_ids))[0] < 1e-6


def test_the_layers_are_empty_again_afterwards(tmp_path: Path) -> None:
    publish(tmp_path)
    whole, model = load_model(tmp_path).state_dict(), empty_model(tmp_path)
    write_probe(model, lambda name, dtype: whole[name].to(dtype), torch.float32, tmp_path)
    inside = [parameter for name, parameter in model.named_parameters() if ".layers." in name]
    assert inside and all(parameter.is_meta for parameter in inside)


def test_other_weights_have_another_probe_and_equal_ones_the_same(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        publish(tmp_path / name, seed=seed)
    first, same, other = (read_probe(tmp_path / name) for name in ("a", "b", "c"))
    assert first == same
    assert largest_difference(first, other.logprobs)[0] > 1e-2


def test_the_tokens_fit_the_model_and_are_always_the_same() -> None:
    assert probe_tokens(50, 4096) == probe_tokens(50, 8192)
    assert len(probe_tokens(50, 4096)) == PROBE_TOKENS
    assert len(probe_tokens(50, 40)) == 39
    assert set(probe_tokens(50, 4096)) <= set(range(50))


def test_a_difference_names_the_token_and_what_is_no_number_is_infinite(tmp_path: Path) -> None:
    publish(tmp_path)
    probe = read_probe(tmp_path)
    off = list(probe.logprobs)
    off[4] += 0.5
    assert largest_difference(probe, off) == (pytest.approx(0.5), 5)
    off[4] = float("nan")
    assert largest_difference(probe, off) == (float("inf"), 5)
    assert largest_difference(probe, off[:-1])[0] == float("inf")
