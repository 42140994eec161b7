"""How large a campaign becomes: Workflows, node status, templates and arguments, against Argo's limits.

The node status is what the controller would write (pkg/apis/workflow/v1alpha1/workflow_types.go, NodeStatus; Retry,
StepGroup and TaskGroup nodes included), made up node by node. Argo keeps a Workflow as it is up to 1 MiB of JSON, and
beyond that with its nodes gzipped and in base64 (workflow/packer/packer.go); what is still larger ends as Error.
"""

import base64
import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from workflows.lint.loop_rules import by_name, is_loop
from workflows.lint.model import (
    Body,
    Manifest,
    Manifests,
    Place,
    Template,
    mapping,
    parameters_of,
    strings,
    templates_of,
)
from workflows.lint.tags import TAG, Samples, longest_workflow_name, replace_tags, samples_for

MAX_WORKFLOW_BYTES = 1 << 20
"""Of a Workflow's JSON, and so of its object in etcd (MAX_WORKFLOW_SIZE)."""
MAX_TEXT_BYTES = 128 << 10
"""Of a template, and of one argument: Linux' limit; beyond it Argo goes over ConfigMaps and files (MaxEnvVarLen)."""
MAX_ETCD_BYTES = 2 << 30
"""etcd's default quota (--quota-backend-bytes), for all that the cluster holds."""
GZIP_LEVEL = 6
"""Of the controller (util/file/fileutil.go)."""
DEFAULT_ITERATIONS = 300
DEFAULT_WORKERS = 64
DEFAULT_ATTEMPTS = 2
_OUTPUT_TEXT = "s3://example-bucket/moerl/runs/" + "r" * 40 + "/iterations/00001/checkpoint"
_MOST_ATTEMPTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What to reckon with; `attempts` of every pod that is retried."""

    iterations: int = DEFAULT_ITERATIONS
    workers: int = DEFAULT_WORKERS
    attempts: int = DEFAULT_ATTEMPTS


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSize:
    """One WorkflowTemplate's Workflow when it ends."""

    name: str
    nodes: int
    pods: int
    raw_bytes: int
    """Of the whole Workflow with its nodes as they are."""
    compressed_bytes: int
    """Of the whole Workflow with its nodes compressed."""
    most_attempts: int
    """About how many of every pod would fit."""
    largest_template: str
    largest_template_bytes: int
    largest_argument: str
    largest_argument_bytes: int
    copies: int = 1
    """Of such Workflows that one campaign leaves, until their ttlStrategy takes them away."""

    @property
    def stored_bytes(self) -> int:
        return self.raw_bytes if self.raw_bytes <= MAX_WORKFLOW_BYTES else self.compressed_bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"stored_bytes": self.stored_bytes, "max_bytes": MAX_WORKFLOW_BYTES}


def sizes(manifests: Manifests, budget: Budget) -> list[WorkflowSize]:
    """Of every WorkflowTemplate among the manifests, by name."""
    found = sorted(manifests.of_kind("WorkflowTemplate"), key=lambda manifest: manifest.name)
    children = {
        str(mapping(child.spec.get("workflowTemplateRef")).get("name"))
        for child in manifests.of_kind("Workflow")
        if child.holder is not None
    }
    return [
        _size(manifest, budget, budget.iterations if manifest.name in children else 1)
        for manifest in found
        if manifest.holder is None and manifest.spec.get("templates")
    ]


def over_budget(manifests: Manifests, found: list[WorkflowSize], budget: Budget) -> Iterator[Place]:
    by_manifest = {manifest.name: manifest for manifest in manifests.of_kind("WorkflowTemplate")}
    for size in found:
        manifest = by_manifest[size.name]
        asked = f"{budget.iterations} iterations x {budget.workers} workers, {budget.attempts} attempts each"
        if size.stored_bytes > MAX_WORKFLOW_BYTES:
            problem = f"{asked}: its Workflow takes {_kib(size.stored_bytes)} compressed, of {_kib(MAX_WORKFLOW_BYTES)}"
            yield Place(manifest=manifest, path="spec", problem=problem)
        if size.copies * size.stored_bytes > MAX_ETCD_BYTES:
            problem = (
                f"{asked}: {size.copies} of its Workflows take {_mib(size)} of etcd, of {MAX_ETCD_BYTES >> 20} MiB"
            )
            yield Place(manifest=manifest, path="spec.ttlStrategy", problem=problem)
        for what, name, taken in (
            ("the template", size.largest_template, size.largest_template_bytes),
            ("an argument of", size.largest_argument, size.largest_argument_bytes),
        ):
            if taken > MAX_TEXT_BYTES:
                problem = f"{what} {name} takes {_kib(taken)}, of {_kib(MAX_TEXT_BYTES)}"
                yield Place(manifest=manifest, path=f"spec.templates[{name}]", problem=problem)


