"""Manifests of the wrong shape: findings or one line, never a traceback."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from steps.errors import StepError
from tests.tampering import Documents, documents, manifests_of
from workflows.lint.budget import Budget
from workflows.lint.linter import lint
from workflows.lint.schemas import Schemas

SMALL = Budget(iterations=1, workers=1, attempts=1)
KINDS = (
    "WorkflowTemplate/policy-iteration",
    "CronWorkflow/policy-retraining",
    "Role/moerl-step",
    "NodePool/moerl-train",
)
WRONG: tuple[Any, ...] = (None, "x", 1, True, [], {}, ["x"], {"a": 1}, [None], [[1]], [{}])


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


@pytest.mark.parametrize("seed", range(25))
def test_value_of_the_wrong_type_anywhere_is_told_or_passed_over(seed: int) -> None:
    chance = random.Random(seed)
    edited = Documents({name: copy.deepcopy(body) for name, body in documents().items() if name in KINDS})
    target: Any = edited[chance.choice(KINDS)]
    *parents, last = chance.choice([place for place in places(target) if place != ("kind",)])
    for key in parents:
        target = target[key]
    target[last] = chance.choice(WRONG)
    try:
        manifests = manifests_of(edited)
    except StepError as error:
        assert "\n" not in str(error)
        return
    assert all("\n" not in finding.problem for finding in lint(manifests, Schemas(), SMALL).findings)


def test_template_that_calls_itself_is_found_and_does_not_hang_the_budget() -> None:
    edited = documents()
    step = edited.template("policy-campaign", "one")["steps"][0][0]
    edited.template("policy-campaign", "one")["steps"].append([step | {"name": "again", "template": "one"}])
    result = lint(manifests_of(edited), Schemas(), SMALL)
    assert [finding.rule for finding in result.errors] == ["recursion"]
