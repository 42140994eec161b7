"""Reads a YAML mapping field by field and refuses whatever nobody asked for, by name."""

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from steps.errors import ConfigError


def refuse(where: str, problem: str) -> NoReturn:
    raise ConfigError(f"{where}: {problem}")


def scalar_text(value: object, where: str) -> str:
    """A YAML scalar as Argo's AnyString reads it: `5` and `"5"` are one value, `true` is "true"."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    refuse(where, f"must be a string, not {type(value).__name__}")


def _tagged(value: object) -> Iterator[str]:
    if isinstance(value, str):
        if "{{" in value:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tagged(item)
    elif isinstance(value, list):
        for item in value:
            yield from _tagged(item)


class Fields:
    """One mapping of a manifest. Call `close` at the end: a field that was neither read nor ignored is an error."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            refuse(where, f"must be a mapping, not {type(value).__name__}")
        self._left: dict[str, Any] = {str(key): item for key, item in value.items() if item is not None}
        self.where = where

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def has(self, name: str) -> bool:
        return name in self._left

    def text(self, name: str, default: str = "") -> str:
        value = self.take(name)
        return default if value is None else scalar_text(value, f"{self.where}.{name}")

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if name in self._left else None

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if not value:
            refuse(self.where, f"{name} is missing")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            refuse(f"{self.where}.{name}", "must be true or false")
        return value

    def count(self, name: str) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            refuse(f"{self.where}.{name}", "must be a whole number of at least 1")
        return value

    def list(self, name: str) -> list[Any]:
        value = self.take(name)
        if value is None:
            return []
        if not isinstance(value, list):
            refuse(f"{self.where}.{name}", "must be a list")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(scalar_text(item, f"{self.where}.{name}") for item in self.list(name))

    def below(self, name: str) -> "Fields":
        """The mapping under `name`, empty when it is absent."""
        return Fields(self.take(name) or {}, f"{self.where}.{name}")

    def ignore(self, *names: str) -> tuple[str, ...]:
        """Fields that change nothing on this machine. Returns their texts that hold tags (`{{...}}`)."""
        return tuple(text for name in names for text in _tagged(self._left.pop(name, None)))

    def close(self) -> None:
        if self._left:
            names = ", ".join(sorted(self._left))
            refuse(self.where, f"field {names} is not known to the local executor; remove it or run on a cluster")
