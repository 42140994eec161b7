"""Rules on references: templates, parameters, variables and tasks that a manifest names must exist."""

import re
from collections.abc import Iterator

from workflows.lint.loop_rules import by_name, callee, is_loop
from workflows.lint.model import (
    Body,
    Manifest,
    Manifests,
    Place,
    Rule,
    Template,
    listing,
    mapping,
    parameters_of,
    strings,
)
from workflows.lint.tags import TAG, texts
from workflows.local.expression_values import ExpressionError
from workflows.local.expressions import names_in_depends

_GLOBAL = re.compile(
    r"workflow\.(name|namespace|uid|mainEntrypoint|serviceAccountName|priority|status|duration|scheduledTime"
    r"|parameters"
    r"|creationTimestamp(\..+)?|(labels|annotations|outputs)(\..+)?)"
)
_OF_A_NODE = ("pod.name", "node.name", "steps.name", "tasks.name")
_OF_METRICS = re.compile(r"duration|status|exitCode|resourcesDuration\..+")
_AT_EXIT = "workflow.failures"
_OF_A_CALL = re.compile(r"(tasks|steps)\.([A-Za-z0-9_-]+)\.(.+)")
_CALL_RESULTS = re.compile(
    r"(id|ip|status|startedAt|finishedAt|exitCode|hostNodeName)|outputs\.(result|parameters|artifacts\..+)"
)
_IN_EXPRESSIONS = re.compile(
    r"\b(workflow\.parameters|inputs\.parameters)(?:\.([A-Za-z_][A-Za-z0-9_]*)|\[['\"]([^'\"]+)['\"]\])"
)


def unknown_template(manifests: Manifests) -> Iterator[Place]:
    submitted = {mapping(manifest.spec.get("workflowTemplateRef")).get("name") for manifest in manifests.workflows()}
    for manifest in manifests.workflows():
        names = {str(body.get("name")) for body in listing(manifest.spec.get("templates"))}
        if names:
            runs = manifest.kind in ("Workflow", "CronWorkflow") or manifest.name in submitted
            for path, name in _named_by_spec(manifest, runs=runs):
                if name not in names:
                    yield Place(manifest=manifest, path=path, problem=f"there is no template {name!r}")
    for template in manifests.templates():
        names_here = by_name(template)
        for path, call in template.calls:
            called = call.get("template")
            if called is not None and str(called) not in names_here:
                yield Place(manifest=template.manifest, path=path, problem=f"there is no template {called!r}")
            elif called is None and "inline" not in call and "templateRef" not in call:
                yield Place(manifest=template.manifest, path=path, problem="it names no template")


def _named_by_spec(manifest: Manifest, *, runs: bool) -> Iterator[tuple[str, str]]:
    """(path, template) of what the spec names. A WorkflowTemplate that is not submitted needs no entrypoint."""
    for field in ("entrypoint", "onExit"):
        if manifest.spec.get(field):
            yield manifest.at(f"{manifest.spec_path}.{field}"), str(manifest.spec[field])
    if runs and not manifest.spec.get("entrypoint"):
        yield manifest.at(f"{manifest.spec_path}.entrypoint"), ""


def unknown_reference(manifests: Manifests) -> Iterator[Place]:
    known = {document.name: document for document in manifests.of_kind("WorkflowTemplate")}
    for manifest in manifests.workflows():
        reference = mapping(manifest.spec.get("workflowTemplateRef")).get("name")
        if reference is None or not known or TAG.search(str(reference)):
            continue
        path = manifest.at(f"{manifest.spec_path}.workflowTemplateRef")
        if str(reference) not in known:
            problem = f"there is no WorkflowTemplate {reference!r} among the manifests"
            yield Place(manifest=manifest, path=path, problem=problem)
            continue
        yield from _submitted(manifest, known[str(reference)])


