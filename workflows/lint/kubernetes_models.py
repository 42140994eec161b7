"""Kinds of Kubernetes against the models of its Python client, unknown fields refused.

The models are made from the API's OpenAPI description; each says its fields, their types and which are required.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from kubernetes import client

from workflows.lint.model import Body

_LIST = re.compile(r"list\[(.+)\]")
_MAP = re.compile(r"dict[(\[](?:str), (.+)[)\]]")
_PLAIN: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "datetime": (str,),
}
_GROUPS = (
    "",
    "apps",
    "autoscaling",
    "batch",
    "networking.k8s.io",
    "policy",
    "rbac.authorization.k8s.io",
    "scheduling.k8s.io",
    "storage.k8s.io",
)
_QUANTITIES = ("limits", "requests", "capacity", "hard", "overhead", "size_limit", "divisor")
"""Fields whose models say text, while the API takes numbers as well."""


@cache
def _model(name: str) -> Any:
    return getattr(client, name, None)


def model_of(body: Body) -> str | None:
    """Name of the model for a manifest; None for a kind that is not Kubernetes' own."""
    group, _, version = str(body.get("apiVersion") or "").rpartition("/")
    if group not in _GROUPS:
        return None
    name = version[:1].upper() + version[1:] + str(body.get("kind"))
    return name if _model(name) is not None else None


def problems(value: object, model: str, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, problem) of everything in `value` that this type does not take."""
    if value is None:
        return
    if found := _LIST.fullmatch(model):
        if not isinstance(value, list):
            yield path, f"it must be a list, not {value!r}"
            return
        for index, item in enumerate(value):
            name = item.get("name", index) if isinstance(item, dict) else index
            yield from problems(item, found[1], f"{path}[{name}]")
    elif found := _MAP.fullmatch(model):
        if not isinstance(value, dict):
            yield path, f"it must be a mapping, not {value!r}"
            return
        for key, item in value.items():
            yield from problems(item, found[1], f"{path}.{key}" if path else str(key))
    elif model in _PLAIN:
        if not isinstance(value, _PLAIN[model]) or (isinstance(value, bool) and model != "bool"):
            yield path, f"it must be {model}, not {value!r}"
    elif model != "object" and not model.startswith("dict("):
        yield from _fields(value, model, path)


def _fields(value: object, model: str, path: str) -> Iterator[tuple[str, str]]:
    known = _model(model)
    if not isinstance(value, dict):
        yield path, f"it must be a mapping, not {value!r}"
        return
    names = {wire: attribute for attribute, wire in known.attribute_map.items()}
    for key, item in value.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in names:
            yield where, "there is no such field"
        else:
            taken = _as_text(item) if names[key] in _QUANTITIES else item
            yield from problems(taken, known.openapi_types[names[key]], where)
    yield from _missing(value, known, names, path)


def _as_text(quantities: object) -> object:
    if isinstance(quantities, dict):
        return {key: _as_text(value) for key, value in quantities.items()}
    return str(quantities) if isinstance(quantities, int | float) else quantities


def _missing(value: Body, known: Any, names: dict[str, str], path: str) -> Iterator[tuple[str, str]]:
    """The models refuse a required field that is None when they are made."""
    given = {names[key]: item for key, item in value.items() if key in names}
    configuration = client.Configuration()
    configuration.client_side_validation = True
    try:
        known(**given, local_vars_configuration=configuration)
    except ValueError as error:
        yield path, str(error).split("\n")[0].rstrip(".")
