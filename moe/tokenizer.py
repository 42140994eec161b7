"""Character-level tokenizers for models built from scratch, and text to token ids for any tokenizer."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from moe.pretrained import reading

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
PromptContent = str | Sequence[Mapping[str, str]]
"""Plain text, or the messages (`role`, `content`) that the tokenizer's chat template makes a text of."""
PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<pad>", "<bos>", "<eos>"


def build_char_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token a character: pad 0, bos 1, eos 2, then the distinct characters of `alphabet` in sorted order.

    It saves and reloads as a plain `PreTrainedTokenizerFast`. Raises ValueError for an empty alphabet.
    """
    if not alphabet:
        raise ValueError("tokenizer alphabet is empty: give at least one character")
    tokens = [PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, *sorted(set(alphabet))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS_TOKEN} $A", special_tokens=[(BOS_TOKEN, vocabulary[BOS_TOKEN])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, of this or any other kind; it pads with eos when it has no pad token.

    Raises ValueError of one line when the folder has no tokenizer or a corrupt one, or the tokenizer has no eos token.
    """
    # Without any file, transformers makes up an empty tokenizer of the model's type.
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"tokenizer of {folder}: none of {', '.join(_TOKENIZER_FILES)} is there; save one with the model"
        )
    with reading("tokenizer", folder):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer of {folder}: it has no eos token, so no response could end; set eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerBase, content: PromptContent) -> list[int]:
    """Token ids of a prompt.

    Of a text: bos and one id a character for a character tokenizer, `tokenizer(text)` for any other; text that spells a
    special token (such as "<eos>") stays characters under a character tokenizer. Of messages: what the tokenizer's chat
    template makes of them, up to where the assistant's answer begins, and no special token besides. Raises ValueError
    naming the first character that a character tokenizer does not know, for a tokenizer without a chat template, and
    for messages that its template refuses.
    """
    if not isinstance(content, str):
        return _encode_chat(tokenizer, content)
    return _encode_text(tokenizer, content)


def _encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    if not is_character_tokenizer(tokenizer):
        return list(tokenizer(text)["input_ids"])
    vocabulary = tokenizer.get_vocab()
    unknown = next((character for character in text if character not in vocabulary), None)
    if unknown is not None:
        raise ValueError(f"prompt {text!r}: character {unknown!r} is not in the tokenizer's alphabet; add it")
    return [tokenizer.bos_token_id, *(vocabulary[character] for character in text)]


def _encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"tokenizer of {tokenizer.name_or_path or 'the policy'} has no chat template; add chat_template.jinja to "
            'its folder, or set task.prompt_format = "plain"'
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        shown = " ".join(str(error).split())[:200]
        raise ValueError(f"chat template of the tokenizer: it refuses {_shown(messages)}: {shown}") from None
    # The template writes the bos token itself where the model wants one.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _shown(messages: Sequence[Mapping[str, str]]) -> str:
    return " ".join(f"{message['role']}: {message['content'][:20]!r}" for message in messages)[:100]


def decode_response(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of a response up to, and without, its first end-of-sequence token; special tokens are left out."""
    response = list(ids)
    if tokenizer.eos_token_id in response:
        response = response[: response.index(tokenizer.eos_token_id)]
    return str(tokenizer.decode(response, skip_special_tokens=True))


def is_character_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `tokenizer` came from `build_char_tokenizer`, also after it was saved and loaded again."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and isinstance(backend.model, models.WordLevel) and backend.decoder is not None
