"""A publication's tokenizer, as every engine uses it in the worker's own process."""

from transformers import PreTrainedTokenizerBase

from moe.tokenizer import PromptContent, encode_prompt
from steps.errors import DataError


def encode(tokenizer: PreTrainedTokenizerBase, content: PromptContent) -> list[int]:
    """Token ids of a prompt; DataError when the tokenizer can't represent it."""
    try:
        return encode_prompt(tokenizer, content)
    except ValueError as error:
        raise DataError(str(error)) from None
