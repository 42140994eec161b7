from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moe.tokenizer import build_char_tokenizer, decode_response, encode_prompt

ALPHABET = "\n 0123456789+->=<eos"


def test_special_tokens_come_first_then_the_sorted_characters() -> None:
    tokenizer = build_char_tokenizer("cab b")
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.get_vocab() == {"<pad>": 0, "<bos>": 1, "<eos>": 2, " ": 3, "a": 4, "b": 5, "c": 6}


@given(st.text(alphabet=ALPHABET, max_size=30))
def test_text_survives_encoding_and_decoding(text: str) -> None:
    tokenizer = build_char_tokenizer(ALPHABET)
    ids = encode_prompt(tokenizer, text)
    assert ids[0] == 1 and len(ids) == len(text) + 1
    assert decode_response(tokenizer, ids) == text


def test_a_saved_tokenizer_reloads_with_auto_tokenizer(tmp_path: Path) -> None:
    tokenizer = build_char_tokenizer(ALPHABET)
    tokenizer.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert encode_prompt(reloaded, "1 2\n<eos>") == encode_prompt(tokenizer, "1 2\n<eos>")
    assert reloaded("12>").input_ids == encode_prompt(tokenizer, "12>")
    assert decode_response(reloaded, encode_prompt(tokenizer, "1 2")) == "1 2"


def test_text_that_spells_a_special_token_stays_characters() -> None:
    tokenizer = build_char_tokenizer(ALPHABET)
    assert len(encode_prompt(tokenizer, "<eos>")) == 6
    assert 2 not in encode_prompt(tokenizer, "<eos>")


def test_decoding_stops_before_the_first_end_token() -> None:
    tokenizer = build_char_tokenizer("abc")
    assert decode_response(tokenizer, [3, 4, 2, 5, 0]) == "ab"


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(ValueError, match="'z'"):
        encode_prompt(build_char_tokenizer("abc"), "abz")


def test_an_empty_alphabet_is_refused() -> None:
    with pytest.raises(ValueError, match="alphabet is empty"):
        build_char_tokenizer("")


def test_another_tokenizer_encodes_by_its_own_rules() -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(["hello hello hello world"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert encode_prompt(tokenizer, "hello world") == tokenizer("hello world").input_ids
