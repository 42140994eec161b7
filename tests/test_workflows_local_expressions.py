"""The expression subset against expr-lang's and Argo's results, and its refusals."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflows.local.expression_values import ExpressionError, MissingName, Value
from workflows.local.expressions import (
    DEPENDS,
    EXPR,
    WHEN,
    Dialect,
    compile_expression,
    evaluate,
    evaluate_bool,
    names_in_depends,
)

SCOPE: dict[str, Value] = {"n": 3, "s": "text", "b": True, "list": ["a", "b"], "map": {"k": "v", "a-b": "w"}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("10 - 4 - 3", 3),
        ("2 ** 3 ** 2", 512.0),
        ("-n + 4", 1),
        ("7 / 2", 3.5),
        ("-7 % 3", -1),
        ("n == 3 && s == 'text'", True),
        ("n == 3 and not b", False),
        ("!b || n > 2", True),
        ("false || n >= 3 && n <= 3", True),
        ("'a' in list", True),
        ("'c' not in list", True),
        ("'k' in map", True),
        ("75 in [75, 143]", True),
        ("map.k", "v"),
        ("map['a-b']", "w"),
        ("list[1]", "b"),
        ("list[-1]", "b"),
        ("map.missing ?? 'd'", "d"),
        ("nothing.at.all ?? 'd'", "d"),
        ("nil ?? 1", 1),
        ("b ? 'yes' : 'no'", "yes"),
        ("s + '!'", "text!"),
        ("s matches '^t.*t$'", True),
        ("s contains 'ex'", True),
        ("s startsWith 'te' && s endsWith 'xt'", True),
        ("asInt('12') + 1", 13),
        ("asFloat('1.5') * 2", 3.0),
        ("string(12) + string(true)", "12true"),
        ("len(list) == 2", True),
        ("upper(trim(' x '))", "X"),
        ("split('a,b', ',')", ["a", "b"]),
        (r"'it\'s'", "it's"),
        ("{'a': 1}.a", 1),
        ("b or missing", True),
        ("b ? 1 : missing", 1),
    ],
)
def test_expr_gives_what_expr_lang_gives(text: str, expected: object) -> None:
    assert evaluate(text, SCOPE) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "unexpected end"),
        ("1 +", "unexpected end"),
        ("1 2", "unexpected '2'"),
        ("(1", "expected ')'"),
        ("s == 3", "can't compare the string 'text' with the number 3"),
        ("s < 3", "needs a number"),
        ("n && b", "needs a bool"),
        ("!s", "needs a bool"),
        ("missing", "'missing' is not defined here"),
        ("map.missing", "no member 'missing'"),
        ("list[9]", "outside a list of 2"),
        ("asInt('x')", "not a whole number"),
        ("sprig.trim(s)", "unexpected '('"),
        ("filter(list, {# > 1})", "can't read"),
        ("jsonpath(s, 'x')", "function 'jsonpath' is not known"),
        ("asInt(1, 2)", "takes 1 argument"),
        ("s matches '('", "bad regular expression"),
        ("1 / 0", "division by zero"),
        ("n =~ 'x'", "operator '=~' is not known here"),
        ("'open", "can't read"),
        ("12abc", "can't read"),
    ],
)
def test_what_is_outside_the_subset_is_refused_by_name(text: str, problem: str) -> None:
    with pytest.raises(ExpressionError, match=problem.replace("(", r"\(").replace(")", r"\)")):
        evaluate(text, SCOPE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("heads == heads", True),
        ("heads != 'heads'", False),
        ("3 > 2 && true", True),
        ("5 == 05", True),
        ("abc =~ '^a'", True),
        ("a in (a, b)", True),
        ("c in ('a', 'b')", False),
        ("!(1 > 2)", True),
    ],
)
def test_when_takes_bare_words_as_strings(text: str, expected: bool) -> None:
    assert evaluate_bool(text, {}, WHEN) is expected


def test_a_when_that_is_not_a_bool_is_an_error() -> None:
    with pytest.raises(ExpressionError, match="not true or false"):
        evaluate_bool("heads", {}, WHEN)


def results(*true: str) -> dict[str, Value]:
    names = ("Succeeded", "Failed", "Errored", "Skipped", "Omitted", "Daemoned", "AnySucceeded", "AllFailed")
    return {name: name in true for name in names}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", True),
        ("b-1", True),
        ("c", False),
        ("omitted", False),
        ("a && c", False),
        ("a || c", True),
        ("!c", True),
        ("c.Failed && !c.Succeeded", True),
        ("(a && b-1) || c.Errored", True),
        ("group.AnySucceeded && !group.AllFailed", True),
        ("1-a.Succeeded", True),
    ],
)
def test_depends_reads_names_with_hyphens_and_bare_names(text: str, expected: bool) -> None:
    scope: dict[str, Value] = {
        "a": results("Succeeded"),
        "b-1": results("Skipped"),
        "c": results("Failed"),
        "omitted": results("Omitted"),
        "group": results("Failed", "AnySucceeded"),
        "1-a": results("Succeeded"),
    }
    assert evaluate_bool(text, scope, DEPENDS) is expected


def test_names_in_depends_come_once_and_without_results() -> None:
    assert names_in_depends("a-b && (c.Failed || !a-b.Skipped) || d_1") == ["a-b", "c", "d_1"]


@pytest.mark.parametrize("text", ["a.Finished", "a || b.Done", "a && ", "a == b", "a + b", "a b"])
def test_depends_refuses_other_operators_and_results(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate_bool(text, {"a": results(), "b": results()}, DEPENDS)


@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), st.integers(1, 1000))
def test_arithmetic_and_comparison_agree_with_python(a: int, b: int, c: int) -> None:
    scope: dict[str, Value] = {"a": a, "b": b, "c": c}
    assert evaluate("a + b * c - (a - b)", scope) == a + b * c - (a - b)
    assert evaluate("a < b || a > b || a == b", scope) is True
    assert evaluate(f"({a}) - ({b}) + {c}", {}) == a - b + c


@given(st.recursive(st.booleans(), lambda inner: st.tuples(st.sampled_from(["&&", "||", "!"]), inner, inner)))
def test_boolean_logic_agrees_with_python(tree: object) -> None:
    def text(node: object) -> str:
        if isinstance(node, bool):
            return json.dumps(node)
        operator, left, right = node  # type: ignore[misc]
        return f"!({text(left)})" if operator == "!" else f"({text(left)}) {operator} ({text(right)})"

    def value(node: object) -> bool:
        if isinstance(node, bool):
            return node
        operator, left, right = node  # type: ignore[misc]
        if operator == "!":
            return not value(left)
        return (value(left) and value(right)) if operator == "&&" else (value(left) or value(right))

    assert evaluate_bool(text(tree), {}) is value(tree)


@given(st.text(max_size=40), st.sampled_from([EXPR, WHEN, DEPENDS]))
def test_any_text_parses_or_is_refused_in_one_line(text: str, dialect: Dialect) -> None:
    try:
        compile_expression(text, dialect)
    except ExpressionError as error:
        assert str(error)


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\\"), max_size=30))
def test_quoted_strings_keep_their_characters(text: str) -> None:
    quoted = text.replace("'", "\\'")
    assert evaluate(f"'{quoted}'", {}) == text


def test_a_missing_name_is_told_from_other_mistakes() -> None:
    with pytest.raises(MissingName, match=r"known: exitCode"):
        evaluate("lastRetry.exitcode", {"lastRetry": {"exitCode": "1"}})
