"""Rendered manifests that a test tampers with, one trap at a time, and which rules then find something."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from workflows.lint.linter import RULES
from workflows.lint.loading import expand, parse, read_files
from workflows.lint.model import Manifest, Manifests
from workflows.platform import load_profile

Body = dict[str, Any]
REPOSITORY = Path(__file__).resolve().parent.parent
OVERLAY = REPOSITORY / "templates" / "overlays" / "eks-p5en"
PROFILE = "p5en"


class Documents(dict[str, Body]):
    """Manifests by `kind/name`, WorkflowTemplates and the like also by their name alone."""

    def template(self, workflow: str, name: str) -> Body:
        return next(item for item in self.of(workflow)["spec"]["templates"] if item["name"] == name)

    def of(self, name: str) -> Body:
        return next(body for key, body in self.items() if key == name or key.endswith(f"/{name}"))

    def container(self, name: str, workflow: str = "policy-iteration") -> Body:
        found: Body = self.template(workflow, name)["container"]
        return found

    def variable(self, template: str, name: str) -> Body:
        return next(item for item in self.container(template)["env"] if item["name"] == name)

    def gang(self, old: str, new: str) -> None:
        """Replace text in the JobSet that the resource template holds."""
        self.held("policy-iteration", "train-gang", old, new)

    def child(self, old: str, new: str) -> None:
        self.held("policy-campaign", "child", old, new)

    def held(self, workflow: str, template: str, old: str, new: str) -> None:
        resource = self.template(workflow, template)["resource"]
        assert old in resource["manifest"], f"{old!r} is not in the manifest"
        resource["manifest"] = resource["manifest"].replace(old, new)


@dataclass(frozen=True, slots=True)
class Case:
    """`edit` sets the trap; `rule` names it, and `also` what else it must bring up."""

    rule: str
    edit: Callable[[Documents], object]
    also: tuple[str, ...] = ()


@cache
def _rendered() -> tuple[Manifest, ...]:
    manifests = parse(read_files([OVERLAY, OVERLAY / "nodes"]))
    return tuple(manifest for manifest in manifests if manifest.holder is None)


def documents() -> Documents:
    """A copy of the manifests for p5en, as they are committed."""
    return Documents({f"{item.kind}/{item.name}": copy.deepcopy(item.body) for item in _rendered()})


def manifests_of(edited: Documents) -> Manifests:
    expanded = [manifest for name, body in edited.items() for manifest in expand(Manifest(source=name, body=body))]
    return Manifests(documents=tuple(expanded), profile=load_profile(PROFILE))


def rules_that_find(edited: Documents) -> set[str]:
    """Names of the rules that find something, schemas aside."""
    manifests = manifests_of(edited)
    return {rule.name for rule in RULES for _ in rule.check(manifests)} - {"no-schema"}
