"""A run on a cluster: its campaign Workflows, the iterations that they started, and the nodes of each."""

import base64
import binascii
import gzip
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any, cast

from steps.errors import DataError
from steps.paths import validate_run_id
from workflows.cluster.client import WORKFLOWS, Cluster, NotFound, Object

CAMPAIGN_TEMPLATE = "policy-campaign"
ITERATION_TEMPLATE = "policy-iteration"
RUN_LABEL = "moerl/run"
CAMPAIGN_LABEL = "moerl/campaign"
ITERATION_LABEL = "moerl/iteration"
PHASE_LABEL = "workflows.argoproj.io/phase"
FAILED = ("Failed", "Error")
FINISHED = ("Succeeded", *FAILED)


def find_campaigns(cluster: Cluster, run_id: str) -> list[Object]:
    """The campaign Workflows of a run, oldest first; none when the cluster knows no such run.

    Argo labels a Workflow with its run when it first looks at it; one that has just been created with another tool is
    found by its name.
    """
    found, _ = cluster.select(WORKFLOWS, f"{RUN_LABEL}={validate_run_id(run_id)},!{CAMPAIGN_LABEL}")
    campaigns = [workflow for workflow in found if template_name(workflow) == CAMPAIGN_TEMPLATE]
    if not campaigns:
        try:
            named = cluster.get(WORKFLOWS, run_id)
        except NotFound:
            return []
        campaigns = [named] if parameters_of(named).get("run") == run_id else []
    return sorted(campaigns, key=lambda workflow: (workflow["metadata"]["creationTimestamp"], name_of(workflow)))


def latest_campaign(cluster: Cluster, run_id: str) -> Object:
    """The campaign that was started last; DataError when there is none."""
    campaigns = find_campaigns(cluster, run_id)
    if not campaigns:
        raise DataError(
            f"no run {run_id!r} in namespace {cluster.namespace} of {cluster.context}: "
            f"`kubectl get workflows -n {cluster.namespace} -L {RUN_LABEL}` lists those there are"
        )
    return campaigns[-1]


def unfinished_children(cluster: Cluster, campaign: Object) -> list[Object]:
    """The iterations that did not succeed yet: those that did are told by the campaign's own nodes.

    Where these can't be read (Argo keeps them in its database), every iteration.
    """
    selector = f"{CAMPAIGN_LABEL}={name_of(campaign)}"
    if can_read_nodes(campaign):
        selector += f",{PHASE_LABEL}!=Succeeded"
    return cluster.select(WORKFLOWS, selector)[0]


def name_of(workflow: Object) -> str:
    return str(workflow["metadata"]["name"])


def template_name(workflow: Object) -> str:
    return str(workflow["spec"].get("workflowTemplateRef", {}).get("name", ""))


def phase_of(workflow: Object) -> str:
    """Argo's phase; a Workflow that no controller has looked at yet is Pending."""
    return workflow.get("status", {}).get("phase") or "Pending"


def parameters_of(workflow: Object) -> dict[str, str]:
    """Its arguments; those of a node, too."""
    return _values(workflow["spec"].get("arguments", {}))


def outputs_of(status: Mapping[str, Any]) -> dict[str, str]:
    """Output parameters of a Workflow's status, or of a node."""
    return _values(status.get("outputs") or {})


def inputs_of(node: Mapping[str, Any]) -> dict[str, str]:
    return _values(node.get("inputs") or {})


def _values(holder: Mapping[str, Any]) -> dict[str, str]:
    return {entry["name"]: str(entry["value"]) for entry in holder.get("parameters") or [] if "value" in entry}


def can_read_nodes(workflow: Object) -> bool:
    """Whether the object holds its nodes; Argo moves them to its database when they don't fit."""
    return not workflow.get("status", {}).get("offloadNodeStatusVersion")


def nodes_of(workflow: Object) -> list[Object]:
    """The nodes, in the order in which they started; packed ones are unpacked, those kept elsewhere are left out."""
    status = workflow.get("status", {})
    nodes = status.get("nodes") or {}
    if packed := status.get("compressedNodes"):
        try:
            nodes = json.loads(gzip.decompress(base64.b64decode(packed)))
        except (binascii.Error, zlib.error, OSError, EOFError, ValueError) as error:
            raise DataError(
                f"the nodes of workflow {name_of(workflow)} can't be unpacked ({error}): is the controller's "
                "WORKFLOW_COMPRESSION_ALGORITHM gzip?"
            ) from None
    return sorted(nodes.values(), key=lambda node: (node.get("startedAt") or "9999", natural(node["name"])))


def natural(text: str) -> list[tuple[int, str]]:
    """Sort key by which item 2 comes before item 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", text)]


def shown_nodes(workflow: Object) -> list[Object]:
    """One node for each step that runs or ran something: a retried step once, not each attempt."""
    kinds = {"Pod", "Retry", "HTTP", "Plugin", "Suspend"}
    nodes = [node for node in nodes_of(workflow) if node["type"] in kinds]
    return [node for node in nodes if not (node.get("nodeFlag") or {}).get("retried")]


def failed_leaf(workflow: Object) -> Object | None:
    """The pod whose failure ended the workflow, the last of them; None when no pod was to blame.

    An attempt that a later one made good is not meant; nor is one of the exit handler, which ran after that failure,
    unless there is no other.
    """
    nodes = nodes_of(workflow)
    good = [node for node in nodes if node["type"] == "Retry" and node["phase"] not in FAILED]
    mended = {child for node in good for child in node.get("children") or ()}
    failed = [node for node in nodes if node["type"] == "Pod" and node["phase"] in FAILED and node["id"] not in mended]
    handler = f"{name_of(workflow)}.onExit"
    return max(failed, key=lambda one: (not one["name"].startswith(handler), one.get("finishedAt") or ""), default=None)


def step_of(node: Mapping[str, Any]) -> str:
    """The template that a node runs: rollout, train, ..."""
    reference = cast(Mapping[str, Any], node.get("templateRef") or {})
    return str(node.get("templateName") or reference.get("template") or node.get("displayName", ""))
