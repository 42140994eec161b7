"""`{{tags}}` of Argo: which there are, and sample values for them.

Samples make a manifest that is held as text readable, and show the longest name that it can get.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from workflows import campaign, jobset
from workflows.lint.model import Body, mapping, parameters_of
from workflows.local.expression_values import ExpressionError
from workflows.local.variables import UnresolvedTag, substitute

TAG = re.compile(r"\{\{(=?)(.*?)\}\}", re.DOTALL)

LONGEST_RUN = "r" * 40
LONGEST_ITERATION = "9" * campaign.ITERATION_DIGITS
NUMBER = "2"
"""Sample of what has no default: a number is a text as well where it is quoted."""


def longest_workflow_name(template_name: str) -> str:
    """The longest name of a Workflow of this WorkflowTemplate that `moerl submit` and the campaign give or allow."""
    if template_name == campaign.NAME:
        return "w" * campaign.LONGEST_NAME
    return "w" * jobset.LONGEST_NAME


class Samples(dict[str, str]):
    """Values by tag; a tag without one gets a number."""

    def __missing__(self, name: str) -> str:
        return NUMBER

    def __contains__(self, name: object) -> bool:
        return True


def samples_for(workflow: Body, spec: Body, template: Body, *, filled: bool) -> Samples:
    """Values for the tags inside `template`; `filled`: also for parameters that are empty by default."""
    samples = Samples({"workflow.name": longest_workflow_name(str(mapping(workflow.get("metadata")).get("name", "")))})
    for prefix, holder in (("workflow", spec.get("arguments")), ("inputs", template.get("inputs"))):
        for parameter in parameters_of(holder):
            name, value = parameter.get("name"), parameter.get("value", parameter.get("default"))
            known = str(value) if value is not None and TAG.search(str(value)) is None else None
            samples[f"{prefix}.parameters.{name}"] = _sample(str(name), known, filled=filled)
    return samples


def _sample(name: str, value: str | None, *, filled: bool) -> str:
    if name == "run":
        return LONGEST_RUN
    if name == "iteration":
        return LONGEST_ITERATION
    if value is None or (filled and value == ""):
        return NUMBER
    return value


def replace_tags(text: str, samples: Samples, where: str) -> str:
    """`text` with every tag replaced; an expression that can't be worked out becomes a number, too."""

    def replace(found: re.Match[str]) -> str:
        # A mapping that claims to hold every name has no members to list, so expressions get what is really there.
        scope: Mapping[str, str] = dict(samples) if found[1] else samples
        try:
            return substitute(found[0], scope, where)
        except (ExpressionError, UnresolvedTag):
            return NUMBER

    return TAG.sub(replace, text)


def texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, text) of every text below `value`, keys of mappings included."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            below = f"{path}.{key}" if path else str(key)
            if isinstance(key, str) and TAG.search(key):
                yield path, key
            yield from texts(item, below)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            name = item.get("name") if isinstance(item, dict) else None
            yield from texts(item, f"{path}[{name if isinstance(name, str) else index}]")
