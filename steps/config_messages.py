"""What a person reads when a setting is wrong: `dotted.path = given: what is allowed`."""

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, get_args, get_origin, get_type_hints

from steps.config import RunConfig

_SHOWN_CHARACTERS = 60
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

_ALLOWED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than": lambda ctx: f"must be greater than {ctx['gt']:g}",
    "greater_than_equal": lambda ctx: f"must be at least {ctx['ge']:g}",
    "less_than": lambda ctx: f"must be less than {ctx['lt']:g}",
    "less_than_equal": lambda ctx: f"must be at most {ctx['le']:g}",
    "int_type": lambda ctx: "must be an integer",
    "int_from_float": lambda ctx: "must be an integer",
    "float_type": lambda ctx: "must be a number",
    "bool_type": lambda ctx: "must be true or false",
    "string_type": lambda ctx: "must be a string",
    "string_pattern_mismatch": lambda ctx: f"must match {ctx['pattern']} (lower-case letters, digits, hyphens)",
    "dataclass_type": lambda ctx: "must be a table of settings",
    "dict_type": lambda ctx: "must be a table",
    "tuple_type": lambda ctx: "must be an array",
    "too_long": lambda ctx: f"must have {ctx['max_length']} values, not {ctx['actual_length']}",
    "missing": lambda ctx: "is missing",
}


@lru_cache(maxsize=64)
def field_types(cls: type) -> Mapping[str, Any]:
    """The declared type of every field of a configuration class, without its ranges."""
    return get_type_hints(cls)


def field_type(keys: Sequence[str]) -> Any:
    """The declared type at a dotted path of RunConfig; None where there is no such field."""
    hint: Any = RunConfig
    for key in keys:
        hint = field_types(hint).get(key) if is_dataclass(hint) and isinstance(hint, type) else None
    return hint


def dotted(keys: Sequence[str | int]) -> str:
    """`train.optimizer.betas[1]`."""
    text = ""
    for key in keys:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            name = key if _BARE_KEY.fullmatch(key) else json.dumps(key)
            text += f".{name}" if text else name
    return text


def shown(value: object) -> str:
    """A value as TOML would write it, cut short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def describe(error: Mapping[str, Any]) -> str:
    """One line for one of pydantic's errors (an item of `ValidationError.errors()`)."""
    keys, kind, context = error["loc"], error["type"], error.get("ctx", {})
    if kind == "unexpected_keyword_argument":
        return unknown_key([str(key) for key in keys])
    if kind == "missing" and keys and isinstance(keys[-1], int):
        wanted = len(get_args(field_type([str(key) for key in keys[:-1]])))
        return f"{dotted(keys[:-1])} = {shown(error['input'])}: must have {wanted} values"
    if kind == "literal_error":
        allowed = _literal(error)
    else:
        allowed = _ALLOWED[kind](context) if kind in _ALLOWED else str(error["msg"])
    return f"{dotted(keys)} = {shown(error['input'])}: {allowed}"


def _literal(error: Mapping[str, Any]) -> str:
    names = [str(name) for name in get_args(field_type([str(key) for key in error["loc"]]))]
    near = difflib.get_close_matches(str(error["input"]), names, n=1)
    return f"must be one of {', '.join(names)}" + (f"; did you mean {near[0]}?" if near else "")


def unknown_key(keys: Sequence[str]) -> str:
    """The nearest valid name: a sibling, or the same name elsewhere, or a similar one elsewhere."""
    *parents, name = keys
    table = dotted(parents)
    owner = field_type(parents)
    siblings = [field.name for field in fields(owner)] if is_dataclass(owner) else []
    everywhere = list(_all_paths(RunConfig, ()))
    namesakes = [path for path in everywhere if path[-1] == name]
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    if near:
        hint = f"did you mean {dotted([*parents, near[0]])}?"
    elif namesakes:
        hint = f"did you mean {' or '.join(dotted(path) for path in namesakes)}?"
    else:
        similar = difflib.get_close_matches(name, siblings or [path[-1] for path in everywhere], n=1, cutoff=0.5)
        matches = [path for path in everywhere if similar and path[-1] == similar[0]]
        if siblings:
            matches = [(*parents, similar[0])] if similar else []
        known = f"{table + ' has' if table else 'there are'} {', '.join(siblings)}"
        hint = f"did you mean {dotted(matches[0])}?" if matches else known
    return f"{dotted(keys)}: unknown setting; {hint}"


def _all_paths(cls: type, prefix: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, hint in field_types(cls).items():
        yield (*prefix, name)
        if get_origin(hint) is None and isinstance(hint, type) and is_dataclass(hint):
            yield from _all_paths(hint, (*prefix, name))
