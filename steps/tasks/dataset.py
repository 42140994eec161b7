"""A task's frozen prompts, and how a prompt gets its identity."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steps.config import TaskConfig
from steps.records import Prompt

Verifier = Callable[[Prompt, str], float]
"""Scores a response to a prompt, 0..1."""

PRINTABLE_ASCII = "".join(chr(code) for code in range(0x20, 0x7F))
"""Alphabet of responses where no answer shows which characters they need."""

_canonical_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """Prompts to train on and prompts to evaluate on; no text is in both."""

    train: list[Prompt]
    heldout: list[Prompt]
    alphabet: str
    """Every character of prompts and answers, sorted."""


def make_prompt(content: str | Sequence[dict[str, str]], answer: str, meta: dict[str, Any] | None = None) -> Prompt:
    """A prompt whose uid is the first 64 bits, in hexadecimal, of the SHA-256 of its content.

    A single message of the user is the same prompt as its text.
    """
    meta, messages = meta or {}, () if isinstance(content, str) else tuple(content)
    if len(messages) == 1 and messages[0]["role"] == "user":
        content, messages = messages[0]["content"], ()
    digest = hashlib.sha256(_canonical_json([messages or content, answer, meta]).encode())
    if isinstance(content, str):
        text = content
    else:
        text = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
    return Prompt(uid=digest.hexdigest()[:16], text=text, answer=answer, meta=meta, messages=messages)


def prompt_content(task: TaskConfig, prompt: Prompt) -> str | Sequence[Mapping[str, str]]:
    """What an engine encodes: the prompt's text, or its messages after the task's system prompt."""
    if task.prompt_format == "plain":
        return prompt.text
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    if task.system_prompt and messages[0]["role"] != "system":
        return [{"role": "system", "content": task.system_prompt}, *messages]
    return messages


def make_dataset(train: list[Prompt], heldout: list[Prompt], extra_characters: Iterable[str] = "") -> Dataset:
    """A data set whose alphabet is what prompts and answers use, and `extra_characters`."""
    characters = set(extra_characters)
    for prompt in (*train, *heldout):
        characters.update(prompt.text)
        characters.update(prompt.answer)
    return Dataset(train=train, heldout=heldout, alphabet="".join(sorted(characters)))
