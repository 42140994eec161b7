"""The user's rows: one JSON object a line, UTF-8."""

import io
import json
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from steps.adapters.store import read_uri
from steps.config import TaskConfig
from steps.errors import DataError
from steps.records import Prompt
from steps.tasks.dataset import PRINTABLE_ASCII, Dataset, make_dataset, make_prompt
from steps.tasks.verifiers import answer_problem

_KEYS = ("prompt", "answer", "id", "meta")
_ROLES = ("system", "user", "assistant")
_BOM = b"\xef\xbb\xbf"


class BadRow(Exception):
    """What is wrong with one line; the reader adds file and line."""


def build_jsonl(task: TaskConfig, seed: int) -> Dataset:
    """The rows of `train_path`, shuffled by the seed; held out are those of `heldout_path`, or the last
    `heldout_size` of the shuffle.

    Raises:
        DataError: a row is wrong, a prompt is in both files, or there are too few rows.
    """
    rows = _read(task.train_path, task)
    lines = {prompt.text: line for line, prompt in rows}
    train = [prompt for _, prompt in rows]
    random.Random(f"jsonl/{seed}").shuffle(train)
    if task.heldout_path:
        heldout = _read_heldout(task, lines)
    else:
        if len(train) <= task.heldout_size:
            raise DataError(
                f"{task.train_path}: {len(train)} rows, of which task.heldout_size = {task.heldout_size} are held out, "
                "leave none to train on (add rows, lower task.heldout_size or give task.heldout_path)"
            )
        train, heldout = train[: -task.heldout_size], train[-task.heldout_size :]
    return make_dataset(train, heldout, PRINTABLE_ASCII if task.verifier == "regex" else "")


def _read_heldout(task: TaskConfig, train_lines: dict[str, int]) -> list[Prompt]:
    rows = _read(task.heldout_path, task)
    for line, prompt in rows:
        if prompt.text in train_lines:
            raise DataError(
                f"{task.heldout_path}:{line}: this prompt is also in {task.train_path}:{train_lines[prompt.text]} "
                "(remove one: held-out prompts must not be trained on)"
            )
    return [prompt for _, prompt in rows]


def _read(path: str, task: TaskConfig) -> list[tuple[int, Prompt]]:
    """Read `prompt`, `answer` and optional `id`, `meta` of every line, with the line's number; an id is kept as
    meta["id"]. Blank lines are skipped; the task's verifier must be able to use the answers.

    Raises:
        DataError: `FILE:LINE: reason (what to do)` for the first line that is wrong.
    """
    rows: list[tuple[int, Prompt]] = []
    line_of_text: dict[str, int] = {}
    line_of_id: dict[str, int] = {}
    for line, raw in _lines(path):
        try:
            prompt = _prompt(parse_row(raw), task)
            _refuse_duplicate(line_of_text, prompt.text, line, "prompt")
            if "id" in prompt.meta:
                _refuse_duplicate(line_of_id, str(prompt.meta["id"]), line, "id")
        except BadRow as error:
            raise DataError(f"{path}:{line}: {error}") from error
        rows.append((line, prompt))
    if not rows:
        raise DataError(f"{path}: no rows (write one JSON object with prompt and answer a line)")
    return rows


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank, without the byte order mark that some editors write."""
    try:
        with _open(path) as file:
            for line, raw in enumerate(file, start=1):
                if line == 1:
                    raw = raw.removeprefix(_BOM)
                if raw.strip():
                    yield line, raw
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file (check the path in the configuration)") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: can't be read: {reason} (give a readable JSONL file)") from error


def _open(path: str) -> BinaryIO:
    """A file, or the object at an s3:// URI: a cluster's pods share no folder with whoever wrote the rows."""
    return io.BytesIO(read_uri(path)) if path.startswith("s3://") else open(path, "rb")


def _refuse_duplicate(seen: dict[str, int], value: str, line: int, what: str) -> None:
    first = seen.setdefault(value, line)
    if first != line:
        raise BadRow(f"the {what} {_shown(value)} is already on line {first} (keep one of the two)")


