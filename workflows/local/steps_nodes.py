"""Runs a steps template: its groups in series, the steps of a group in parallel."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from workflows.local.fanout import CallResult, result_scope
from workflows.local.model import Call, Steps

if TYPE_CHECKING:
    from workflows.local.run import Boundary, WorkflowRun


def _tolerated(call: Call, phase: str) -> bool:
    return (phase == "Failed" and call.continue_on_failed) or (phase == "Error" and call.continue_on_error)


def _first_failure(group: tuple[Call, ...], results: list[CallResult]) -> str | None:
    for call, result in zip(group, results, strict=True):
        for node in result.nodes:
            if node.unsuccessful and not _tolerated(call, node.phase):
                return f"child '{node.name}' failed"
    return None


async def run_steps(
    run: "WorkflowRun", steps: Steps, boundary: "Boundary", scope: Mapping[str, str]
) -> tuple[str, str, dict[str, str]]:
    """(phase, message, the steps' variables). The first group with a failure that is not tolerated is the last."""
    known: dict[str, str] = {}
    for number, group in enumerate(steps.groups):
        seen = {**scope, **known}
        results = await asyncio.gather(
            *(run.run_call(boundary, f"{boundary.node.name}[{number}].{call.name}", call, seen) for call in group)
        )
        for call, result in zip(group, results, strict=True):
            known |= result_scope(f"steps.{call.name}", result)
        failure = _first_failure(group, results)
        if failure is not None or run.shutdown:
            return "Failed", failure or run.shutdown, known
    return "Succeeded", "", known
