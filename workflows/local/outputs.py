"""Inputs and outputs of nodes: defaults, files that a step wrote, values handed up, jsonPath on a watched object."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steps.errors import ConfigError
from workflows.local.expression_values import MissingName, render_value
from workflows.local.expressions import evaluate
from workflows.local.model import OUTPUTS_DIR, Parameter, Template
from workflows.local.variables import UnresolvedTag, nested_scope, substitute

_DISPLAY_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9-.]{0,61}[a-zA-Z0-9]")  # operator.go of Argo 4.1


def resolve_inputs(
    template: Template, arguments: Mapping[str, str], scope: Mapping[str, str], where: str
) -> dict[str, str]:
    """The template's inputs: argument, else value, else default; ConfigError when there is none."""
    inputs: dict[str, str] = {}
    for parameter in template.inputs:
        value = arguments.get(parameter.name)
        if value is None:
            value = parameter.value if parameter.value is not None else parameter.default
            if value is None:
                raise ConfigError(f"{where}: inputs.parameters.{parameter.name} of {template.name} was not supplied")
            value = substitute(value, scope, f"{where} input {parameter.name}")
        inputs[parameter.name] = value
    return inputs


def display_name(template: Template, scope: Mapping[str, str], where: str) -> str:
    """The node's name on a screen, "" for its own; ConfigError where Argo would mark the node as Error."""
    if not template.display_name:
        return ""
    shown = substitute(template.display_name, scope, f"{where} display name")
    if not _DISPLAY_NAME.fullmatch(shown):
        raise ConfigError(f"{where}: display name {shown!r} does not match {_DISPLAY_NAME.pattern}")
    return shown


def collect_files(
    template: Template, outputs_dir: Path, scope: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """(parameters, artifact paths) that a step left; ConfigError names the first required one that is missing."""
    values: dict[str, str] = {}
    for parameter in template.outputs:
        source = parameter.value_from
        if source is None:
            values[parameter.name] = substitute(parameter.value or "", scope, f"output {parameter.name}")
            continue
        value = _read(_local_path(source.path or "", outputs_dir), source.default)
        if value is None:
            raise ConfigError(f"wait: Error (exit code 64): output {parameter.name}: no such file {source.path}")
        values[parameter.name] = value
    artifacts: dict[str, str] = {}
    for artifact in template.artifacts:
        path = _local_path(artifact.path or "", outputs_dir)
        if path.exists():
            artifacts[artifact.name] = str(path)
        elif not artifact.optional:
            raise ConfigError(f"wait: Error (exit code 64): artifact {artifact.name}: no such file {artifact.path}")
    return values, artifacts


def _local_path(path: str, outputs_dir: Path) -> Path:
    return outputs_dir / path.removeprefix(f"{OUTPUTS_DIR}/")


def _read(path: Path, default: str | None) -> str | None:
    if not path.is_file():
        return default
    return path.read_text().removesuffix("\n")  # Argo drops one newline, no more


def resolve_outputs(template: Template, scope: Mapping[str, str], where: str) -> tuple[dict[str, str], dict[str, str]]:
    """(parameters, artifacts) of a dag or steps template from its children's variables."""
    values = {item.name: _handed_up(item, scope, f"{where} output {item.name}") for item in template.outputs}
    artifacts: dict[str, str] = {}
    for artifact in template.artifacts:
        try:
            artifacts[artifact.name] = substitute(artifact.from_ or "", scope, f"{where} artifact {artifact.name}")
        except UnresolvedTag:
            if not artifact.optional:
                raise
    return values, artifacts


def _handed_up(parameter: Parameter, scope: Mapping[str, str], where: str) -> str:
    source = parameter.value_from
    if source is None:
        return substitute(parameter.value or "", scope, where)
    try:
        if source.expression is not None:
            return render_value(evaluate(source.expression, nested_scope(scope)))
        return substitute(source.parameter or "", scope, where)
    except (UnresolvedTag, MissingName):
        if source.default is None:
            raise
        return source.default


def json_path(path: str, document: Any) -> str | None:
    """`{.a.b[0].c}` and `{.a[?(@.name=="x")].c}` on a document: the value as text, None when nothing is there."""
    match = re.fullmatch(r"\{(.*)\}", path)
    steps = re.findall(r'\.([\w-]+)|\[(\d+)\]|\[\?\(@\.([\w-]+)\s*==\s*"([^"]*)"\)\]', match[1]) if match else []
    rebuilt = re.sub(r'\.[\w-]+|\[\d+\]|\[\?\(@\.[\w-]+\s*==\s*"[^"]*"\)\]', "", match[1]) if match else path
    if rebuilt or not steps:
        raise ConfigError(f'jsonPath {path!r} is outside the subset {{.a.b[0][?(@.name=="x")].c}}')
    for name, index, key, wanted in steps:
        document = _step(document, name, index, key, wanted)
    return None if document is None else render_value(document)


def _step(document: Any, name: str, index: str, key: str, wanted: str) -> Any:
    if name:
        return document.get(name) if isinstance(document, dict) else None
    if not isinstance(document, list):
        return None
    if index:
        return document[int(index)] if int(index) < len(document) else None
    return next((item for item in document if isinstance(item, dict) and str(item.get(key)) == wanted), None)
