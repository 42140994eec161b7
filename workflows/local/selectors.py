"""Kubernetes' label-selector syntax: over labels, and over paths into an object in conditions of resource templates."""

import re
from collections.abc import Callable

from steps.errors import ConfigError

Lookup = Callable[[str], str | None]
"""The value at a key; None when there is none."""

_TERM = re.compile(
    r"\s*(?:(?P<not>!)\s*(?P<absent>[\w./-]+)|(?P<key>[\w./-]+)\s*(?:(?P<op>==|=|!=)\s*(?P<value>[\w./-]*)"
    r"|\s(?P<set>in|notin)\s*\((?P<values>[^()]*)\))?)\s*"
)


def first_true(selector: str, lookup: Lookup) -> str:
    """The first term of `selector` that holds, "" when none does. ConfigError: it is not selector syntax."""
    return next((text for text, term in _terms(selector) if _holds(term, lookup)), "")


def all_true(selector: str, lookup: Lookup) -> bool:
    """Whether every term holds; an empty selector has none that could fail. ConfigError: as above."""
    return all(_holds(term, lookup) for _, term in _terms(selector))


def _terms(selector: str) -> list[tuple[str, re.Match[str]]]:
    found: list[tuple[str, re.Match[str]]] = []
    if not selector.strip():
        return found
    for text in re.split(r",(?![^()]*\))", selector):
        match = _TERM.fullmatch(text)
        if match is None:
            raise ConfigError(f"condition {text.strip()!r} is not label-selector syntax")
        found.append((text.strip(), match))
    return found


def _holds(term: re.Match[str], lookup: Lookup) -> bool:
    """A key that is absent fails every term but `!key`, `!=` and `notin`."""
    value = lookup(term["absent"] or term["key"])
    if term["not"]:
        return value is None
    if term["set"]:
        inside = value in [item.strip() for item in term["values"].split(",")]
        return inside if term["set"] == "in" else not inside
    if term["op"] == "!=":
        return value != term["value"]
    return value is not None if term["op"] is None else value == term["value"]
