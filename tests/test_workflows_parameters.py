"""Workflow parameters: what the submit form shows, and what is handed on."""

import re
from typing import get_args, get_type_hints

import pytest
import yaml

from moe.config import MoeConfig
from workflows import catalog
from workflows.parameters import (
    BENCHMARK,
    CAMPAIGN,
    DISPATCHERS,
    ITERATION,
    RESOLVED,
    SHARED,
    WorkflowParameter,
    names,
)

SETS = {"campaign": CAMPAIGN, "iteration": ITERATION, "benchmark": BENCHMARK}
each_set = pytest.mark.parametrize("parameters", SETS.values(), ids=list(SETS))


@each_set
def test_names_are_unique_and_each_has_a_description(parameters: tuple[WorkflowParameter, ...]) -> None:
    assert len(set(names(parameters))) == len(parameters)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", parameter.name) for parameter in parameters)
    assert all(parameter.description for parameter in parameters)


@each_set
def test_default_is_one_of_the_choices(parameters: tuple[WorkflowParameter, ...]) -> None:
    for parameter in parameters:
        assert not parameter.enum or parameter.value in parameter.enum


@each_set
def test_secrets_are_asked_for_by_name(parameters: tuple[WorkflowParameter, ...]) -> None:
    assert {"environment", "credentials"} <= set(names(parameters))
    assert not [name for name in names(parameters) if re.search("key|token|password|database|url", name)]


def test_iteration_takes_what_a_campaign_hands_on() -> None:
    handed_on = {"run", "iteration", *names(RESOLVED), *names(SHARED)}
    assert set(names(ITERATION)) == handed_on
    assert set(names(SHARED)) <= set(names(CAMPAIGN))
    by_name = {parameter.name: parameter for parameter in CAMPAIGN}
    assert all(by_name[parameter.name] == parameter for parameter in SHARED)


def test_campaign_leaves_numbers_to_the_configuration_unless_they_are_given() -> None:
    values = {parameter.name: parameter.value for parameter in CAMPAIGN}
    assert {values[name] for name in ("iterations", "rollout-workers", "reward-workers", "training-nodes")} == {"0"}


def test_dispatchers_are_those_of_the_configuration() -> None:
    assert get_args(get_type_hints(MoeConfig)["dispatcher"]) == DISPATCHERS


def test_what_a_parameter_lacks_is_left_out_of_the_manifests_and_an_empty_default_stays() -> None:
    for text in catalog.render_all().values():
        assert "null" not in text
    spec = yaml.safe_load(catalog.render_all()["policy-campaign.yaml"])["spec"]
    written = {parameter["name"]: parameter for parameter in spec["arguments"]["parameters"]}
    assert set(written["run"]) == {"name", "description"}
    assert written["queue"]["value"] == ""
    assert written["rollout-capacity"]["enum"] == ["spot", "spot-then-on-demand", "on-demand"]