def table(found: list[WorkflowSize], budget: Budget) -> list[str]:
    """Lines for a person."""
    lines = [
        f"budget: {budget.iterations} iterations x {budget.workers} workers, {budget.attempts} attempts of every pod; "
        f"limits: Workflow {_kib(MAX_WORKFLOW_BYTES)}, template and argument {_kib(MAX_TEXT_BYTES)}"
    ]
    for size in found:
        fits = f"about {size.most_attempts}" if size.most_attempts < _MOST_ATTEMPTS else "as many as there are"
        share = 100 * size.stored_bytes // MAX_WORKFLOW_BYTES
        form = "as it is" if size.raw_bytes <= MAX_WORKFLOW_BYTES else "compressed"
        lines += [
            f"  {size.name}: {size.nodes:,} nodes, {size.pods:,} pods",
            f"    Workflow {_kib(size.raw_bytes)} as it is, {_kib(size.compressed_bytes)} compressed: kept {form}, "
            f"{share} % of the limit; attempts of every pod that fit: {fits}",
            f"    largest template {size.largest_template} {_kib(size.largest_template_bytes)}, "
            f"longest argument {_kib(size.largest_argument_bytes)} (of {size.largest_argument})",
        ]
        if size.copies > 1:
            lines.append(
                f"    {size.copies} of them take {_mib(size)} of etcd's {MAX_ETCD_BYTES >> 20} MiB until their TTL"
            )
    return lines


def _mib(size: WorkflowSize) -> str:
    return f"{size.copies * size.stored_bytes / (1 << 20):,.0f} MiB"


def _kib(size_bytes: int) -> str:
    return f"{size_bytes / 1024:,.1f} KiB"


def _size(manifest: Manifest, budget: Budget, copies: int) -> WorkflowSize:
    status = _workflow(manifest, budget)
    templates = [template for template in templates_of(manifest) if not template.is_group]
    # A template reaches its pod as one variable, its arguments as one text each.
    by_size = {template.name: len(_json(template.body)) for template in templates}
    by_argument = {template.name: _longest_argument(template) for template in templates}
    largest, longest = (max(found, key=found.__getitem__, default="") for found in (by_size, by_argument))
    return WorkflowSize(
        name=manifest.name,
        nodes=len(status.nodes),
        pods=sum(node["type"] == "Pod" for node in status.nodes.values()),
        raw_bytes=status.raw_bytes,
        compressed_bytes=status.compressed_bytes,
        most_attempts=_most_attempts(manifest, budget, status),
        largest_template=largest,
        largest_template_bytes=by_size.get(largest, 0),
        largest_argument=longest,
        largest_argument_bytes=by_argument.get(longest, 0),
        copies=copies,
    )


def _longest_argument(template: Template) -> int:
    manifest = template.manifest
    samples = samples_for(manifest.body, manifest.spec, template.body, filled=True)
    container = mapping(template.body.get("container") or template.body.get("script"))
    words = strings(container.get("command")) + strings(container.get("args"))
    words += [str(mapping(template.body.get("resource")).get("manifest") or "")]
    return max(len(replace_tags(word, samples, template.path).encode()) for word in words)


