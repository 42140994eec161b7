"""Rules on loops, DAGs and what passes between their tasks (Argo: workflow/controller/{operator,dag,steps}.go)."""

import re
from collections.abc import Iterator

from workflows.lint.model import Body, Manifests, Place, Rule, Template, listing, mapping, parameters_of
from workflows.lint.tags import TAG, texts

LOOPS = ("withItems", "withParam", "withSequence")
_AGGREGATE = re.compile(r"(?:tasks|steps)\.([A-Za-z0-9_-]+)\.outputs\.(parameters(?:\.[A-Za-z0-9_-]+)?|result)\b")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_HYPHENATED = re.compile(r"\b(?:workflow|inputs|tasks|steps|outputs)\.[A-Za-z_.]*[A-Za-z]-[A-Za-z][A-Za-z0-9_-]*")
_OUTPUT = re.compile(r"(?:tasks|steps)\.([A-Za-z0-9_-]+)\.outputs\.parameters\.([A-Za-z0-9_-]+)")


def is_loop(call: Body) -> bool:
    return any(key in call for key in LOOPS)


def by_name(template: Template) -> dict[str, Template]:
    """The templates beside this one."""
    return {
        str(body.get("name")): Template(manifest=template.manifest, body=body, path=template.path)
        for body in listing(template.manifest.spec.get("templates"))
    }


def callee(template: Template, call: Body) -> Body:
    """The body of the template that a task or step calls; empty when it is not in this manifest."""
    if isinstance(call.get("inline"), dict):
        return mapping(call["inline"])
    found = by_name(template).get(str(call.get("template")))
    return found.body if found else {}


