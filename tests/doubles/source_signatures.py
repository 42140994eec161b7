"""Signatures of a library's classes read from its source files, without importing it: that would need a GPU."""

import ast
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

Signature = list[tuple[str, str]]
"""Names of the parameters or fields in order, each with its default as source text ("" for none)."""


def source_of(package: str, *path: str) -> Path | None:
    """The file of an installed package that is not imported for that; None when it is not there."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / Path(*path)).is_file():
            return Path(folder) / Path(*path)
    return None


def method_in_source(file: Path, class_name: str, method: str) -> Signature:
    (node,) = [node for node in _class(file, class_name).body if getattr(node, "name", "") == method]
    assert isinstance(node, ast.FunctionDef)
    positional, keyword = node.args.args, node.args.kwonlyargs
    defaults = [""] * (len(positional) - len(node.args.defaults)) + [ast.unparse(d) for d in node.args.defaults]
    keyword_defaults = ["" if default is None else ast.unparse(default) for default in node.args.kw_defaults]
    return [(a.arg, d) for a, d in zip(positional + keyword, defaults + keyword_defaults, strict=True)]


def fields_in_source(file: Path, class_name: str) -> list[str]:
    """Names of the annotated fields of a dataclass."""
    return [
        node.target.id
        for node in _class(file, class_name).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def method_of(function: Callable[..., Any]) -> Signature:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, "" if p.default is inspect.Parameter.empty else repr(p.default)) for p in parameters]


def _class(file: Path, class_name: str) -> ast.ClassDef:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return node
    raise AssertionError(f"{file} has no class {class_name}")
