"""The frozen copy of a data set: what init_run stores once and every later step reads."""

import json
import re
from collections.abc import Sequence
from typing import Any

from steps.errors import DataError
from steps.records import Prompt
from steps.tasks.dataset import Dataset, make_prompt
from steps.tasks.jsonl import BadRow, parse_messages, parse_row

_UID_AT_END = re.compile(rb'"uid": "([0-9a-f]{16})"\}$')
_HEADER_TYPES: dict[str, tuple[type, ...]] = {"alphabet": (str,), "train": (int,), "heldout": (int,)}
_ROW_TYPES: dict[str, tuple[type, ...]] = {"uid": (str,), "prompt": (str, list), "answer": (str,), "meta": (dict,)}


def dataset_to_jsonl(dataset: Dataset) -> bytes:
    """The frozen copy: a header with the alphabet and the counts, then training and held-out prompts in order."""
    header = {"alphabet": dataset.alphabet, "train": len(dataset.train), "heldout": len(dataset.heldout)}
    rows = [header, *map(_row, dataset.train), *map(_row, dataset.heldout)]
    return "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows).encode()


def _row(prompt: Prompt) -> dict[str, Any]:
    content = prompt.messages or prompt.text
    return {"uid": prompt.uid, "prompt": content, "answer": prompt.answer, "meta": prompt.meta}


def dataset_from_jsonl(data: bytes) -> Dataset:
    """Read back what `dataset_to_jsonl` wrote.

    Raises:
        DataError: the copy is not what it says: cut short, changed, or not such a copy.
    """
    frozen = FrozenDataset(data)
    return frozen.select(frozen.train_uids, frozen.heldout_uids)


class FrozenDataset:
    """A frozen copy whose rows are parsed only where they are asked for: a plan needs a few rows of many.

    Every method raises DataError when the copy is cut short, changed, or not such a copy.
    """

    def __init__(self, data: bytes) -> None:
        self._lines = data.split(b"\n")
        header = _frozen(self._lines[0], 1, _HEADER_TYPES)
        self._alphabet: str = header["alphabet"]
        num_train, num_heldout = header["train"], header["heldout"]
        if min(num_train, num_heldout) < 0 or len(self._lines) != num_train + num_heldout + 2 or self._lines[-1]:
            raise DataError("frozen data set: its number of rows is not the one in its header (restore the file)")
        uids = [_uid(raw, line) for line, raw in enumerate(self._lines[1:-1], start=2)]
        self.train_uids, self.heldout_uids = uids[:num_train], uids[num_train:]
        self._index = {uid: index for index, uid in enumerate(uids, start=1)}

    def select(self, train_uids: Sequence[str], heldout_uids: Sequence[str] = ()) -> Dataset:
        """Some of the prompts, in the order of their uids, with the whole copy's alphabet."""
        return Dataset(
            train=[self._prompt(uid) for uid in train_uids],
            heldout=[self._prompt(uid) for uid in heldout_uids],
            alphabet=self._alphabet,
        )

    def _prompt(self, uid: str) -> Prompt:
        if uid not in self._index:
            raise DataError(f"frozen data set: prompt {uid} is not in it (restore the file)")
        line = self._index[uid] + 1
        return _frozen_prompt(_frozen(self._lines[line - 1], line, _ROW_TYPES), line)


def _uid(raw: bytes, line: int) -> str:
    """The row's uid, without parsing the row: its keys are sorted, so the uid ends it."""
    found = _UID_AT_END.search(raw)
    if found is None:
        raise DataError(f"frozen data set, line {line}: not a row of a data set (restore the file)")
    return found[1].decode()


def _frozen_prompt(row: dict[str, Any], line: int) -> Prompt:
    content = row["prompt"]
    try:
        content = content if isinstance(content, str) else parse_messages(content)
    except BadRow as error:
        raise DataError(f"frozen data set, line {line}: {error}") from error
    prompt = make_prompt(content, row["answer"], row["meta"])
    if prompt.uid != row["uid"]:
        raise DataError(f"frozen data set, line {line}: uid does not match its content (restore the file)")
    return prompt


def _frozen(raw: bytes, line: int, types: dict[str, tuple[type, ...]]) -> dict[str, Any]:
    try:
        row = parse_row(raw)
    except BadRow as error:
        raise DataError(f"frozen data set, line {line}: {error}") from error
    if set(row) != set(types) or any(type(row[key]) not in kinds for key, kinds in types.items()):
        raise DataError(f"frozen data set, line {line}: not a row of a data set (restore the file)")
    return row
