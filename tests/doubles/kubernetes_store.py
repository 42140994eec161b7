"""The objects of the Kubernetes API double: versions, conflicts, label selectors, and what a watch sees.

After https://kubernetes.io/docs/reference/using-api/api-concepts/: one version counter for all objects, 409 for a name
that is taken or a version that is old, 410 for a watch from a version that is forgotten, events of a selecting watch
(an object that begins to match is ADDED, one that no longer does is DELETED), bookmarks.
"""

import copy
import re
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]
Key = tuple[str, str, str, str]
"""Group, plural, namespace ("" for objects without one), name."""
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind that the server knows."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


KINDS = (
    Kind(group="argoproj.io", version="v1alpha1", plural="workflows", kind="Workflow"),
    Kind(group="argoproj.io", version="v1alpha1", plural="workflowtemplates", kind="WorkflowTemplate"),
    Kind(group="argoproj.io", version="v1alpha1", plural="cronworkflows", kind="CronWorkflow"),
    Kind(group="argoproj.io", version="v1alpha1", plural="workflowtaskresults", kind="WorkflowTaskResult"),
    Kind(group="jobset.x-k8s.io", version="v1alpha2", plural="jobsets", kind="JobSet"),
    Kind(group="kueue.x-k8s.io", version="v1beta2", plural="localqueues", kind="LocalQueue"),
    Kind(group="karpenter.sh", version="v1", plural="nodepools", kind="NodePool", namespaced=False),
    Kind(group="apps", version="v1", plural="deployments", kind="Deployment"),
    Kind(group="", version="v1", plural="pods", kind="Pod"),
    Kind(group="", version="v1", plural="configmaps", kind="ConfigMap"),
    Kind(group="", version="v1", plural="secrets", kind="Secret"),
    Kind(group="", version="v1", plural="serviceaccounts", kind="ServiceAccount"),
    Kind(group="", version="v1", plural="nodes", kind="Node", namespaced=False),
)
BUILT_IN = ("", "apps")
"""Groups whose objects take a strategic merge patch; custom resources don't."""


