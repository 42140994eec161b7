"""The computed budget: what a campaign's Workflows take, against Argo's limits."""

import json
from typing import Any

import pytest

from tests.tampering import Documents, documents, manifests_of
from workflows.lint.budget import MAX_TEXT_BYTES, MAX_WORKFLOW_BYTES, Budget, WorkflowSize, over_budget, sizes, table

FULL = Budget(iterations=300, workers=64)


def sizes_of(edited: Documents, budget: Budget) -> dict[str, WorkflowSize]:
    return {size.name: size for size in sizes(manifests_of(edited), budget)}


def problems(edited: Documents, budget: Budget) -> list[str]:
    manifests = manifests_of(edited)
    return [place.problem for place in over_budget(manifests, sizes(manifests, budget), budget)]


def test_300_iterations_of_64_workers_fit_though_every_pod_is_lost_once() -> None:
    found = sizes_of(documents(), FULL)
    assert problems(documents(), FULL) == []
    for name in ("policy-campaign", "policy-iteration"):
        assert found[name].stored_bytes < MAX_WORKFLOW_BYTES
        assert found[name].largest_template_bytes < MAX_TEXT_BYTES
        assert found[name].largest_argument_bytes < MAX_TEXT_BYTES
        assert found[name].most_attempts >= FULL.attempts


def test_nodes_are_those_that_argo_makes() -> None:
    """Steps, its three groups, init, loop, summary; each iteration: wrapper, its group, Retry and the pods; onExit."""
    one = sizes_of(documents(), Budget(iterations=1, workers=1, attempts=1))["policy-campaign"]
    two = sizes_of(documents(), Budget(iterations=2, workers=1, attempts=1))["policy-campaign"]
    again = sizes_of(documents(), Budget(iterations=2, workers=1, attempts=3))["policy-campaign"]
    assert two.nodes - one.nodes == 4  # Steps, StepGroup, Retry, Pod
    assert two.pods - one.pods == 1
    assert again.nodes - two.nodes == again.pods - two.pods == 2 * two.pods


def test_workers_add_a_retry_node_and_its_attempts_each_for_rollout_and_reward() -> None:
    few = sizes_of(documents(), Budget(iterations=1, workers=1, attempts=2))["policy-iteration"]
    many = sizes_of(documents(), Budget(iterations=1, workers=11, attempts=2))["policy-iteration"]
    assert many.nodes - few.nodes == 10 * 2 * (1 + 2)
    assert many.pods - few.pods == 10 * 2 * 2


def test_no_pod_has_more_attempts_than_its_limit() -> None:
    edited = documents()
    edited.template("policy-iteration", "plan")["retryStrategy"]["limit"] = "0"
    unlimited = sizes_of(documents(), Budget(iterations=1, workers=1, attempts=3))["policy-iteration"]
    limited = sizes_of(edited, Budget(iterations=1, workers=1, attempts=3))["policy-iteration"]
    assert unlimited.pods - limited.pods == 2


def test_too_many_iterations_are_over_budget_each_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workflows.lint.budget.MAX_WORKFLOW_BYTES", 32 << 10)
    monkeypatch.setattr("workflows.lint.budget.MAX_ETCD_BYTES", 1 << 20)
    found = problems(documents(), Budget(iterations=60, workers=8))
    assert found[0].startswith("60 iterations x 8 workers, 2 attempts each: its Workflow takes ")
    assert any(problem.startswith("60 iterations") and "60 of its Workflows take" in problem for problem in found)


def test_children_are_counted_together() -> None:
    found = sizes_of(documents(), Budget(iterations=7, workers=1))
    assert (found["policy-campaign"].copies, found["policy-iteration"].copies) == (1, 7)


@pytest.mark.parametrize(
    ("what", "edit"),
    [("template", {"image": "i" * MAX_TEXT_BYTES}), ("argument", {"args": ["a" * (MAX_TEXT_BYTES + 1)]})],
)
def test_text_beyond_what_linux_passes_on_is_over_budget(what: str, edit: dict[str, Any]) -> None:
    edited = documents()
    edited.container("plan").update(edit)
    assert any(
        what in problem and "of 128.0 KiB" in problem for problem in problems(edited, Budget(iterations=1, workers=1))
    )


def test_the_same_numbers_on_every_call_and_as_json() -> None:
    budget = Budget(iterations=5, workers=3)
    found = sizes(manifests_of(documents()), budget)
    assert found == sizes(manifests_of(documents()), budget)
    shown = json.loads(json.dumps([size.to_json() for size in found]))
    assert [row["name"] for row in shown] == ["policy-benchmark", "policy-campaign", "policy-iteration"]
    assert {row["max_bytes"] for row in shown} == {MAX_WORKFLOW_BYTES}
    lines = table(found, budget)
    assert lines[0].startswith("budget: 5 iterations x 3 workers, 2 attempts of every pod")
    assert any("policy-campaign" in line for line in lines)