def _submitted(manifest: Manifest, template: Manifest) -> Iterator[Place]:
    """Arguments of a Workflow against the parameters of its WorkflowTemplate."""
    path = manifest.at(f"{manifest.spec_path}.arguments.parameters")
    declared = {str(item.get("name")): item for item in parameters_of(template.spec.get("arguments"))}
    given = {str(item.get("name")): item for item in parameters_of(manifest.spec.get("arguments"))}
    for name, item in given.items():
        if name not in declared:
            yield Place(manifest=manifest, path=path, problem=f"{template.name} has no parameter {name!r}")
            continue
        choices = declared[name].get("enum")
        if choices and "value" in item and manifest.holder is None and item["value"] not in choices:
            yield Place(manifest=manifest, path=path, problem=f"{name} = {item['value']!r} is not one of {choices}")
    for name, item in declared.items():
        if name not in given and "value" not in item and "default" not in item:
            yield Place(manifest=manifest, path=path, problem=f"{template.name} needs a value for {name!r}")


def arguments(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        for path, call in template.calls:
            body = callee(template, call)
            if not body:
                continue
            inputs = {str(item.get("name")): item for item in parameters_of(body.get("inputs"))}
            given = {str(item.get("name")) for item in parameters_of(call.get("arguments"))}
            missing = [name for name, item in inputs.items() if not {"value", "default"} & set(item)]
            problems = [f"no value for the input {name!r}" for name in missing if name not in given]
            problems += [f"{call.get('template')} has no input {name!r}" for name in given if name not in inputs]
            for problem in problems:
                yield Place(manifest=template.manifest, path=path, problem=problem)


def unknown_dependency(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        tasks = {str(call.get("name")) for _, call in template.calls}
        for path, call in template.calls if "dag" in template.body else ():
            try:
                wanted = names_in_depends(str(call.get("depends") or "")) + strings(call.get("dependencies"))
            except ExpressionError as error:
                yield Place(manifest=template.manifest, path=f"{path}.depends", problem=str(error))
                continue
            for name in wanted:
                if name not in tasks - {str(call.get("name"))}:
                    problem = f"there is no other task {name!r}"
                    yield Place(manifest=template.manifest, path=f"{path}.depends", problem=problem)


def duplicate_names(manifests: Manifests) -> Iterator[Place]:
    for manifest in manifests.workflows():
        names = [str(body.get("name")) for body in listing(manifest.spec.get("templates"))]
        for name in sorted({name for name in names if names.count(name) > 1}):
            path = manifest.at(f"{manifest.spec_path}.templates")
            yield Place(manifest=manifest, path=path, problem=f"two templates are called {name!r}")
    for template in manifests.templates():
        calls = [str(call.get("name")) for _, call in template.calls]
        for name in sorted({name for name in calls if calls.count(name) > 1}):
            yield Place(manifest=template.manifest, path=template.path, problem=f"two tasks are called {name!r}")
    seen: set[tuple[str, str]] = set()
    for document in manifests.documents:
        key = (document.kind, document.name)
        if document.holder is None and key in seen and not mapping(document.body.get("metadata")).get("namespace"):
            yield Place(manifest=document, path="metadata.name", problem="another manifest has the same kind and name")
        seen.add(key)


def unknown_variable(manifests: Manifests) -> Iterator[Place]:
    for manifest in manifests.workflows():
        if manifest.holder is not None:
            continue
        outside = {key: value for key, value in manifest.spec.items() if key != "templates"}
        for path, text in texts(outside, manifest.spec_path):
            for name in _names(text):
                if not _of_the_workflow(name, manifest):
                    yield Place(manifest=manifest, path=path, problem=f"{{{{{name}}}}} is not known here")
    for template in manifests.templates():
        if template.manifest.holder is None:
            yield from _unknown_in(template)


def _unknown_in(template: Template) -> Iterator[Place]:
    at_exit = template.name in _exit_templates(template.manifest)
    calls = {str(call.get("name")): call for _, call in template.calls}
    for path, text in texts(template.body):
        if ".inline." in path:  # a template of its own
            continue
        in_metrics = path.startswith("metrics.")
        looped = any(is_loop(call) and f"[{name}]" in path for name, call in calls.items())
        for name in _names(text):
            known = (
                _of_the_workflow(name, template.manifest)
                or (at_exit and name == _AT_EXIT)
                or (in_metrics and _OF_METRICS.fullmatch(name))
                or (looped and re.fullmatch(r"item(\..+)?", name))
                or _of_the_template(name, template)
                or _of_a_call(name, template, calls)
            )
            if not known:
                where = f"{template.path}.{path}"
                yield Place(manifest=template.manifest, path=where, problem=f"{{{{{name}}}}} is not known here")


def _names(text: str) -> Iterator[str]:
    """Variables of the tags in a text; of expressions, the parameters that they name."""
    for found in TAG.finditer(text):
        if not found[1]:
            yield found[2].strip()
            continue
        for named in _IN_EXPRESSIONS.finditer(found[2]):
            yield f"{named[1]}.{named[2] or named[3]}"


def _of_the_workflow(name: str, manifest: Manifest) -> bool:
    if name.startswith("workflow.parameters."):
        declared = {str(item.get("name")) for item in parameters_of(manifest.spec.get("arguments"))}
        return name.removeprefix("workflow.parameters.") in declared | {"json"}
    return _GLOBAL.fullmatch(name) is not None


def _of_the_template(name: str, template: Template) -> bool:
    if name == "retries" or name.startswith("lastRetry."):
        return template.retry is not None
    if name.startswith("inputs.parameters."):
        inputs = {str(item.get("name")) for item in parameters_of(template.body.get("inputs"))}
        return name.removeprefix("inputs.parameters.") in inputs
    return (
        name in _OF_A_NODE or re.fullmatch(r"(inputs|outputs)\.(parameters|artifacts|result)(\..+)?", name) is not None
    )


def _of_a_call(name: str, template: Template, calls: dict[str, Body]) -> bool:
    found = _OF_A_CALL.fullmatch(name)
    if found is None or found[2] not in calls or ("dag" in template.body) != (found[1] == "tasks"):
        return False
    if _CALL_RESULTS.fullmatch(found[3]):
        return True
    output = re.fullmatch(r"outputs\.parameters\.(.+)", found[3])
    body = callee(template, calls[found[2]])
    return output is not None and (
        not body or output[1] in {str(item.get("name")) for item in parameters_of(body.get("outputs"))}
    )


def _exit_templates(manifest: Manifest) -> set[str]:
    """Templates that only the exit handler runs."""
    bodies = {str(body.get("name")): body for body in listing(manifest.spec.get("templates"))}
    waiting, found = [str(manifest.spec.get("onExit") or "")], set()
    while waiting:
        name = waiting.pop()
        if name in bodies and name not in found:
            found.add(name)
            below = Template(manifest=manifest, body=bodies[name], path="")
            waiting += [str(call.get("template")) for _, call in below.calls]
    return found


RULES = (
    Rule(
        name="unknown-template",
        severity="error",
        advice="correct the name: Argo finds it out when the workflow runs",
        check=unknown_template,
    ),
    Rule(
        name="workflow-arguments",
        severity="error",
        advice="correct the name, or give the WorkflowTemplate's manifest too",
        check=unknown_reference,
    ),
    Rule(name="template-arguments", severity="error", advice="give each input its argument", check=arguments),
    Rule(name="unknown-dependency", severity="error", advice="correct the name in depends", check=unknown_dependency),
    Rule(name="duplicate-name", severity="error", advice="give each a name of its own", check=duplicate_names),
    Rule(
        name="unknown-variable",
        severity="error",
        advice="declare it, or correct its name: Argo leaves the tag as it is or fails",
        check=unknown_variable,
    ),
)