class ApiError(Exception):
    """A refusal, as the Status object that a client gets."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }


@dataclass(frozen=True, kw_only=True)
class Change:
    """`before` is None for a new object, `after` for a deleted one."""

    version: int
    key: Key
    before: Object | None
    after: Object | None


class ObjectStore:
    """Thread-safe; every object that goes in or out is a copy."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.version = 1000
        self.oldest = 1000
        """Changes up to this version are forgotten: a watch can't start before it."""
        self._objects: dict[Key, Object] = {}
        self._history: list[Change] = []

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        with self.changed:
            found = self._objects.get((kind.group, kind.plural, namespace, name))
            if found is None:
                raise ApiError(404, "NotFound", f'{kind.qualified} "{name}" not found')
            return copy.deepcopy(found)

    def select(self, kind: Kind, namespace: str, selector: str) -> tuple[list[Object], int]:
        with self.changed:
            chosen = [
                copy.deepcopy(one)
                for key, one in sorted(self._objects.items())
                if key[:2] == (kind.group, kind.plural) and namespace in ("", key[2]) and matches(one, selector)
            ]
            return chosen, self.version

    def create(self, kind: Kind, namespace: str, body: Object) -> Object:
        with self.changed:
            new = copy.deepcopy(body)
            metadata = new.setdefault("metadata", {})
            if not metadata.get("name") and metadata.get("generateName"):
                metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
            name = metadata.get("name", "")
            if not NAME.fullmatch(name):
                message = f'{kind.kind}.{kind.group} "{name}" is invalid: metadata.name: Invalid value: "{name}"'
                raise ApiError(422, "Invalid", message)
            if metadata.get("resourceVersion"):
                raise ApiError(500, "InternalError", "resourceVersion should not be set on objects to be created")
            key = (kind.group, kind.plural, namespace, name)
            if key in self._objects:
                raise ApiError(409, "AlreadyExists", f'{kind.qualified} "{name}" already exists')
            metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": _now(), "generation": 1}
            if namespace:
                metadata["namespace"] = namespace
            return self._write(key, new)

    def replace(self, kind: Kind, namespace: str, name: str, body: Object) -> Object:
        """Raise 409 unless the version given is the one that is stored, or none is."""
        with self.changed:
            current = self.get(kind, namespace, name)
            given = body["metadata"].get("resourceVersion")
            if not given and kind.group not in BUILT_IN:
                message = (
                    f'{kind.qualified} "{name}" is invalid: metadata.resourceVersion: must be specified for an update'
                )
                raise ApiError(422, "Invalid", message)
            if given and given != current["metadata"]["resourceVersion"]:
                what = f'Operation cannot be fulfilled on {kind.qualified} "{name}"'
                raise ApiError(409, "Conflict", f"{what}: the object has been modified; please apply your changes")
            return self._write((kind.group, kind.plural, namespace, name), copy.deepcopy(body))

    def merge_patch(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        with self.changed:
            return self.replace(kind, namespace, name, merged(self.get(kind, namespace, name), patch))

    def delete(self, kind: Kind, namespace: str, name: str) -> Object:
        with self.changed:
            gone = self.get(kind, namespace, name)
            key = (kind.group, kind.plural, namespace, name)
            del self._objects[key]
            self.version += 1
            last = copy.deepcopy(gone)
            last["metadata"]["resourceVersion"] = str(self.version)
            self._record(Change(version=self.version, key=key, before=last, after=None))
            return gone

    def forget_history(self) -> None:
        """What etcd's compaction does: older versions can't be watched from any more."""
        with self.changed:
            self.oldest = self.version
            self._history.clear()

    def changes_after(self, version: int) -> list[Change]:
        """Raise 410 when they are no longer known."""
        with self.changed:
            if version < self.oldest:
                raise ApiError(410, "Expired", f"too old resource version: {version} ({self.oldest})")
            return [change for change in self._history if change.version > version]

    def _write(self, key: Key, new: Object) -> Object:
        for label, value in (new["metadata"].get("labels") or {}).items():
            if not (LABEL_KEY.fullmatch(label) and LABEL_VALUE.fullmatch(value)):
                raise ApiError(
                    422, "Invalid", f'"{key[3]}" is invalid: metadata.labels: Invalid value: {label}: {value}'
                )
        self.version += 1
        new["metadata"]["resourceVersion"] = str(self.version)
        before = self._objects.get(key)
        self._objects[key] = new
        self._record(Change(version=self.version, key=key, before=before, after=copy.deepcopy(new)))
        return copy.deepcopy(new)

    def _record(self, change: Change) -> None:
        self._history.append(change)
        self.changed.notify_all()


def event_of(change: Change, kind: Kind, namespace: str, selector: str) -> Object | None:
    """The event that a watch with this selector gets, if any."""
    if change.key[:2] != (kind.group, kind.plural) or namespace not in ("", change.key[2]):
        return None
    was = change.before is not None and matches(change.before, selector)
    if change.after is not None and matches(change.after, selector):
        return {"type": "MODIFIED" if was else "ADDED", "object": change.after}
    return {"type": "DELETED", "object": change.before} if was else None


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = copy.deepcopy(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def matches(one: Object, selector: str) -> bool:
    labels = one["metadata"].get("labels") or {}
    return all(_term_holds(term, labels) for term in _terms(selector))


def _terms(selector: str) -> Iterator[str]:
    """Commas inside parentheses separate values, not terms."""
    yield from (term.strip() for term in re.split(r",(?![^(]*\))", selector) if term.strip())


def _term_holds(term: str, labels: Mapping[str, str]) -> bool:
    if found := re.fullmatch(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)", term):
        values = [value.strip() for value in found[3].split(",")]
        return (labels.get(found[1]) in values) == (found[2] == "in")
    if found := re.fullmatch(r"([\w./-]+)\s*(==|=|!=)\s*([\w.-]*)", term):
        return (labels.get(found[1]) == found[3]) == (found[2] != "!=")
    if found := re.fullmatch(r"(!?)([\w./-]+)", term):
        return (found[2] in labels) == (not found[1])
    raise ApiError(400, "BadRequest", f"unable to parse requirement: {term!r}")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
