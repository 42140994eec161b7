"""Role-based access of the Kubernetes API double: who may do what, by the Roles of our own manifests."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.doubles.kubernetes_store import ApiError

ADMIN = "system:masters-user"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked, in the terms of the authorizer."""

    verb: str
    group: str
    resource: str
    subresource: str = ""
    namespace: str = ""
    name: str = ""

    @property
    def full_resource(self) -> str:
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource


@dataclass(kw_only=True)
class Authorizer:
    """Rules by user; a user named ADMIN may do everything."""

    rules: dict[str, list[tuple[str, dict[str, Any]]]] = field(default_factory=dict)
    """User -> (namespace, or "" for all, rule of a Role)."""

    def grant(self, user: str, namespace: str, rules: Iterable[dict[str, Any]]) -> None:
        self.rules.setdefault(user, []).extend((namespace, rule) for rule in rules)

    def allows(self, user: str, request: Request) -> bool:
        if user == ADMIN or _is_everybodys(request):
            return True
        return any(
            scope in ("", request.namespace) and (scope == "" or request.namespace) and _covers(rule, request)
            for scope, rule in self.rules.get(user, [])
        )

    def check(self, user: str, request: Request) -> None:
        """Raise the 403 that the real server answers, word for word."""
        if self.allows(user, request):
            return
        named = f'"{request.name}" ' if request.name else ""
        subject = f"{request.resource}.{request.group}" if request.group else request.resource
        where = f'in the namespace "{request.namespace}"' if request.namespace else "at the cluster scope"
        raise ApiError(
            403,
            "Forbidden",
            f'{subject} {named}is forbidden: User "{user}" cannot {request.verb} resource "{request.full_resource}" '
            f'in API group "{request.group}" {where}',
        )


def _covers(rule: dict[str, Any], request: Request) -> bool:
    def listed(value: str, values: list[str]) -> bool:
        return "*" in values or value in values

    names = rule.get("resourceNames") or []
    return (
        listed(request.group, rule["apiGroups"])
        and listed(request.full_resource, rule["resources"])
        and listed(request.verb, rule["verbs"])
        and (not names or request.name in names)
    )


def _is_everybodys(request: Request) -> bool:
    """system:basic-user: everyone may ask what they themselves may do."""
    return request.group == "authorization.k8s.io" and request.resource == "selfsubjectaccessreviews"


@cache
def documents_of(file: Path) -> tuple[dict[str, Any], ...]:
    return tuple(document for document in yaml.safe_load_all(file.read_text()) if document)


def role_rules(file: Path, name: str) -> list[dict[str, Any]]:
    """The rules of a Role or ClusterRole in a manifest; empty when it is not there."""
    roles = [
        one for one in documents_of(file) if one["kind"] in ("Role", "ClusterRole") and one["metadata"]["name"] == name
    ]
    return [rule for role in roles for rule in role["rules"]]
