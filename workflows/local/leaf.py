"""Leaf nodes, the ones that are pods on a cluster: one attempt, or as many as the template's retryStrategy allows."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from steps.errors import ConfigError, StepError
from workflows.local.containers import run_container
from workflows.local.model import Backoff, Container, Resource, RetryStrategy, Template
from workflows.local.places import Place
from workflows.local.resources import run_resource
from workflows.local.retry import FIRST_ATTEMPT, Verdict, decide, retry_scope
from workflows.local.status import NodeStatus, pod_name
from workflows.local.variables import substitute

if TYPE_CHECKING:
    from workflows.local.run import Boundary, WorkflowRun


async def run_leaf(
    run: "WorkflowRun",
    name: str,
    template: Template,
    inputs: Mapping[str, str],
    scope: Mapping[str, str],
    boundary: "Boundary | None",
    place: Place | None,
    shown: str,
) -> NodeStatus:
    leaf = Leaf(run, name, template, inputs, scope, boundary, place, shown)
    return await (leaf.attempt(name, 0, {}) if template.retry is None else leaf.retried(template.retry))


class Leaf:
    def __init__(
        self,
        run: "WorkflowRun",
        name: str,
        template: Template,
        inputs: Mapping[str, str],
        scope: Mapping[str, str],
        boundary: "Boundary | None",
        place: Place | None,
        shown: str,
    ) -> None:
        self.run = run
        self.name = name
        self.template = template
        self.inputs = inputs
        self.scope = scope
        self.boundary = boundary
        self.place = place
        self.parent = boundary.node.name if boundary else ""
        self.shown = shown

    async def attempt(self, name: str, number: int, extra: Mapping[str, str]) -> NodeStatus:
        """One pod, from Pending to its end."""
        node = self.run.begin(name, "Pod", self.template, self.parent, self.inputs)
        if self.shown:
            node.display_name = self.shown if name == self.name else f"{self.shown}({number})"
        node.attempt = number
        node.pod_name = pod_name(self.run.status.name, self.template.name, name)
        self.run.transition(node, "Pending")
        scope = {**self.scope, **extra, "pod.name": node.pod_name, "node.name": name}
        try:
            self.check_unused(scope)
            if isinstance(self.template.body, Container):
                await run_container(self.run, node, self.template, self.template.body, scope)
            elif isinstance(self.template.body, Resource):
                await run_resource(self.run, node, self.template, self.template.body, scope)
        except StepError as error:
            node.error_code = error.exit_code
            self.run.transition(node, "Error", str(error))
        return node

    def check_unused(self, scope: Mapping[str, str]) -> None:
        """ConfigError for a tag that does not resolve, in a field that only a cluster would use."""
        body = self.template.body
        texts = (*self.template.unused, *(body.unused if isinstance(body, Container) else ()))
        for text in texts:
            substitute(text, scope, f"template {self.template.name}")

    async def retried(self, strategy: RetryStrategy) -> NodeStatus:
        """The Retry node over its attempts. Numbers go on after those of earlier submissions; the limit starts anew."""
        earlier = self.run.status.attempts_of(self.name)
        node = self.run.begin(self.name, "Retry", self.template, self.parent, self.inputs)
        node.display_name = self.shown or node.display_name
        done = next((attempt for attempt in earlier if attempt.phase == "Succeeded"), None)
        if done is not None:  # the executor died between the attempt's success and the node's
            return self.end(node, done, "")
        self.run.transition(node, "Running")
        extra = retry_scope(earlier[-1], len(earlier), unknown_code="0") if earlier else FIRST_ATTEMPT
        attempts = 0
        while True:
            if self.place is not None:
                self.place.enter()
            last = await self.attempt(f"{self.name}({len(earlier) + attempts})", len(earlier) + attempts, extra)
            if self.place is not None:
                self.place.leave()
            attempts += 1
            if self.boundary is not None:
                self.boundary.note(last)
            if last.phase == "Succeeded" or self.must_end():
                return self.end(node, last, "")
            try:
                verdict = decide(self.resolved(strategy), last, attempts)
            except ConfigError as error:
                node.error_code = error.exit_code
                self.run.transition(node, "Error", f"retryStrategy of {self.template.name}: {error}")
                return node
            if not verdict.again or await self.interrupted(verdict, node):
                return self.end(node, last, verdict.message)
            extra = retry_scope(last, len(earlier) + attempts, unknown_code="0")

    def must_end(self) -> bool:
        if self.run.shutdown or self.run.session.client.server_ended:
            return True
        return self.boundary is not None and self.boundary.closed

    async def interrupted(self, verdict: Verdict, node: NodeStatus) -> bool:
        """Waits as the backoff says, scaled; True when the workflow was stopped meanwhile."""
        wait_s = verdict.wait_s * self.run.session.settings.backoff_scale
        if wait_s > 0:
            self.run.emit(node, "node", f"Backoff for {verdict.wait_s:g} seconds (here {wait_s:g})")
            try:
                await asyncio.wait_for(self.run.stopped.wait(), wait_s)
            except TimeoutError:
                pass
        return self.must_end()

    def end(self, node: NodeStatus, last: NodeStatus, message: str) -> NodeStatus:
        """The Retry node takes over what its last attempt was."""
        node.outputs, node.artifacts = last.outputs, last.artifacts
        node.exit_code, node.error_code = last.exit_code, last.error_code
        node.attempt, node.progress = last.attempt, last.progress
        self.run.transition(node, last.phase, message or last.message)
        return node

    def resolved(self, strategy: RetryStrategy) -> RetryStrategy:
        """The strategy with its tags replaced."""

        def text(value: str) -> str:
            return substitute(value, self.scope, f"retryStrategy of {self.template.name}")

        backoff = strategy.backoff
        if backoff is not None:
            backoff = Backoff(duration=text(backoff.duration), factor=text(backoff.factor), cap=text(backoff.cap))
        limit = None if strategy.limit is None else text(strategy.limit)
        return replace(strategy, limit=limit, expression=text(strategy.expression), backoff=backoff)
