"""The expressions inside Argo manifests: a lexer and a Pratt parser for the subset that our manifests use.

Three dialects share one grammar. `EXPR` is expr-lang (retryStrategy.expression, `{{=...}}`, valueFrom.expression).
`WHEN` is govaluate as Argo configures it: a bare word is a string. `DEPENDS` is a DAG task's `depends`: names may hold
hyphens, `-` is no operator. It is stricter than Argo: values of different types are never equal by accident, they are
an error (Argo compares `lastRetry.exitCode == 75`, a string with a number, and says false).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from workflows.local.expression_values import (
    BINARY,
    FUNCTIONS,
    ExpressionError,
    MissingName,
    Scope,
    Value,
    as_bool,
    as_list,
    as_number,
    kind_of,
    lookup,
    member_of,
)

Evaluator = Callable[[Scope], Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    name: str
    operators: frozenset[str]
    bare_words_are_strings: bool = False
    names_hold_hyphens: bool = False


_COMMON = frozenset({"||", "&&", "!", "==", "!=", "<", "<=", ">", ">=", "+", "-", "*", "/", "%", "**", "?", ":", "in"})
EXPR = Dialect(
    name="expr",
    operators=_COMMON
    | {"??", "or", "and", "not", "matches", "contains", "startsWith", "endsWith", ".", "?.", "[", "]", "{", "}", ","},
)
WHEN = Dialect(name="when", operators=_COMMON | {"=~", "!~", "??", ","}, bare_words_are_strings=True)
DEPENDS = Dialect(name="depends", operators=frozenset({"||", "&&", "!", "."}), names_hold_hyphens=True)

DEPENDS_RESULTS = (
    "Succeeded",
    "Failed",
    "Errored",
    "Skipped",
    "Omitted",
    "Daemoned",
    "AnySucceeded",
    "AllFailed",
)

_EQUALITY = ("==", "!=", "<", "<=", ">", ">=", "in", "matches", "contains", "startsWith", "endsWith", "=~", "!~")
_BINDING = {"?": 5, "??": 8, "||": 10, "or": 10, "&&": 20, "and": 20, "+": 40, "-": 40, "*": 50, "/": 50, "%": 50}
_BINDING |= dict.fromkeys(_EQUALITY, 30) | {"**": 60} | dict.fromkeys((".", "?.", "["), 90)
_WORD_OPERATORS = frozenset({"or", "and", "not", "in", "matches", "contains", "startsWith", "endsWith"})
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "/": "/"}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # "value", "name", "op" or "end"
    text: str
    value: Value = None


def _lexer(dialect: Dialect) -> re.Pattern[str]:
    name = r"[A-Za-z_0-9][A-Za-z_0-9-]*" if dialect.names_hold_hyphens else r"[A-Za-z_$][A-Za-z_0-9]*"
    number = r"(?!)" if dialect.names_hold_hyphens else r"\d+\.\d+(?:[eE][+-]?\d+)?|\d+"
    return re.compile(
        rf"(?P<space>\s+)|(?P<number>(?:{number})(?![A-Za-z_0-9]))|(?P<name>{name})"
        r"|(?P<string>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|`[^`]*`)"
        r"|(?P<op>\?\.|\?\?|\|\||&&|==|!=|<=|>=|=~|!~|\*\*|[-+*/%<>!?:.,()\[\]{}])"
    )


_LEXERS = {dialect.name: _lexer(dialect) for dialect in (EXPR, WHEN, DEPENDS)}


def _unquote(text: str) -> str:
    if text[0] == "`":
        return text[1:-1]

    def escape(match: re.Match[str]) -> str:
        if match[1] not in _ESCAPES:
            raise ExpressionError(f"unknown escape {match[0]} in {text}")
        return _ESCAPES[match[1]]

    return re.sub(r"\\(.)", escape, text[1:-1], flags=re.DOTALL)


def _tokens(text: str, dialect: Dialect) -> list[_Token]:
    found: list[_Token] = []
    position = 0
    while position < len(text):
        match = _LEXERS[dialect.name].match(text, position)
        if match is None:
            raise ExpressionError(f"can't read {text[position : position + 20]!r} in expression {text!r}")
        position = match.end()
        if match.lastgroup != "space":
            found.append(_token(match, dialect))
    return [*found, _Token("end", "end")]


def _token(match: re.Match[str], dialect: Dialect) -> _Token:
    text = match[0]
    if match.lastgroup == "number":
        return _Token("value", text, float(text) if "." in text else int(text))
    if match.lastgroup == "string":
        return _Token("value", text, _unquote(text))
    if match.lastgroup == "op":
        return _Token("op", text)
    if not dialect.names_hold_hyphens:
        if text in ("true", "false"):
            return _Token("value", text, text == "true")
        if text in ("nil", "null") and not dialect.bare_words_are_strings:
            return _Token("value", text, None)
        if text in _WORD_OPERATORS and text in dialect.operators:
            return _Token("op", text)
    return _Token("name", text)


class _Parser:
    """Top-down operator precedence: `parse(b)` reads operators that bind tighter than b."""

    def __init__(self, text: str, dialect: Dialect) -> None:
        self.text = text
        self.dialect = dialect
        self.tokens = _tokens(text, dialect)
        self.position = 0

    def fail(self, problem: str) -> NoReturn:
        raise ExpressionError(f"{problem} in expression {self.text!r}")

    def next(self) -> _Token:
        token = self.tokens[self.position]
        self.position += 1
        return token

    def peek(self) -> _Token:
        return self.tokens[self.position]

    def accept(self, text: str) -> bool:
        if self.peek().kind == "op" and self.peek().text == text:
            self.position += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.fail(f"expected {text!r} but found {self.peek().text!r}")

    def whole(self) -> Evaluator:
        evaluator = self.parse(0)
        if self.peek().kind != "end":
            self.fail(f"unexpected {self.peek().text!r}")
        return evaluator

    def parse(self, binding: int) -> Evaluator:
        left = self.prefix(self.next())
        while True:
            token = self.peek()
            if token.kind != "op" or _BINDING.get(token.text, 0) <= binding:
                if token.kind == "op" and token.text == "not" and binding < _BINDING["in"]:
                    left = self.negated(left)
                    continue
                return left
            self.next()
            self.check_operator(token.text)
            left = self.infix(token.text, left)

    def negated(self, left: Evaluator) -> Evaluator:
        """`a not in b`, `a not matches b`."""
        self.next()
        token = self.next()
        if token.text not in ("in", "matches", "contains", "startsWith", "endsWith"):
            self.fail(f"unexpected {token.text!r} after 'not'")
        positive = self.infix(token.text, left)
        return lambda scope: not positive(scope)

    def check_operator(self, text: str) -> None:
        if text not in self.dialect.operators and text not in "()":
            self.fail(f"operator {text!r} is not known here")

    def prefix(self, token: _Token) -> Evaluator:
        if token.kind == "value":
            return lambda scope: token.value
        if token.kind == "name":
            return self.name(token.text)
        if token.kind == "end":
            self.fail("unexpected end")
        self.check_operator(token.text)
        if token.text == "(":
            inner = self.whole_group()
            return inner
        if token.text in ("!", "not"):
            operand = self.parse(70)
            return lambda scope: not as_bool(operand(scope), "!")
        if token.text == "-":
            operand = self.parse(70)
            return lambda scope: -as_number(operand(scope), "-")
        if token.text == "[":
            return self.items("]")
        if token.text == "{":
            return self.mapping()
        self.fail(f"unexpected {token.text!r}")

    def whole_group(self) -> Evaluator:
        """After `(`: a parenthesis, or in `when` a list such as `(a, b)`."""
        first = self.parse(0)
        if self.dialect is WHEN and self.peek().text == ",":
            self.next()
            rest = self.items(")")
            return lambda scope: [first(scope), *as_list(rest(scope), "(,)")]
        self.expect(")")
        return first

    def name(self, name: str) -> Evaluator:
        if self.accept("("):
            return self.call(name)
        if self.dialect.bare_words_are_strings:
            return lambda scope: name
        if self.dialect is DEPENDS and self.peek().text != ".":
            return lambda scope: _may_follow(lookup(scope, name))
        return lambda scope: lookup(scope, name)

    def call(self, name: str) -> Evaluator:
        if name not in FUNCTIONS or self.dialect is not EXPR:
            self.fail(f"function {name!r} is not known here")
        arity, function = FUNCTIONS[name]
        arguments = self.arguments(")")
        if len(arguments) != arity:
            self.fail(f"{name} takes {arity} argument(s), not {len(arguments)}")
        return lambda scope: function(*(argument(scope) for argument in arguments))

    def arguments(self, end: str) -> list[Evaluator]:
        found: list[Evaluator] = []
        while not self.accept(end):
            if found:
                self.expect(",")
            found.append(self.parse(0))
        return found

    def items(self, end: str) -> Evaluator:
        evaluators = self.arguments(end)
        return lambda scope: [evaluator(scope) for evaluator in evaluators]

    def mapping(self) -> Evaluator:
        pairs: list[tuple[str, Evaluator]] = []
        while not self.accept("}"):
            if pairs:
                self.expect(",")
            key = self.next()
            self.expect(":")
            pairs.append((str(key.value) if key.kind == "value" else key.text, self.parse(0)))
        return lambda scope: {key: evaluator(scope) for key, evaluator in pairs}

    def infix(self, operator: str, left: Evaluator) -> Evaluator:
        if operator in (".", "?."):
            return self.member(left, optional=operator == "?.")
        if operator == "[":
            index = self.parse(0)
            self.expect("]")
            return lambda scope: member_of(left(scope), index(scope))
        if operator == "?":
            return self.ternary(left)
        # `**` binds to the right: 2 ** 3 ** 2 is 2 ** 9.
        right = self.parse(_BINDING[operator] - (operator == "**"))
        if operator == "??":
            return lambda scope: _first_present(left, right, scope)
        if operator in ("||", "or"):
            return lambda scope: as_bool(left(scope), "||") or as_bool(right(scope), "||")
        if operator in ("&&", "and"):
            return lambda scope: as_bool(left(scope), "&&") and as_bool(right(scope), "&&")
        return lambda scope: BINARY[operator](left(scope), right(scope))

    def member(self, left: Evaluator, *, optional: bool) -> Evaluator:
        token = self.next()
        if token.kind != "name":
            self.fail(f"expected a name after '.', found {token.text!r}")
        if self.dialect is DEPENDS and token.text not in DEPENDS_RESULTS:
            self.fail(f"result {token.text!r} is not one of {', '.join(DEPENDS_RESULTS)}")
        if optional:
            return lambda scope: None if left(scope) is None else member_of(left(scope), token.text)
        return lambda scope: member_of(left(scope), token.text)

    def ternary(self, condition: Evaluator) -> Evaluator:
        then = self.parse(0)
        self.expect(":")
        otherwise = self.parse(0)
        return lambda scope: then(scope) if as_bool(condition(scope), "?:") else otherwise(scope)


def _may_follow(results: Value) -> bool:
    """A bare task name in `depends` means (task.Succeeded || task.Skipped || task.Daemoned)."""
    return any(as_bool(member_of(results, result), "depends") for result in ("Succeeded", "Skipped", "Daemoned"))


def _first_present(left: Evaluator, right: Evaluator, scope: Scope) -> Value:
    try:
        value = left(scope)
    except MissingName:
        value = None
    return right(scope) if value is None else value


@lru_cache(maxsize=256)
def compile_expression(text: str, dialect: Dialect = EXPR) -> Evaluator:
    """Parses `text`; raises ExpressionError where Argo would, and for what is outside the subset."""
    return _Parser(text, dialect).whole()


def evaluate(text: str, scope: Scope, dialect: Dialect = EXPR) -> Value:
    """The value of `text` in `scope`; raises ExpressionError naming what did not fit."""
    try:
        return compile_expression(text, dialect)(scope)
    except MissingName as error:
        raise MissingName(f"{error} (expression {text!r})") from None


def evaluate_bool(text: str, scope: Scope, dialect: Dialect = EXPR) -> bool:
    """As `evaluate`, and the value must be a bool."""
    value = evaluate(text, scope, dialect)
    if not isinstance(value, bool):
        raise ExpressionError(f"expression {text!r} gives the {kind_of(value)} {value!r}, not true or false")
    return value


def names_in_depends(text: str) -> list[str]:
    """The task names of a `depends` expression, in order of appearance, without repetition."""
    tokens = _tokens(text, DEPENDS)
    names = [
        token.text
        for before, token in zip([None, *tokens], tokens, strict=False)
        if token.kind == "name" and (before is None or before.text != ".")
    ]
    return list(dict.fromkeys(names))
