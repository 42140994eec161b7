"""Dag tasks and steps: their names, arguments, fan-outs and dependencies."""

from collections.abc import Mapping

from workflows.local.expressions import DEPENDS, compile_expression, names_in_depends
from workflows.local.fields import Fields, refuse
from workflows.local.model import Call, Dag, Sequence, Steps


def parse_arguments(fields: Fields, where: str) -> dict[str, str]:
    arguments = fields.below("arguments")
    values: dict[str, str] = {}
    for item in arguments.list("parameters"):
        parameter = Fields(item, f"{where}.arguments")
        name = parameter.required_text("name")
        value = parameter.optional_text("value")
        parameter.ignore("description", "enum", "default")
        parameter.close()
        if value is not None:
            values[name] = value
    arguments.close()
    return values


def parse_steps(fields: Fields) -> Steps:
    groups = []
    for number, group in enumerate(fields.list("steps")):
        if not isinstance(group, list):
            refuse(f"{fields.where}.steps[{number}]", "must be a list of parallel steps")
        groups.append(tuple(_call(item, f"{fields.where}.steps") for item in group))
    names = [call.name for group in groups for call in group]
    _check_unique(names, fields.where)
    return Steps(groups=tuple(groups))


def _check_unique(names: list[str], where: str) -> None:
    for name in names:
        if names.count(name) > 1:
            refuse(where, f"the name {name} is used twice")


def parse_dag(fields: Fields) -> Dag:
    tasks = tuple(_call(item, fields.where) for item in fields.list("tasks"))
    dag = Dag(tasks=tasks, fail_fast=fields.flag("failFast", default=True))
    fields.close()
    _check_unique([task.name for task in tasks], fields.where)
    for task in tasks:
        if task.continue_on_failed or task.continue_on_error:
            refuse(f"{fields.where} {task.name}", "has continueOn; say it with depends")
    _check_graph({task.name: names_in_depends(task.depends) for task in tasks}, fields.where)
    return dag


def _check_graph(parents: Mapping[str, list[str]], where: str) -> None:
    """Every dependency exists and nothing waits for itself."""
    for name, names in parents.items():
        for parent in names:
            if parent not in parents:
                refuse(f"{where} task {name}", f"depends on {parent}, which is not a task of this dag")
    done: set[str] = set()
    while len(done) < len(parents):
        ready = {name for name, names in parents.items() if name not in done and done.issuperset(names)}
        if not ready:
            refuse(where, f"tasks {', '.join(sorted(set(parents) - done))} depend on each other in a circle")
        done |= ready


def _call(value: object, where: str) -> Call:
    fields = Fields(value, where)
    name = fields.required_text("name")
    fields.where = where = f"{where} {name}"
    depends = fields.text("depends")
    dependencies = fields.texts("dependencies")
    if depends and dependencies:
        refuse(where, "has both depends and dependencies")
    depends = depends or " && ".join(dependencies)
    if depends:
        compile_expression(depends, DEPENDS)
    continue_on = fields.below("continueOn")
    call = Call(
        name=name,
        template=fields.required_text("template"),
        arguments=parse_arguments(fields, where),
        depends=depends,
        when=fields.text("when"),
        with_items=tuple(fields.list("withItems")) if fields.has("withItems") else None,
        with_param=fields.optional_text("withParam"),
        with_sequence=_sequence(fields),
        continue_on_failed=continue_on.flag("failed"),
        continue_on_error=continue_on.flag("error"),
    )
    continue_on.close()
    fields.close()
    return call


def _sequence(fields: Fields) -> Sequence | None:
    if not fields.has("withSequence"):
        return None
    sequence = fields.below("withSequence")
    parsed = Sequence(
        start=sequence.text("start", "0"),
        end=sequence.optional_text("end"),
        count=sequence.optional_text("count"),
        format=sequence.text("format"),
    )
    sequence.close()
    if (parsed.end is None) == (parsed.count is None):
        refuse(sequence.where, "needs exactly one of count, end")
    return parsed
