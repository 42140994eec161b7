"""Workflows as Argo's controller leaves them on a cluster, and a cluster double with our templates installed."""

import base64
import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.doubles.kubernetes_api import KubernetesApi, Log

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
START = "2026-01-01T10:00:00Z"
END = "2026-01-01T10:02:05Z"
Object = dict[str, Any]


@cache
def rendered_templates() -> tuple[Object, ...]:
    return tuple(yaml.safe_load(path.read_text()) for path in sorted(TEMPLATES.glob("policy-*.yaml")))


def install_templates(api: KubernetesApi) -> None:
    plurals = {"WorkflowTemplate": "workflowtemplates", "CronWorkflow": "cronworkflows"}
    for document in rendered_templates():
        api.add(plurals[document["kind"]], document)


def parameters(**values: str) -> Object:
    return {"parameters": [{"name": name.replace("_", "-"), "value": value} for name, value in values.items()]}


def node(name: str, template: str, phase: str, **fields: Any) -> Object:
    """A node of a workflow's status; its id is its name."""
    ended = phase in ("Succeeded", "Failed", "Error")
    times = {"startedAt": START} | ({"finishedAt": END} if ended else {})
    common = {"id": name, "name": name, "displayName": name, "type": "Pod", "templateName": template, "phase": phase}
    return common | times | fields


def status(phase: str, *nodes: Object, packed: bool = False, **fields: Any) -> Object:
    by_id = {one["id"]: one for one in nodes}
    held: Object = {"nodes": by_id}
    if packed:
        held = {"compressedNodes": base64.b64encode(gzip.compress(json.dumps(by_id).encode())).decode()}
    ended = {"finishedAt": END} if phase in ("Succeeded", "Failed", "Error") else {}
    return {"phase": phase, "startedAt": START} | ended | held | fields


def workflow(name: str, template: str, labels: dict[str, str], arguments: Object, **fields: Any) -> Object:
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": name, "labels": labels},
        "spec": {"workflowTemplateRef": {"name": template}, "arguments": arguments},
    } | fields


def campaign(run: str, state: Object, name: str = "", **values: str) -> Object:
    labels = {"moerl/run": run, "workflows.argoproj.io/phase": state.get("phase", "")}
    return workflow(name or run, "policy-campaign", labels, parameters(run=run, **values), status=state)


def iteration(of: str, number: int, state: Object, run: str = "") -> Object:
    text = f"{number:05d}"
    labels = {
        "moerl/run": run or of,
        "moerl/campaign": of,
        "moerl/iteration": text,
        "workflows.argoproj.io/phase": state.get("phase", ""),
    }
    arguments = parameters(run=run or of, iteration=text)
    return workflow(f"{of}-{text}", "policy-iteration", labels, arguments, status=state)


def init(iterations: int) -> Object:
    return node("init", "init", "Succeeded", outputs=parameters(first_iteration="1", iterations=str(iterations)))


def child(number: int, phase: str, reward: str = "", validated: str = "true", **fields: Any) -> Object:
    outputs = {"outputs": parameters(reward_eval=reward, validated=validated)} if reward else {}
    return node(
        f"watch-{number:05d}", "child", phase, **(outputs | fields), inputs=parameters(iteration=f"{number:05d}")
    )


def add_pod(api: KubernetesApi, name: str, of: str, *lines: str, **fields: Any) -> Log:
    """A pod of a workflow, with its log; `node_name` is that of the node that it runs."""
    container = fields.get("container", "main")
    api.add(
        "pods",
        {
            "metadata": {
                "name": name,
                "labels": {"workflows.argoproj.io/workflow": of} | fields.get("labels", {}),
                "annotations": {"workflows.argoproj.io/node-name": fields.get("node_name", of)},
            },
            "spec": {"containers": [{"name": "wait"}, {"name": container}]},
            "status": {"phase": fields.get("phase", "Succeeded"), "startTime": fields.get("started", START)},
        },
    )
    log = Log(lines=[f"{START} {line}" for line in lines], ended=fields.get("ended", True))
    api.logs[(name, container)] = log
    return log


def half_done_run(api: KubernetesApi, run: str = "digits") -> None:
    """Iteration 1 succeeded, iteration 2 samples with two workers, one of them in its second attempt; 3 to come."""
    api.add("workflows", campaign(run, status("Running", init(3), child(1, "Succeeded", "0.512"), child(2, "Running"))))
    api.add("workflows", iteration(run, 1, status("Succeeded", outputs=parameters(reward_eval="0.512"))))
    nodes = (
        node("plan-00002", "plan", "Succeeded"),
        node("rollout-0", "rollout", "Running", progress="12/32"),
        node("rollout-1", "rollout", "Running", type="Retry", children=["rollout-1(0)", "rollout-1(1)"]),
        node("rollout-1(0)", "rollout", "Error", message="pod deleted", nodeFlag={"retried": True}),
        node("rollout-1(1)", "rollout", "Running", nodeFlag={"retried": True}),
    )
    api.add("workflows", iteration(run, 2, status("Running", *nodes)))


def failed_run(api: KubernetesApi, run: str = "digits", **values: str) -> None:
    """Iteration 1 of 3 succeeded; the train step of iteration 2 ended with 65 after an attempt that was lost."""
    watcher = child(2, "Failed", message="failure condition {status.phase in (Failed, Error)} evaluated true")
    state = status("Failed", init(3), child(1, "Succeeded", "0.512"), watcher, message="child failed")
    api.add("workflows", campaign(run, state, **values))
    nodes = (
        node("rollout-0", "rollout", "Succeeded", type="Retry", children=["rollout-0(0)", "rollout-0(1)"]),
        node("rollout-0(0)", "rollout", "Error", message="pod deleted", nodeFlag={"retried": True}),
        node("rollout-0(1)", "rollout", "Succeeded", nodeFlag={"retried": True}),
        node(
            "train-00002",
            "train",
            "Failed",
            message="main: Error (exit code 65): train: batch 2 is damaged",
            outputs={"exitCode": "65"},
        ),
    )
    api.add("workflows", iteration(run, 2, status("Failed", *nodes)))
