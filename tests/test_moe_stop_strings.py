from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from moe.config import ModelConfig, SamplingConfig
from moe.model import build_model
from moe.sampler import Sampler
from moe.stop_strings import StopStrings
from moe.tokenizer import build_char_tokenizer

torch.set_num_threads(1)
ALPHABET = "abcde"
SAMPLING = SamplingConfig(max_new_tokens=24, max_prompt_tokens=8)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with tokens of several characters, and characters of several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    backend.train_from_iterator(["stop here\n\nstop there\n\n"] * 10, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


TOKENIZER = byte_tokenizer()


@given(
    st.text(alphabet="stop her\n\u00e9\u4e16", max_size=40),
    st.lists(st.text("stop\n\u00e9\u4e16", min_size=1, max_size=5), min_size=1),
)
def test_a_stop_string_is_found_at_the_token_that_completes_it(text: str, stops: list[str]) -> None:
    ids = TOKENIZER(text).input_ids
    watched = StopStrings(TOKENIZER, stops, 1)
    found = next((count for count, token in enumerate(ids, start=1) if watched.ends(0, token)), None)
    has_stop = [any(stop in TOKENIZER.decode(ids[:count]) for stop in stops) for count in range(1, len(ids) + 1)]
    assert found == (has_stop.index(True) + 1 if any(has_stop) else None)


def sampler(record_routing: bool = False) -> Sampler:
    tokenizer = build_char_tokenizer(ALPHABET)
    shape = ModelConfig(hidden_size=16, moe_intermediate_size=16, num_layers=1, num_experts=4)
    model = build_model(shape, vocab_size=len(tokenizer), seed=0)
    return Sampler(model, (2,), 0, tokenizer=tokenizer, record_routing=record_routing)


def test_a_response_ends_with_its_stop_string_and_is_the_beginning_of_the_one_without() -> None:
    tokenizer, drawn = build_char_tokenizer(ALPHABET), sampler(record_routing=True)
    prompts, seeds = [[1, 3, 4], [1, 5]] * 12, list(range(24))
    free = drawn.sample(prompts, seeds, SAMPLING)
    ended = 0
    for long, response in zip(free, drawn.sample(prompts, seeds, replace(SAMPLING, stop=("ab", "c"))), strict=True):
        length = len(response.response_ids)
        assert response.response_ids == long.response_ids[:length]
        assert response.logprobs == pytest.approx(long.logprobs[:length], abs=1e-5)
        text = tokenizer.decode(response.response_ids, skip_special_tokens=True)
        assert "ab" not in text[:-1] and "c" not in text[:-1]
        if length < len(long.response_ids):
            assert (response.finish_reason, text.endswith(("ab", "c"))) == ("stop", True)
            ended += 1
        assert response.expert_ids is not None and long.expert_ids is not None
        kept = response.expert_ids[:-1]
        assert torch.equal(kept, long.expert_ids[: len(kept)])
        assert bool((response.expert_ids[-1] == -1).all())
    assert ended > 5


def test_the_rest_of_the_batch_is_not_changed_by_a_stop_string_that_never_comes() -> None:
    drawn = sampler()
    prompts, seeds = [[1, 3, 4]] * 8, list(range(8))
    assert drawn.sample(prompts, seeds, replace(SAMPLING, stop=("zz",))) == drawn.sample(prompts, seeds, SAMPLING)


def test_stop_strings_need_a_tokenizer(tmp_path: Path) -> None:
    shape = ModelConfig(hidden_size=16, moe_intermediate_size=16, num_layers=1, num_experts=4)
    bare = Sampler(build_model(shape, vocab_size=8, seed=0), (2,), 0)
    with pytest.raises(ValueError, match="rollout.sampling.stop: the sampler needs a fast tokenizer"):
        bare.sample([[1]], [0], replace(SAMPLING, stop=("a",)))
