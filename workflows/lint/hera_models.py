"""Argo's kinds against Hera's models, unknown fields refused: what there is without Argo's published schema.

The models pass over what they don't know; a field that does not come out again is one that they don't know.
"""

from collections.abc import Iterator
from typing import Any

from hera.workflows import models
from pydantic import BaseModel, ValidationError

from workflows.lint.model import Body


def problems(body: Body, kind: str) -> Iterator[tuple[str, str]]:
    """(path, problem) of everything that the models refuse or drop."""
    model: type[BaseModel] = getattr(models, kind)
    try:
        parsed = model.model_validate(body)
    except ValidationError as error:
        for found in error.errors(include_url=False):
            yield ".".join(map(str, found["loc"])), found["msg"]
        return
    yield from _dropped(body, parsed.model_dump(mode="json", by_alias=True, exclude_unset=True), "")


def _dropped(given: Any, kept: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            where = f"{path}.{key}" if path else str(key)
            if key not in kept:
                yield where, "there is no such field"
            else:
                yield from _dropped(value, kept[key], where)
    elif isinstance(given, list) and isinstance(kept, list):
        for index, (left, right) in enumerate(zip(given, kept, strict=True)):
            yield from _dropped(left, right, f"{path}[{index}]")
