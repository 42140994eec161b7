"""{{...}} tags, fan-out items, and what later nodes see of a finished call."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steps.errors import ConfigError
from workflows.local.fanout import CallResult, expand, group_phase, result_scope
from workflows.local.model import Call, Sequence
from workflows.local.status import NodeStatus
from workflows.local.variables import UnresolvedTag, nested_scope, substitute

SCOPE = {"workflow.name": "wf", "inputs.parameters.n": "3", "tasks.a-b.outputs.parameters.x": "9"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("{{workflow.name}}-{{ inputs.parameters.n }}", "wf-3"),
        ("{{=asInt(inputs.parameters.n) + 1}}", "4"),
        ("{{=tasks['a-b'].outputs.parameters.x}}", "9"),
        ("{{=tasks['c'].outputs.parameters.x ?? 'none'}}", "none"),
        ("{{=asInt(inputs.parameters.n) > 2}}", "true"),
        ("{single} }} {", "{single} }} {"),
    ],
)
def test_tags_are_replaced(text: str, expected: str) -> None:
    assert substitute(text, SCOPE, "here") == expected


def test_an_unknown_tag_is_named_with_its_place() -> None:
    with pytest.raises(UnresolvedTag, match=r"template x: \{\{workflow.nmae\}\} is not defined here"):
        substitute("{{workflow.nmae}}", SCOPE, "template x")
    with pytest.raises(ConfigError, match="template x: .*'nope' is not defined here"):
        substitute("{{=nope}}", SCOPE, "template x")


@given(st.text().filter(lambda text: "{{" not in text))
def test_text_without_tags_stays_as_it_is(text: str) -> None:
    assert substitute(text, {}, "here") == text


@given(st.text())
def test_values_are_not_read_again_for_tags(value: str) -> None:
    assert substitute("{{a}}", {"a": value}, "here") == value


def test_nested_scope_keeps_members_of_a_prefix() -> None:
    assert nested_scope({"a": "x", "a.b": "1", "c.d.e": "2"}) == {"a": {"b": "1"}, "c": {"d": {"e": "2"}}}


def items(**fields: object) -> list[str]:
    call = Call(name="c", template="t", **fields)  # type: ignore[arg-type]
    return [item.suffix for item in expand(call, SCOPE, "c")]


@pytest.mark.parametrize(
    ("sequence", "suffixes"),
    [
        (Sequence(count="2"), ["(0:0)", "(1:1)"]),
        (Sequence(count="0"), []),
        (Sequence(start="5", count="{{=2 - 1}}"), ["(0:5)"]),
        (Sequence(start="1", end="{{inputs.parameters.n}}"), ["(0:1)", "(1:2)", "(2:3)"]),
        (Sequence(start="2", end="0"), ["(0:2)", "(1:1)", "(2:0)"]),
        (Sequence(start="9", count="2", format="it%03X"), ["(0:it009)", "(1:it00A)"]),
    ],
)
def test_sequences_count_as_argo_does(sequence: Sequence, suffixes: list[str]) -> None:
    assert items(with_sequence=sequence) == suffixes


@pytest.mark.parametrize(
    "sequence", [Sequence(count="x"), Sequence(count="1", format="%d%d"), Sequence(count="1", format="%s%y")]
)
def test_bad_sequences_are_refused(sequence: Sequence) -> None:
    with pytest.raises(ConfigError, match="c withSequence"):
        items(with_sequence=sequence)


def test_items_of_every_kind_have_names_and_variables() -> None:
    call = Call(name="c", template="t", with_items=("a", 1, True, {"k": "v", "n": 2}, [1, "x"]))
    expanded = expand(call, {}, "c")
    assert [item.suffix for item in expanded] == ["(0:a)", "(1:1)", "(2:true)", "(3:k:v,n:2)", '(4:[1,"x"])']
    assert expanded[3].scope == {"item": '{"k":"v","n":2}', "item.k": "v", "item.n": "2"}


def node(phase: str, **outputs: str) -> NodeStatus:
    return NodeStatus(name="n", display_name="n", type="Pod", phase=phase, outputs=outputs, exit_code="0")


def test_aggregates_hold_successes_in_order() -> None:
    nodes = (node("Succeeded", x="1", y="a"), node("Failed", x="2"), node("Succeeded", x="3"))
    scope = result_scope("tasks.t", CallResult("Failed", nodes, expanded=True))
    assert json.loads(scope["tasks.t.outputs.parameters"]) == [{"x": "1", "y": "a"}, {"x": "3"}]
    assert (scope["tasks.t.outputs.parameters.x"], scope["tasks.t.outputs.parameters.y"]) == ('["1","3"]', '["a"]')


def test_aggregated_json_maps_are_embedded() -> None:
    nodes = (node("Succeeded", x='{"a":1}'), node("Succeeded", x="[2]"))
    assert result_scope("t", CallResult("Succeeded", nodes, expanded=True))["t.outputs.parameters.x"] == '[{"a":1},[2]]'


def test_a_group_has_the_phase_of_its_last_failure() -> None:
    assert group_phase((node("Failed"), node("Error"), node("Succeeded"))) == "Error"
    assert group_phase(()) == "Succeeded"
