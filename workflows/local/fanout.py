"""withItems, withParam, withSequence: one call becomes many; and what later calls see of their results."""

import json
from dataclasses import dataclass
from typing import Any

from steps.errors import ConfigError
from workflows.local.model import Call, Sequence
from workflows.local.status import NodeStatus
from workflows.local.variables import FlatScope, substitute


@dataclass(frozen=True, slots=True)
class Item:
    """One copy of a call: the suffix of its node name, and its {{item}} variables."""

    suffix: str
    scope: dict[str, str]


@dataclass(frozen=True, slots=True)
class CallResult:
    """A finished call: one node, or the nodes of its items in order. phase is the group's where it was expanded."""

    phase: str
    nodes: tuple[NodeStatus, ...]
    expanded: bool = False


def expand(call: Call, scope: FlatScope, where: str) -> list[Item]:
    """The items of a call; raises ConfigError where Argo would mark the node as Error."""
    if call.with_param is not None:
        text = substitute(call.with_param, scope, f"{where} withParam")
        try:
            values = json.loads(text)
        except json.JSONDecodeError:
            values = None
        if not isinstance(values, list):
            raise ConfigError(f"{where}: withParam value could not be parsed as a JSON list: {text.strip()[:200]}")
    elif call.with_sequence is not None:
        values = _sequence(call.with_sequence, scope, f"{where} withSequence")
    else:
        values = [_substituted(value, scope, f"{where} withItems") for value in call.with_items or ()]
    return [Item(f"({index}:{_label(value)})", _item_scope(value)) for index, value in enumerate(values)]


def _substituted(value: Any, scope: FlatScope, where: str) -> Any:
    if isinstance(value, str):
        return substitute(value, scope, where)
    if isinstance(value, list):
        return [_substituted(item, scope, where) for item in value]
    if isinstance(value, dict):
        return {key: _substituted(item, scope, where) for key, item in value.items()}
    return value


def _sequence(sequence: Sequence, scope: FlatScope, where: str) -> list[str]:
    start = _whole(sequence.start, scope, f"{where}.start")
    if sequence.count is not None:
        numbers = range(start, start + _whole(sequence.count, scope, f"{where}.count"))
    else:
        end = _whole(sequence.end or "", scope, f"{where}.end")
        numbers = range(start, end + 1) if start <= end else range(start, end - 1, -1)
    if not sequence.format:
        return [str(number) for number in numbers]
    try:
        return [sequence.format % number for number in numbers]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}.format {sequence.format!r}: {error}") from None


def _whole(text: str, scope: FlatScope, where: str) -> int:
    value = substitute(text, scope, where)
    try:
        return int(value, 10)
    except ValueError:
        raise ConfigError(f"{where}: {value!r} is not a whole number") from None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _label(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}:{_text(value[key])}" for key in sorted(value))
    return _text(value)


def _item_scope(value: Any) -> dict[str, str]:
    scope = {"item": _text(value)}
    if isinstance(value, dict):
        scope |= {f"item.{key}": _text(member) for key, member in value.items()}
    return scope


def result_scope(prefix: str, result: CallResult) -> dict[str, str]:
    """`steps.NAME...` or `tasks.NAME...` variables of a finished call.

    Of an expanded call they are JSON lists over the items that succeeded, in order, as Argo aggregates them: without a
    success there is no `outputs.parameters.NAME`.
    """
    if not result.expanded:
        node = result.nodes[0]
        scope = {f"{prefix}.outputs.parameters.{name}": value for name, value in node.outputs.items()}
        scope |= {f"{prefix}.outputs.artifacts.{name}": path for name, path in node.artifacts.items()}
        scope[f"{prefix}.status"] = node.phase
        if node.exit_code:
            scope[f"{prefix}.exitCode"] = node.exit_code
        return scope
    succeeded = [node.outputs for node in result.nodes if node.phase == "Succeeded" and node.outputs]
    scope = {f"{prefix}.outputs.parameters": json.dumps(succeeded, separators=(",", ":"))}
    for name in dict.fromkeys(name for outputs in succeeded for name in outputs):
        values = [outputs[name] for outputs in succeeded if name in outputs]
        scope[f"{prefix}.outputs.parameters.{name}"] = _json_list(values)
    return scope


def _json_list(values: list[str]) -> str:
    """A JSON list of strings; of the values themselves if every one is a JSON map or list (Argo's rule)."""
    try:
        parsed = [json.loads(value) for value in values]
    except json.JSONDecodeError:
        parsed = []
    embed = bool(parsed) and all(isinstance(value, dict | list) for value in parsed)
    return json.dumps(parsed if embed else values, separators=(",", ":"))


def group_phase(nodes: tuple[NodeStatus, ...]) -> str:
    """The phase of an expanded call: the last unsuccessful item's, else Succeeded."""
    phases = [node.phase for node in nodes if node.unsuccessful]
    return phases[-1] if phases else "Succeeded"
