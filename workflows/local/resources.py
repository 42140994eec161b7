"""Resource templates: a child Workflow runs in this executor, other kinds go to a registered handler or are refused."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from steps.errors import ConfigError
from workflows.local.model import Resource, Template
from workflows.local.outputs import json_path
from workflows.local.parsing import parse_workflow
from workflows.local.status import NodeStatus
from workflows.local.variables import substitute

if TYPE_CHECKING:
    from workflows.local.run import WorkflowRun

EXIT_RESOURCE_FAILED = "64"  # of argoexec resource
IGNORE_NOT_FOUND = "--ignore-not-found"


class ResourceHandler(Protocol):
    """Runs a kind other than Workflow on this machine (a JobSet as a local gang, for example)."""

    async def apply(self, manifest: dict[str, Any], run: "WorkflowRun") -> dict[str, Any]:
        """Creates the object, or finds it, waits for its end, and returns it with its `status`."""
        ...

    async def delete(self, name: str, run: "WorkflowRun") -> bool:
        """False when there was nothing to delete."""
        ...


async def run_resource(
    run: "WorkflowRun", node: NodeStatus, template: Template, resource: Resource, scope: Mapping[str, str]
) -> None:
    """Gives `node` its final phase. ConfigError: the manifest can't be used."""
    where = f"template {template.name}"
    run.transition(node, "Running")
    if resource.action == "delete":
        return await _delete(run, node, resource, scope, where)
    manifest = _manifest(resource, scope, where)
    kind = str(manifest.get("kind"))
    if kind == "Workflow":
        document = await _child_workflow(run, resource.action, manifest, where)
    elif resource.action == "get":
        raise ConfigError(f"{where}: get of kind {kind} is not known to the local executor")
    else:
        document = await _handler(run, kind, where).apply(manifest, run)
    failed = _first_true(resource.failure_condition, document, any_term=True)
    if failed:
        return _fail(run, node, f"failure condition '{{{failed}}}' evaluated true")
    if run.shutdown:
        return _fail(run, node, run.shutdown)
    if resource.success_condition and not _first_true(resource.success_condition, document, any_term=False):
        return _fail(run, node, f"success condition '{resource.success_condition}' never became true")
    run.publish(node, _outputs(template, document), {})
    run.transition(node, "Succeeded")


def _fail(run: "WorkflowRun", node: NodeStatus, message: str) -> None:
    node.exit_code = EXIT_RESOURCE_FAILED
    run.transition(node, "Failed", message)


def _manifest(resource: Resource, scope: Mapping[str, str], where: str) -> dict[str, Any]:
    try:
        manifest = yaml.safe_load(substitute(resource.manifest, scope, f"{where} manifest"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: the manifest is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(manifest, dict):
        raise ConfigError(f"{where}: the manifest must be one object")
    return manifest


def _handler(run: "WorkflowRun", kind: str, where: str) -> ResourceHandler:
    handlers = run.session.settings.resource_handlers
    if kind not in handlers:
        known = ", ".join(["Workflow", *sorted(handlers)])
        raise ConfigError(f"{where}: kind {kind} is not known to the local executor (known: {known})")
    return handlers[kind]


async def _child_workflow(run: "WorkflowRun", action: str, manifest: dict[str, Any], where: str) -> dict[str, Any]:
    workflow = parse_workflow(manifest)
    session = run.session
    existing = session.status_of(workflow.name)
    if action == "get":
        if existing is None:
            raise ConfigError(f'{where}: workflows.argoproj.io "{workflow.name}" not found')
        return {"status": existing.kubernetes_status()}
    if action == "create" and existing is not None:
        raise ConfigError(f'{where}: workflows.argoproj.io "{workflow.name}" already exists')
    status = await session.apply(workflow)
    return {"status": status.kubernetes_status()}


async def _delete(
    run: "WorkflowRun", node: NodeStatus, resource: Resource, scope: Mapping[str, str], where: str
) -> None:
    flags = [substitute(flag, scope, where) for flag in resource.flags]
    words = [flag for flag in flags if not flag.startswith("-")]
    unknown = [flag for flag in flags if flag.startswith("-") and flag.split("=")[0] != IGNORE_NOT_FOUND]
    if unknown:
        raise ConfigError(f"{where}: flag {unknown[0]} is not known to the local executor")
    if resource.manifest:
        manifest = _manifest(resource, scope, where)
        kind, name = str(manifest.get("kind")), str((manifest.get("metadata") or {}).get("name"))
    elif len(words) == 2:
        kind, name = words
    else:
        raise ConfigError(f"{where}: delete needs a manifest, or flags KIND NAME")
    if kind.lower() in ("workflow", "workflows", "wf"):
        deleted = run.session.delete(name)
    else:
        handlers = run.session.settings.resource_handlers
        kind = next((known for known in handlers if known.lower() == kind.lower()), kind)
        deleted = await _handler(run, kind, where).delete(name, run)
    if not deleted and not any(flag.startswith(IGNORE_NOT_FOUND) for flag in flags):
        return _fail(run, node, f'{kind} "{name}" not found')
    run.transition(node, "Succeeded")


def _outputs(template: Template, document: Mapping[str, Any]) -> dict[str, str]:
    outputs: dict[str, str] = {}
    for parameter in template.outputs:
        source = parameter.value_from
        value = None if source is None else json_path(source.json_path or "", document)
        if value is None:
            value = None if source is None else source.default
        if value is None:
            raise ConfigError(f"template {template.name}: output {parameter.name}: nothing at its jsonPath")
        outputs[parameter.name] = value
    return outputs


# -- conditions: Kubernetes' label-selector syntax, with paths into the object as keys -------------------------------

_TERM = re.compile(
    r"\s*(?:(?P<not>!)\s*(?P<absent>[\w./-]+)|(?P<key>[\w./-]+)\s*(?:(?P<op>==|=|!=)\s*(?P<value>[\w./-]*)"
    r"|\s(?P<set>in|notin)\s*\((?P<values>[^()]*)\))?)\s*"
)


def _first_true(selector: str, document: Mapping[str, Any], *, any_term: bool) -> str:
    """The first term that holds (failure terms are OR-ed); or the selector if all do (success terms are AND-ed)."""
    if not selector.strip():
        return ""
    terms = _terms(selector)
    true = [text for text, term in terms if _holds(term, document)]
    if any_term:
        return true[0] if true else ""
    return selector if len(true) == len(terms) else ""


def _terms(selector: str) -> list[tuple[str, re.Match[str]]]:
    found = []
    for text in re.split(r",(?![^()]*\))", selector):
        match = _TERM.fullmatch(text)
        if match is None:
            raise ConfigError(f"condition {text.strip()!r} is not label-selector syntax")
        found.append((text.strip(), match))
    return found


def _holds(term: re.Match[str], document: Mapping[str, Any]) -> bool:
    value = json_path("{." + (term["absent"] or term["key"]) + "}", document)
    if term["not"]:
        return value is None
    if term["set"]:
        inside = value in [item.strip() for item in term["values"].split(",")]
        return inside if term["set"] == "in" else not inside
    if term["op"] == "!=":
        return value != term["value"]
    return value is not None if term["op"] is None else value == term["value"]