def _most_attempts(manifest: Manifest, budget: Budget, status: "_Status") -> int:
    """About how many attempts of every pod the Workflow has room for: each one more adds as much as another."""
    other = replace(budget, attempts=budget.attempts + 1)
    now, more = status.compressed_bytes, _workflow(manifest, other).compressed_bytes
    if more <= now:
        return _MOST_ATTEMPTS
    return max(0, min(_MOST_ATTEMPTS, budget.attempts + (MAX_WORKFLOW_BYTES - now) // (more - now)))


def _json(value: Any) -> str:
    """As Go writes it: no spaces, and <, > and & escaped."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@dataclass(slots=True, kw_only=True)
class _Status:
    """A Workflow while its nodes are made up."""

    manifest: Manifest
    budget: Budget
    name: str
    nodes: dict[str, Body] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    """Groups that are being called: one that calls itself is another rule's."""
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    """For ids, hosts and times, which compress badly: the same ones on every call."""

    @property
    def raw_bytes(self) -> int:
        return len(_json(self.body(nodes=self.nodes)).encode())

    @property
    def compressed_bytes(self) -> int:
        packed = base64.b64encode(gzip.compress(_json(self.nodes).encode(), GZIP_LEVEL, mtime=0)).decode()
        return len(_json(self.body(compressedNodes=packed)).encode())

    def body(self, **nodes: Any) -> Body:
        parameters = [
            {"name": item.get("name"), "value": self.samples({})[f"workflow.parameters.{item.get('name')}"]}
            for item in parameters_of(self.manifest.spec.get("arguments"))
        ]
        reference = {"arguments": {"parameters": parameters}, "workflowTemplateRef": {"name": self.manifest.name}}
        completed = {name: True for name, node in self.nodes.items() if node["type"] == "Pod"}
        return {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "metadata": {"name": self.name, "uid": "0" * 36, **mapping(self.manifest.body.get("metadata"))},
            "spec": reference,
            "status": {
                "phase": "Succeeded",
                "storedWorkflowTemplateSpec": self.manifest.spec | reference,
                "taskResultsCompletionStatus": completed,
                **nodes,
            },
        }

    def samples(self, template: Body) -> Samples:
        return samples_for(self.manifest.body, self.manifest.spec, template, filled=True)

    def add(self, kind: str, name: str, template: Template, boundary: str, inputs: Body) -> str:
        """A node of this type; its id."""
        node_id = f"{self.name}-{self.chance.getrandbits(32)}"
        node: Body = {
            "id": node_id,
            "name": name,
            "displayName": name.rsplit(".", 1)[-1],
            "type": kind,
            "templateName": template.name,
            "templateScope": f"local/{self.name}",
            "phase": "Succeeded",
            "boundaryID": boundary,
            "startedAt": self.time(),
            "finishedAt": self.time(),
            "estimatedDuration": self.chance.getrandbits(13),
            "progress": "1/1",
            "resourcesDuration": {"cpu": self.chance.getrandbits(17), "memory": self.chance.getrandbits(17)},
            "inputs": inputs,
            "children": [],
        }
        if kind not in ("StepGroup", "TaskGroup"):
            outputs = [
                {"name": item.get("name"), "value": self.text(), "valueFrom": item.get("valueFrom")}
                for item in parameters_of(template.body.get("outputs"))
            ]
            node["outputs"] = {"parameters": outputs, "exitCode": "0"}
        if kind == "Pod":
            host = f"{self.chance.getrandbits(8)}-{self.chance.getrandbits(8)}"
            node |= {"hostNodeName": f"ip-10-0-{host}.us-east-2.compute.internal", "podIP": f"10.0.{host}"}
            node["nodeFlag"] = {"retried": True}
        self.nodes[node_id] = node
        if boundary in self.nodes:
            self.nodes[boundary]["children"].append(node_id)
        return node_id

    def text(self) -> str:
        return f"{_OUTPUT_TEXT}-{self.chance.getrandbits(32):08x}"

    def time(self) -> str:
        seconds = self.chance.getrandbits(21)
        return f"{datetime.fromtimestamp(1767225600 + seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _workflow(manifest: Manifest, budget: Budget) -> _Status:
    status = _Status(manifest=manifest, budget=budget, name=longest_workflow_name(manifest.name))
    templates = {template.name: template for template in templates_of(manifest) if not template.inline}
    for entry in ("entrypoint", "onExit"):
        template = templates.get(str(manifest.spec.get(entry)))
        if template is not None:
            suffix = ".onExit" if entry == "onExit" else ""
            _run(status, template, f"{status.name}{suffix}", "", {})
    return status


def _run(status: _Status, template: Template, name: str, boundary: str, inputs: Body) -> None:
    """The nodes of one call of a template."""
    if not template.is_group:
        _leaf(status, template, name, boundary, inputs)
        return
    known = by_name(template)
    node = status.add("DAG" if "dag" in template.body else "Steps", name, template, boundary, inputs)
    groups = [[call] for _, call in template.calls] if "dag" in template.body else template.step_groups
    status.running.append(template.name)
    for index, group in enumerate(groups):
        if "dag" not in template.body:
            status.add("StepGroup", f"{name}[{index}]", template, node, {})
        for call in group:
            called = known.get(str(call.get("template")))
            if called is None or called.name in status.running:
                continue
            if is_loop(call) and "dag" in template.body:
                status.add("TaskGroup", f"{name}.{call.get('name')}", called, node, {})
            for item in _items(call, status.budget):
                below = f"{name}.{call.get('name')}({item}:{item})" if item else f"{name}.{call.get('name')}"
                _run(status, called, below, node, _inputs(status, template, call, item))
    status.running.pop()


def _leaf(status: _Status, template: Template, name: str, boundary: str, inputs: Body) -> None:
    if template.retry is None:
        status.add("Pod", name, template, boundary, inputs)
        return
    node = status.add("Retry", name, template, boundary, inputs)
    # One attempt more than `limit` there never is.
    limit = str(template.retry.get("limit") or "")
    attempts = min(status.budget.attempts, int(limit) + 1) if limit.isdigit() else status.budget.attempts
    for attempt in range(attempts):
        status.add("Pod", f"{name}({attempt})", template, node, inputs)


def _items(call: Body, budget: Budget) -> list[str]:
    """The items of a loop by what its count is called; [""] for a call that is none."""
    if not is_loop(call):
        return [""]
    sequence = mapping(call.get("withSequence"))
    count = str(sequence.get("count") or sequence.get("end") or "")
    if isinstance(call.get("withItems"), list):
        return [str(index) for index, _ in enumerate(call["withItems"])]
    if count.isdigit():
        number = int(count)
    else:
        number = budget.iterations if "iteration" in count else budget.workers
    return [f"{index:05}" for index in range(number)]


def _inputs(status: _Status, template: Template, call: Body, item: str) -> Body:
    samples = status.samples(template.body)
    samples["item"] = item
    arguments = parameters_of(call.get("arguments"))
    values = [
        {"name": entry.get("name"), "value": replace_tags(str(entry.get("value")), samples, "arguments")}
        for entry in arguments
        if TAG.search(str(entry.get("value"))) or entry.get("value") is not None
    ]
    return {"parameters": values} if values else {}