def limit_over_retried_child(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        limits = [key for key in ("failFast", "parallelism") if template.body.get(key)]
        for path, call in template.calls:
            if limits and "retryStrategy" in callee(template, call):
                problem = f"{' and '.join(limits)} of {template.name} don't see that {call.get('template')} is retried"
                yield Place(manifest=template.manifest, path=path, problem=problem)


def fail_fast_on_dag(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        if "dag" in template.body and template.body.get("failFast"):
            yield _at(template, "failFast of the template, not of its dag", ".failFast")


def sequence_goes_on(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        if "steps" not in template.body or str(template.body.get("parallelism")) != "1":
            continue
        for path, call in template.calls:
            if is_loop(call) and not template.body.get("failFast"):
                problem = "one at a time, but a failed item does not stop the next"
                yield Place(manifest=template.manifest, path=path, problem=problem)


def aggregated_outputs(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        looped = {str(call.get("name")) for _, call in template.calls if is_loop(call)}
        for path, text in texts(template.body):
            for found in _AGGREGATE.finditer(text):
                if found[1] in looped and TAG.search(text):
                    yield _at(
                        template, f"outputs of the loop {found[1]}: those of items that succeeded only", f".{path}"
                    )


def skipped_output(manifests: Manifests) -> Iterator[Place]:
    """Argo: docs/variables.md, "Outputs of Skipped and Omitted Nodes"."""
    for template in manifests.templates():
        maybe = {str(call.get("name")): call for _, call in template.calls if call.get("when")}
        for path, text in _unguarded(template):
            for found in _OUTPUT.finditer(text):
                if found[1] in maybe and not _has_default(callee(template, maybe[found[1]]).get("outputs"), found[2]):
                    yield _at(template, f"{found[1]} may be skipped, and then has no output {found[2]}", f".{path}")


def _unguarded(template: Template) -> Iterator[tuple[str, str]]:
    """The texts of a DAG or Steps template that no default stands in for."""
    guarded = [
        f"outputs.parameters[{output.get('name')}].valueFrom.parameter"
        for output in parameters_of(template.body.get("outputs"))
        if "default" in mapping(output.get("valueFrom"))
    ]
    guarded += [
        f"[{call.get('name')}].arguments.parameters[{item.get('name')}].value"
        for _, call in template.calls
        for item in parameters_of(call.get("arguments"))
        if _has_default(callee(template, call).get("inputs"), str(item.get("name")))
    ]
    return (
        (path, text) for path, text in texts(template.body) if not path.endswith(tuple(guarded)) and "??" not in text
    )


def _has_default(holder: object, name: str) -> bool:
    """Has this input or output a default?"""
    named = [item for item in parameters_of(holder) if str(item.get("name")) == name]
    return any("default" in item or "default" in mapping(item.get("valueFrom")) for item in named)


def all_failed(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        for path, call in template.calls:
            if ".AllFailed" in str(call.get("depends") or ""):
                problem = "AllFailed is false when one item ends as Error"
                yield Place(manifest=template.manifest, path=f"{path}.depends", problem=problem)


def recursion(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        if not template.inline and template.name in _reachable(template):
            yield _at(template, "it calls itself, and Argo stops at a depth of 100")


def _reachable(template: Template) -> set[str]:
    known = by_name(template)
    found: set[str] = set()
    waiting = [str(call.get("template")) for _, call in template.calls]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [str(call.get("template")) for _, call in known[name].calls] if name in known else []
    return found


def items_are_maps(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        for path, call in template.calls:
            items = call.get("withItems")
            if isinstance(items, list) and any(isinstance(item, dict | list) for item in items):
                problem = "items that are maps become the nodes' names"
                yield Place(manifest=template.manifest, path=f"{path}.withItems", problem=problem)


def skipped_dependency(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        tasks = {str(call.get("name")): call for _, call in template.calls}
        for path, call in template.calls if "dag" in template.body else ():
            depends = str(call.get("depends") or "")
            for name in re.findall(r"[A-Za-z0-9_-]+(?![A-Za-z0-9_.-])", re.sub(r"[A-Za-z0-9_-]+\.\w+", "", depends)):
                if mapping(tasks.get(name)).get("when") and len(re.findall(r"\|\|", depends)) > 0:
                    problem = f"a skipped {name} counts as done, so a failure of the other is passed over"
                    yield Place(manifest=template.manifest, path=f"{path}.depends", problem=problem)


def container_set(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        if "containerSet" in template.body:
            yield _at(template, "a container set whose pod is deleted is waited for without end", ".containerSet")


def hyphen_in_expression(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        for path, text in texts(template.body):
            for found in TAG.finditer(text):
                bare = _QUOTED.sub("", found[2]) if found[1] else ""
                if name := _HYPHENATED.search(bare):
                    yield _at(template, f"{name[0]} is a subtraction in an expression", f".{path}")


def all_failures(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        for path, text in texts(template.body):
            if "workflow.failures" in text:
                yield _at(template, "workflow.failures grows with each failed pod, beyond what fits", f".{path}")


def memoized(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        if "memoize" in template.body:
            yield _at(template, "its results lie in a ConfigMap of 1 MiB, under keys that can be no URI", ".memoize")


def _at(template: Template, problem: str, below: str = "") -> Place:
    return Place(manifest=template.manifest, path=f"{template.path}{below}", problem=problem)


RULES = (
    Rule(
        name="limit-over-retried-child",
        severity="error",
        advice="call a Steps template without retries that calls it: failFast ends pending retries, and parallelism "
        "lets the next item start during a backoff (argo-workflows#16849, #10137)",
        check=limit_over_retried_child,
    ),
    Rule(
        name="template-fail-fast",
        severity="error",
        advice="leave it out: dag.failFast is true by default, and the template's ends pending retries",
        check=fail_fast_on_dag,
    ),
    Rule(name="loop-goes-on", severity="error", advice="set failFast beside parallelism", check=sequence_goes_on),
    Rule(
        name="aggregated-outputs",
        severity="error",
        advice="let the consumer list what the workers committed; take depends for the order alone",
        check=aggregated_outputs,
    ),
    Rule(
        name="skipped-output",
        severity="error",
        advice="set valueFrom.default of the output, default of the input, or write `??` in an expression",
        check=skipped_output,
    ),
    Rule(name="all-failed", severity="error", advice="write !NAME.AnySucceeded", check=all_failed),
    Rule(name="recursion", severity="error", advice="take withSequence or a child Workflow", check=recursion),
    Rule(name="loop-items-are-maps", severity="error", advice="loop over numbers", check=items_are_maps),
    Rule(
        name="skipped-dependency",
        severity="error",
        advice="write NAME.Succeeded for tasks with `when`",
        check=skipped_dependency,
    ),
    Rule(
        name="container-set",
        severity="error",
        advice="take one template for each container (argo-workflows#13951)",
        check=container_set,
    ),
    Rule(
        name="expression-hyphen",
        severity="error",
        advice="write the name in brackets: workflow.parameters['a-b']",
        check=hyphen_in_expression,
    ),
    Rule(
        name="workflow-failures",
        severity="error",
        advice="take workflow.status; the report lists what failed (argo-workflows#6093)",
        check=all_failures,
    ),
    Rule(name="memoize", severity="error", advice="let the step find its work done in the store", check=memoized),
)
