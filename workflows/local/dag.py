"""Runs the tasks of a dag template by their `depends` expressions.

A task waits for every task it names, then its expression decides between running and Omitted. The dag's phase comes
from its leaves, the tasks nothing depends on; a leaf that was skipped or omitted inherits its parents' phase.
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from workflows.local.expression_values import Value
from workflows.local.expressions import DEPENDS, evaluate_bool, names_in_depends
from workflows.local.fanout import CallResult, result_scope
from workflows.local.model import Call, Dag
from workflows.local.status import COMPLETED, UNSUCCESSFUL

if TYPE_CHECKING:
    from workflows.local.run import Boundary, WorkflowRun


def depends_results(result: CallResult) -> dict[str, Value]:
    """What `depends` may ask of a finished task. AnySucceeded and AllFailed are about fan-outs; else they are false."""
    phases = [node.phase for node in result.nodes]
    return {
        "Succeeded": result.phase == "Succeeded",
        "Failed": result.phase == "Failed",
        "Errored": result.phase == "Error",
        "Skipped": result.phase == "Skipped",
        "Omitted": result.phase == "Omitted",
        "Daemoned": False,
        "AnySucceeded": result.expanded and "Succeeded" in phases,
        "AllFailed": result.expanded and bool(phases) and all(phase == "Failed" for phase in phases),
    }


class DagRun:
    """One execution of a dag; `results` holds the tasks that ended."""

    def __init__(self, run: "WorkflowRun", dag: Dag, boundary: "Boundary", scope: Mapping[str, str]) -> None:
        self.run = run
        self.dag = dag
        self.boundary = boundary
        self.scope = scope
        self.parents = {task.name: names_in_depends(task.depends) for task in dag.tasks}
        self.results: dict[str, CallResult] = {}
        self.ended = {task.name: asyncio.Event() for task in dag.tasks}

    async def execute(self) -> tuple[str, dict[str, str]]:
        """(phase of the dag, its tasks' variables)."""
        await asyncio.gather(*(self.run_task(task) for task in self.dag.tasks))
        return self.phase(), self.scope_after(self.ended)

    async def run_task(self, task: Call) -> None:
        for parent in self.parents[task.name]:
            await self.ended[parent].wait()
        result = await self.decide(task)
        if result is not None:
            self.results[task.name] = result
        self.ended[task.name].set()

    async def decide(self, task: Call) -> CallResult | None:
        """None: the dag stopped scheduling before this task."""
        parents = self.parents[task.name]
        if any(parent not in self.results for parent in parents) or (self.dag.fail_fast and self.has_failed()):
            return None
        if task.depends:
            asked: dict[str, Value] = {name: depends_results(self.results[name]) for name in parents}
            if not evaluate_bool(task.depends, asked, DEPENDS):
                return self.run.omit(self.boundary, self.node_name(task), task, "omitted: depends condition not met")
        scope = {**self.scope, **self.scope_after(self.ancestors(task.name))}
        return await self.run.run_call(self.boundary, self.node_name(task), task, scope)

    def node_name(self, task: Call) -> str:
        return f"{self.boundary.node.name}.{task.name}"

    def ancestors(self, name: str) -> set[str]:
        found: set[str] = set()
        queue = [name]
        while queue:
            parents = [parent for parent in self.parents[queue.pop()] if parent not in found]
            found.update(parents)
            queue.extend(parents)
        return found

    def scope_after(self, names: set[str] | dict[str, asyncio.Event]) -> dict[str, str]:
        scope: dict[str, str] = {}
        for name in names:
            if name in self.results:
                scope |= result_scope(f"tasks.{name}", self.results[name])
        return scope

    def branch_phase(self, name: str) -> str:
        """The task's own phase where it ran, else the worst of its parents'; "" while it is not known."""
        result = self.results.get(name)
        if result is None:
            return ""
        if result.phase in COMPLETED:
            return result.phase
        phases = [self.branch_phase(parent) for parent in self.parents[name]]
        return next((phase for phase in phases if phase in UNSUCCESSFUL), "Succeeded")

    def leaf_phases(self) -> list[str]:
        depended_on = {parent for parents in self.parents.values() for parent in parents}
        return [self.branch_phase(task.name) for task in self.dag.tasks if task.name not in depended_on]

    def has_failed(self) -> bool:
        return any(phase in UNSUCCESSFUL for phase in self.leaf_phases())

    def phase(self) -> str:
        phases = self.leaf_phases()
        failed = [phase for phase in phases if phase in UNSUCCESSFUL]
        return failed[0] if failed else ("Succeeded" if "" not in phases else "Failed")
