"""`{{name}}` and `{{=expression}}` in manifests, replaced from a flat scope such as {"inputs.parameters.worker": "3"}.

Argo leaves a tag that it can't resolve in place in some fields and fails in others; here it is always an error that
names the tag and where it stands, so that nothing runs with a literal `{{...}}` in its argv.
"""

import re
from collections.abc import Mapping

from steps.errors import ConfigError
from workflows.local.expression_values import ExpressionError, Value, render_value
from workflows.local.expressions import evaluate

_TAG = re.compile(r"\{\{(=?)(.*?)\}\}", re.DOTALL)

FlatScope = Mapping[str, str]


class UnresolvedTag(ConfigError):
    """A `{{name}}` that is not defined where it stands."""


def nested_scope(flat: FlatScope) -> dict[str, Value]:
    """{"a.b": "1"} -> {"a": {"b": "1"}}, as expressions see it. A name that is also a prefix keeps its members only."""
    nested: dict[str, Value] = {}
    for name in sorted(flat):
        level = nested
        *parents, leaf = name.split(".")
        for parent in parents:
            below = level.get(parent)
            if not isinstance(below, dict):
                below = level[parent] = {}
            level = below
        level[leaf] = flat[name]
    return nested


def substitute(text: str, scope: FlatScope, where: str) -> str:
    """`text` with its tags replaced; raises UnresolvedTag or ExpressionError, naming `where`."""

    def replace(match: re.Match[str]) -> str:
        if match[1]:
            return _evaluate_tag(match[2], scope, where)
        name = match[2].strip()
        if name not in scope:
            raise UnresolvedTag(f"{where}: {{{{{name}}}}} is not defined here")
        return scope[name]

    return _TAG.sub(replace, text)


def _evaluate_tag(expression: str, scope: FlatScope, where: str) -> str:
    try:
        return render_value(evaluate(expression.strip(), nested_scope(scope)))
    except ExpressionError as error:
        raise ExpressionError(f"{where}: {error}") from None


def has_tag(text: str) -> bool:
    return _TAG.search(text) is not None