def _prompt(row: dict[str, Any], task: TaskConfig) -> Prompt:
    for key in row:
        if key not in _KEYS:
            raise BadRow(
                f"unknown key {_shown(key)} (known are prompt, answer, id and meta; other data goes into meta)"
            )
    is_chat = isinstance(row.get("prompt"), list)
    content = parse_messages(row["prompt"]) if is_chat else _text(row, "prompt")
    if is_chat and task.prompt_format == "plain":
        raise BadRow('prompt is a list of messages (set task.prompt_format = "chat", or write one string)')
    answer = _text(row, "answer")
    problem = answer_problem(task.verifier, answer)
    if problem:
        raise BadRow(f"{problem} (correct it, or choose another task.verifier)")
    return make_prompt(content, answer, _meta(row))


def parse_messages(raw: Sequence[Any]) -> list[dict[str, str]]:
    """The turns of a prompt; BadRow for what is none, and for turns that don't end with the user's."""
    messages: list[dict[str, str]] = []
    for number, message in enumerate(raw, start=1):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise BadRow(f"message {number} of prompt is not an object of role and content (correct it)")
        if message["role"] not in _ROLES:
            raise BadRow(f"role of message {number} is {_shown(str(message['role']))} (use {', '.join(_ROLES)})")
        if message["role"] == "system" and number > 1:
            raise BadRow(f"message {number} is the system's (only the first one may be)")
        if not isinstance(message["content"], str) or not message["content"].strip():
            raise BadRow(f"content of message {number} is no text (write it, or remove the message)")
        messages.append({"role": message["role"], "content": message["content"]})
    if not messages or messages[-1]["role"] != "user":
        raise BadRow("prompt does not end with a message of the user (the policy's answer follows it)")
    return messages


def _text(row: dict[str, Any], key: str) -> str:
    if key not in row:
        raise BadRow(f"{key} is missing (every row needs prompt and answer)")
    value = row[key]
    if not isinstance(value, str):
        raise BadRow(f"{key} is {_json_type(value)}, not a string (put it in quotes)")
    if not value.strip():
        raise BadRow(f"{key} is empty (write it, or remove the row)")
    return value


def _meta(row: dict[str, Any]) -> dict[str, Any]:
    meta = row.get("meta", {})
    if not isinstance(meta, dict):
        raise BadRow(f"meta is {_json_type(meta)}, not an object (write {{...}} or leave it out)")
    if "id" not in row:
        return meta
    identifier = row["id"]
    if isinstance(identifier, bool) or not isinstance(identifier, str | int) or identifier == "":
        raise BadRow(f"id is {_json_type(identifier)}, not a string or an integer (correct it or leave it out)")
    if "id" in meta:
        raise BadRow("id is given twice, in the row and in meta (keep one)")
    return {**meta, "id": identifier}


def parse_row(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise BadRow(f"byte {error.start + 1} of the line is not UTF-8 (save the file as UTF-8)") from error
    try:
        row = json.loads(text, parse_constant=_refuse_constant, parse_float=_float, object_pairs_hook=_object)
        if b"\\u" in raw:
            _refuse_unstorable(row)
    except json.JSONDecodeError as error:
        raise BadRow(f"not JSON: {error.msg} at column {error.colno} (write one JSON object a line)") from error
    except RecursionError as error:
        raise BadRow("nested too deeply (flatten it)") from error
    except ValueError as error:
        raise BadRow(f"not usable JSON: {error} (shorten the number)") from error
    if not isinstance(row, dict):
        raise BadRow(f"{_json_type(row)}, not an object (write {{...}} with prompt and answer)")
    return row


def _refuse_constant(name: str) -> float:
    raise BadRow(f"{name} is not JSON (write null, or leave it out)")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadRow(f"{text[:40]} is too large for a number (write it as a string)")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise BadRow(f"the key {_shown(twice)} is there twice (keep one)")
    return result


def _refuse_unstorable(row: object) -> None:
    """Escapes can spell a lone surrogate, which is no character, or NUL, which PostgreSQL can't store."""
    text = json.dumps(row, ensure_ascii=False)
    if "\\u0000" in text.replace("\\\\", ""):
        raise BadRow("it holds the character U+0000 (remove it)")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow("it holds half of a surrogate pair (write the character itself)") from error


def _json_type(value: object) -> str:
    names: list[tuple[type, str]] = [(bool, "a boolean"), (int, "a number"), (float, "a number"), (str, "a string")]
    names += [(list, "an array"), (dict, "an object")]
    return next((name for kind, name in names if isinstance(value, kind)), "null")


def _shown(text: str) -> str:
    return json.dumps(text if len(text) <= 40 else text[:37] + "...")
