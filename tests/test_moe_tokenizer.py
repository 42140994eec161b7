from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moe.tokenizer import build_char_tokenizer, decode_response, encode_prompt, load_tokenizer
from tests.checkpoint_layouts import ALPHABET as CHAT_ALPHABET
from tests.checkpoint_layouts import CHAT_TEMPLATE

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


def _save(folder: Path, **special_tokens: str) -> None:
    backend = Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens).save_pretrained(folder)


def test_a_tokenizer_without_a_pad_token_pads_with_its_end(tmp_path: Path) -> None:
    _save(tmp_path, eos_token="<end>")
    assert load_tokenizer(tmp_path).pad_token_id == 0


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    _save(tmp_path)
    with pytest.raises(ValueError, match="no eos token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", ""])
def test_a_corrupt_tokenizer_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    build_char_tokenizer(ALPHABET).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"^tokenizer of [^\n]*$"):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(ValueError, match="none of tokenizer.json"):
        load_tokenizer(tmp_path)


CHAT = [{"role": "system", "content": "sort"}, {"role": "user", "content": "cab"}]


def chat_tokenizer(template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = build_char_tokenizer(CHAT_ALPHABET)
    tokenizer.chat_template = template
    return tokenizer


def test_messages_go_through_the_chat_template_with_one_bos_up_to_the_answer() -> None:
    tokenizer = chat_tokenizer()
    ids = encode_prompt(tokenizer, CHAT)
    assert ids.count(1) == 1 and ids[0] == 1
    assert decode_response(tokenizer, ids) == "system|sort|user|cab|assistant|"


def test_a_template_without_bos_gets_none() -> None:
    tokenizer = chat_tokenizer("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert encode_prompt(tokenizer, CHAT) == encode_prompt(tokenizer, "sortcab")[1:]


def test_a_chat_template_survives_saving(tmp_path: Path) -> None:
    chat_tokenizer().save_pretrained(tmp_path)
    assert encode_prompt(load_tokenizer(tmp_path), CHAT) == encode_prompt(chat_tokenizer(), CHAT)


def test_messages_need_a_chat_template() -> None:
    with pytest.raises(ValueError, match='no chat template; add chat_template.jinja .* task.prompt_format = "plain"'):
        encode_prompt(build_char_tokenizer(CHAT_ALPHABET), CHAT)


def test_messages_that_the_template_refuses_are_shown() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="it refuses system: 'sort' user: 'cab': roles must alternate"):
        encode_prompt(chat_tokenizer(template), CHAT)
