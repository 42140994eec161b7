"""The values of expressions, their operators and functions; `expressions.py` holds the grammar."""

import json
import math
import re
from collections.abc import Callable, Mapping

from steps.errors import ConfigError

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]
Scope = Mapping[str, Value]


class ExpressionError(ConfigError):
    """The text is not an expression of the subset, or its values don't fit its operators."""


class MissingName(ExpressionError):
    """A name or a member that the scope does not hold; `??` supplies a value instead."""


def lookup(scope: Scope, name: str) -> Value:
    if name not in scope:
        raise MissingName(f"{name!r} is not defined here (known: {', '.join(sorted(scope)) or 'nothing'})")
    return scope[name]


def member_of(container: Value, key: Value) -> Value:
    if isinstance(container, dict) and isinstance(key, str):
        if key not in container:
            raise MissingName(f"there is no member {key!r} (known: {', '.join(sorted(container)) or 'nothing'})")
        return container[key]
    if isinstance(container, list) and isinstance(key, int) and not isinstance(key, bool):
        if not -len(container) <= key < len(container):
            raise ExpressionError(f"index {key} is outside a list of {len(container)}")
        return container[key]
    raise ExpressionError(f"{kind_of(container)} has no member {key!r}")


def kind_of(value: Value) -> str:
    if value is None:
        return "nil"
    kinds = {bool: "bool", int: "number", float: "number", str: "string", list: "list", dict: "map"}
    return kinds[type(value)]


def as_bool(value: Value, operator: str) -> bool:
    if not isinstance(value, bool):
        raise ExpressionError(f"{operator} needs a bool, not the {kind_of(value)} {value!r}")
    return value


def as_number(value: Value, operator: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ExpressionError(
            f"{operator} needs a number, not the {kind_of(value)} {value!r}; use asInt() or asFloat()"
        )
    return value


def as_text(value: Value, operator: str) -> str:
    if not isinstance(value, str):
        raise ExpressionError(f"{operator} needs a string, not the {kind_of(value)} {value!r}; use string()")
    return value


def as_list(value: Value, operator: str) -> list[Value]:
    if not isinstance(value, list):
        raise ExpressionError(f"{operator} needs a list, not the {kind_of(value)} {value!r}")
    return value


def _equal(left: Value, right: Value) -> bool:
    if left is not None and right is not None and kind_of(left) != kind_of(right):
        raise ExpressionError(
            f"can't compare the {kind_of(left)} {left!r} with the {kind_of(right)} {right!r} "
            "(Argo says they differ, always); use asInt() or string()"
        )
    return left == right


def _ordered(operator: str, compare: Callable[[int], bool]) -> Callable[[Value, Value], Value]:
    def apply(left: Value, right: Value) -> Value:
        if isinstance(left, str) and isinstance(right, str):
            return compare((left > right) - (left < right))
        a, b = as_number(left, operator), as_number(right, operator)
        return compare((a > b) - (a < b))

    return apply


def _add(left: Value, right: Value) -> Value:
    if isinstance(left, str) and isinstance(right, str):
        return left + right
    return as_number(left, "+") + as_number(right, "+")


def _divide(left: Value, right: Value) -> Value:
    divisor = as_number(right, "/")
    if divisor == 0:
        raise ExpressionError("division by zero")
    return as_number(left, "/") / divisor


def _remainder(left: Value, right: Value) -> Value:
    a, b = as_number(left, "%"), as_number(right, "%")
    if not isinstance(a, int) or not isinstance(b, int) or b == 0:
        raise ExpressionError(f"% needs two integers, the second not 0, not {left!r} and {right!r}")
    return abs(a) % abs(b) * (-1 if a < 0 else 1)  # Go's sign follows the dividend


def _power(left: Value, right: Value) -> Value:
    return math.pow(as_number(left, "**"), as_number(right, "**"))


def _matches(left: Value, right: Value) -> bool:
    pattern = as_text(right, "matches")
    try:
        return re.search(pattern, as_text(left, "matches")) is not None
    except re.error as error:
        raise ExpressionError(f"bad regular expression {pattern!r}: {error}") from None


def _in(left: Value, right: Value) -> bool:
    if isinstance(right, dict):
        return as_text(left, "in") in right
    return any(_equal(left, item) for item in as_list(right, "in"))


def _contains(left: Value, right: Value) -> bool:
    return as_text(right, "contains") in as_text(left, "contains")


BINARY: dict[str, Callable[[Value, Value], Value]] = {
    "==": _equal,
    "!=": lambda left, right: not _equal(left, right),
    "<": _ordered("<", lambda sign: sign < 0),
    "<=": _ordered("<=", lambda sign: sign <= 0),
    ">": _ordered(">", lambda sign: sign > 0),
    ">=": _ordered(">=", lambda sign: sign >= 0),
    "+": _add,
    "-": lambda left, right: as_number(left, "-") - as_number(right, "-"),
    "*": lambda left, right: as_number(left, "*") * as_number(right, "*"),
    "/": _divide,
    "%": _remainder,
    "**": _power,
    "in": _in,
    "matches": _matches,
    "=~": _matches,
    "!~": lambda left, right: not _matches(left, right),
    "contains": _contains,
    "startsWith": lambda left, right: as_text(left, "startsWith").startswith(as_text(right, "startsWith")),
    "endsWith": lambda left, right: as_text(left, "endsWith").endswith(as_text(right, "endsWith")),
}


def _as_int(value: Value) -> int:
    if isinstance(value, str):
        try:
            return int(value, 10)
        except ValueError:
            raise ExpressionError(f"asInt: {value!r} is not a whole number") from None
    return int(as_number(value, "asInt"))


def _as_float(value: Value) -> float:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ExpressionError(f"asFloat: {value!r} is not a number") from None
    return float(as_number(value, "asFloat"))


def render_value(value: Value) -> str:
    """An expression's value as Argo puts it into text: strings bare, everything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value)


def _length(value: Value) -> int:
    if not isinstance(value, str | list | dict):
        raise ExpressionError(f"len needs a string, list or map, not the {kind_of(value)} {value!r}")
    return len(value)


FUNCTIONS: dict[str, tuple[int, Callable[..., Value]]] = {
    "asInt": (1, _as_int),
    "asFloat": (1, _as_float),
    "int": (1, _as_int),
    "float": (1, _as_float),
    "string": (1, render_value),
    "toJson": (1, lambda value: json.dumps(value)),
    "len": (1, _length),
    "trim": (1, lambda value: as_text(value, "trim").strip()),
    "upper": (1, lambda value: as_text(value, "upper").upper()),
    "lower": (1, lambda value: as_text(value, "lower").lower()),
    "split": (2, lambda value, separator: list(as_text(value, "split").split(as_text(separator, "split")))),
}
