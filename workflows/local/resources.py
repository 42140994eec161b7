"""Resource templates: a pod that creates an object and watches it. Here the object is a child Workflow or a JobSet.

The object has a life of its own, as on a cluster: a watcher that is lost, stopped or out of time leaves it running, and
the next `apply` of the same name finds it again. Only a deletion (by an exit handler, say) ends it.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from steps.errors import ConfigError
from workflows.local.containers import DEADLINE, POD_DELETED, parse_deadline
from workflows.local.gangs import ResourceDeleted
from workflows.local.model import Resource, Template
from workflows.local.outputs import json_path
from workflows.local.parsing import parse_workflow
from workflows.local.selectors import all_true, first_true
from workflows.local.status import NodeStatus
from workflows.local.variables import substitute

if TYPE_CHECKING:
    from workflows.local.run import WorkflowRun

EXIT_RESOURCE_FAILED = "64"  # of argoexec resource
KINDS = {
    "Workflow": ("workflow", "workflows", "wf", "workflow.argoproj.io", "workflows.argoproj.io"),
    "JobSet": ("jobset", "jobsets", "jobset.jobset.x-k8s.io", "jobsets.jobset.x-k8s.io"),
}
"""Each kind, and how kubectl may be told it."""
NEVER_HERE = ("statefulset", "statefulsets", "statefulsets.apps", "service", "services")
"""Kinds that are never made on this machine, as kubectl may be told them: `apply` refuses them."""
DELETED = "The resource has been deleted while its status was still being checked. Will not be retried"
# kubectl's; Argo adds the first itself (getKubectlArguments). Here a deletion is always waited for.
_FLAGS_WITHOUT_EFFECT = ("--ignore-not-found", "--wait", "--cascade", "--now")


async def run_resource(
    run: "WorkflowRun", node: NodeStatus, template: Template, resource: Resource, scope: Mapping[str, str]
) -> None:
    """Gives `node` its final phase. ConfigError: the manifest can't be used."""
    where = f"template {template.name}"
    deadline_s = parse_deadline(substitute(template.active_deadline_s, scope, where), where)
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    run.pods[node.name] = lost
    try:
        async with run.pod_slot():
            if run.shutdown:
                return _lose(run, node, run.shutdown)
            run.transition(node, "Running")
            work = asyncio.create_task(_act(run, resource, scope, where))
            waited_for: set[asyncio.Future[Any]] = {work, lost}
            await asyncio.wait(waited_for, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                return _lose(run, node, lost.result() if lost.done() else DEADLINE)
    finally:
        del run.pods[node.name]
    try:
        document = work.result()
    except ResourceDeleted:
        return _fail(run, node, DELETED)
    _conclude(run, node, template, resource, document)


def _lose(run: "WorkflowRun", node: NodeStatus, reason: str) -> None:
    """The watcher ends before what it watches."""
    node.exit_code = "-1"
    run.transition(node, "Error" if reason == POD_DELETED else "Failed", reason)


def _fail(run: "WorkflowRun", node: NodeStatus, message: str) -> None:
    node.exit_code = EXIT_RESOURCE_FAILED
    run.transition(node, "Failed", message)


def _conclude(
    run: "WorkflowRun", node: NodeStatus, template: Template, resource: Resource, document: Mapping[str, Any]
) -> None:
    """Failure terms are OR-ed and come first, success terms are AND-ed (matchConditions of executor/resource.go)."""

    def lookup(key: str) -> str | None:
        return json_path(f"{{.{key}}}", document)

    failed = first_true(resource.failure_condition, lookup)
    if failed:
        _explain_gang(node, document)
        return _fail(run, node, f"failure condition '{{{failed}}}' evaluated true")
    if not all_true(resource.success_condition, lookup):
        return _fail(run, node, f"success condition '{resource.success_condition}' never became true")
    run.publish(node, _outputs(template, document), {})
    run.transition(node, "Succeeded")


def _explain_gang(node: NodeStatus, document: Mapping[str, Any]) -> None:
    """What a person asks of a gang that failed: the code and the log of the process that did."""
    local = document["status"].get("local")
    if local is not None and local["log"]:
        node.folder = str(Path(local["log"]).parent)
        node.process_code = str(local["exitCode"])


async def _act(run: "WorkflowRun", resource: Resource, scope: Mapping[str, str], where: str) -> dict[str, Any]:
    """The object when it has ended; nothing for a deletion. Cancelling it stops the watching only."""
    if resource.action == "delete":
        await _delete(run, resource, scope, where)
        return {}
    manifest = _manifest(resource, scope, where)
    kind = str(manifest.get("kind"))
    if kind == "Workflow":
        return await _child_workflow(run, resource, manifest, where)
    if kind == "JobSet" and resource.action != "get":
        return await run.session.job_sets.apply(manifest, run, create=resource.action == "create", owned=resource.owned)
    known = " and ".join(KINDS)
    raise ConfigError(f"{where}: {resource.action} of kind {kind} is not known to the local executor ({known} are)")


def _manifest(resource: Resource, scope: Mapping[str, str], where: str) -> dict[str, Any]:
    try:
        manifest = yaml.safe_load(substitute(resource.manifest, scope, f"{where} manifest"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: the manifest is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(manifest, dict):
        raise ConfigError(f"{where}: the manifest must be one object")
    return manifest


async def _child_workflow(
    run: "WorkflowRun", resource: Resource, manifest: dict[str, Any], where: str
) -> dict[str, Any]:
    workflow = parse_workflow(manifest)
    session = run.session
    existing = session.status_of(workflow.name)
    if resource.action == "get":
        if existing is None:
            raise ConfigError(f'{where}: workflows.argoproj.io "{workflow.name}" not found')
        return {"status": existing.kubernetes_status()}
    if resource.action == "create" and existing is not None:
        raise ConfigError(f'{where}: workflows.argoproj.io "{workflow.name}" already exists')
    status = await asyncio.shield(session.start(workflow, run.status.name))
    if session.status_of(workflow.name) is None:
        raise ResourceDeleted
    return {"status": status.kubernetes_status()}


async def _delete(run: "WorkflowRun", resource: Resource, scope: Mapping[str, str], where: str) -> None:
    """Argo deletes with --ignore-not-found: what is not there needs no deletion."""
    if resource.manifest:
        manifest = _manifest(resource, scope, where)
        targets = [(str(manifest.get("kind")), str((manifest.get("metadata") or {}).get("name")), "")]
    else:
        targets = _deleted_by_flags([substitute(flag, scope, where) for flag in resource.flags], where)
    for kind, name, selector in targets:
        await _delete_one(run, kind, name, selector, where)


async def _delete_one(run: "WorkflowRun", kind: str, name: str, selector: str, where: str) -> None:
    known = next((known for known, words in KINDS.items() if kind.lower() in words), kind)
    if known == "Workflow":
        for workflow in _selected(run, selector) if selector else [name]:
            await run.session.delete(workflow)
    elif known == "JobSet" and not selector:
        await run.session.job_sets.delete(name)
    elif kind.lower() not in NEVER_HERE:
        by = f" by selector {selector}" if selector else ""
        raise ConfigError(f"{where}: delete of kind {kind}{by} is not known to the local executor")


def _selected(run: "WorkflowRun", selector: str) -> list[str]:
    """The workflows whose labels match."""
    return [status.name for status in run.session.statuses() if all_true(selector, status.kubernetes_labels().get)]


def _deleted_by_flags(flags: list[str], where: str) -> list[tuple[str, str, str]]:
    """(kind, name, "") for each KIND/NAME or for KIND NAME, or (kind, "", selector)."""
    words: list[str] = []
    selector = ""
    queue = list(flags)
    while queue:
        flag, has_value, value = queue.pop(0).partition("=")
        if flag in ("-l", "--selector"):
            selector = value if has_value else queue.pop(0) if queue else ""
        elif not flag.startswith("-"):
            words.append(f"{flag}{has_value}{value}")
        elif flag not in _FLAGS_WITHOUT_EFFECT:
            raise ConfigError(f"{where}: flag {flag} is not known to the local executor")
    if words and not selector and all("/" in word for word in words):
        return [(kind, name, "") for kind, _, name in (word.partition("/") for word in words)]
    if len(words) == 2 and not selector:
        return [(words[0], words[1], "")]
    if len(words) == 1 and selector:
        return [(words[0], "", selector)]
    raise ConfigError(f"{where}: delete needs a manifest, or flags KIND NAME, or flags KIND --selector=...")


def _outputs(template: Template, document: Mapping[str, Any]) -> dict[str, str]:
    """kubectl prints nothing where a path leads nowhere; Argo takes a default only where there is no object at all."""
    outputs: dict[str, str] = {}
    for parameter in template.outputs:
        source = parameter.value_from
        if source is None:
            outputs[parameter.name] = parameter.value or ""
        elif not document:
            outputs[parameter.name] = source.default or ""
        else:
            outputs[parameter.name] = json_path(source.json_path or "", document) or ""
    return outputs
