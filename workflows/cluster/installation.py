"""What is installed on the cluster: Argo Workflows, JobSet, Kueue, and the schedule of retraining."""

import re
from collections.abc import Iterator
from dataclasses import replace

from workflows.cluster.client import CRON_WORKFLOWS, WORKFLOWS, Cluster, NotFound, NotInstalled, Object, Resource
from workflows.cluster.findings import Finding, fail, ok, warn

JOB_SETS = Resource(group="jobset.x-k8s.io", version="v1alpha2", plural="jobsets", product="JobSet")
LOCAL_QUEUES = Resource(group="kueue.x-k8s.io", version="v1beta2", plural="localqueues", product="Kueue")
BEFORE_V1BETA2 = replace(LOCAL_QUEUES, version="v1beta1")
"""Kueue before 0.15 has no v1beta2, and from 0.20 on no v1beta1."""
DEPLOYMENTS = Resource(group="apps", version="v1", plural="deployments", namespaced=False)
ARGO_KINDS = ("workflows", "workflowtemplates", "cronworkflows", "workflowtaskresults")
INSTALL_ARGO = "install Argo Workflows 4.1 (docs/install-eks.md, docs/install-laptop.md)"
FIRST_VERSION = (4, 0)
"""Of Argo Workflows that the manifests are made for; they are checked against 4.1."""
CRON_NAME = "policy-retraining"


def api_findings(cluster: Cluster) -> Iterator[Finding]:
    """Which kinds of objects the cluster serves. Every account may ask that."""
    served = _served(cluster, WORKFLOWS)
    missing = [kind for kind in ARGO_KINDS if kind not in served]
    if missing:
        what = f"the cluster does not know {', '.join(f'{kind}.argoproj.io' for kind in missing)}"
        yield fail("Argo Workflows", what, INSTALL_ARGO)
    else:
        yield ok("Argo Workflows", "its kinds are served")
    if _served(cluster, JOB_SETS):
        yield ok("JobSet", f"{JOB_SETS.group}/{JOB_SETS.version} is served")
    else:
        lacking = f"the cluster does not serve {JOB_SETS.group}/{JOB_SETS.version}"
        yield warn("JobSet", f"{lacking}: training runs on one node only", "install JobSet (docs/install-eks.md)")
    if queues := served_queues(cluster):
        yield ok("Kueue", f"{queues.group}/{queues.version} is served")
    else:
        yield ok("Kueue", "it is not installed: leave the parameter queue empty")


def served_queues(cluster: Cluster) -> Resource | None:
    """LocalQueues in a version that the cluster serves."""
    return next((queues for queues in (LOCAL_QUEUES, BEFORE_V1BETA2) if _served(cluster, queues)), None)


def _served(cluster: Cluster, resource: Resource) -> set[str]:
    try:
        document = cluster.call("GET", f"/apis/{resource.group}/{resource.version}", resource=resource)
    except (NotFound, NotInstalled):
        return set()
    return {entry["name"] for entry in document.get("resources", [])}


def controller_findings(cluster: Cluster) -> Iterator[Finding]:
    """Is there a controller that runs, and of which version?"""
    found, _ = cluster.select(DEPLOYMENTS, "app=workflow-controller")
    if not found:
        found = [one for one in cluster.select(DEPLOYMENTS)[0] if "workflow-controller" in one["metadata"]["name"]]
    if not found:
        yield fail("controller", "no deployment workflow-controller on the cluster", INSTALL_ARGO)
    for deployment in found:
        yield _controller_finding(deployment)


def _controller_finding(deployment: Object) -> Finding:
    where = f"{deployment['metadata']['namespace']}/{deployment['metadata']['name']}"
    image = str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])
    if not deployment.get("status", {}).get("availableReplicas"):
        mend = f"kubectl describe deployment -n {deployment['metadata']['namespace']} {deployment['metadata']['name']}"
        return fail("controller", f"{where} has no pod that is ready", mend)
    version = re.search(r":v?(\d+)\.(\d+)", image)
    if version is None:
        return warn("controller", f"{where} runs {image}, whose version is not known", "pin a version from 4.1 on")
    if (int(version[1]), int(version[2])) < FIRST_VERSION:
        return fail("controller", f"{where} runs {image}; the manifests need 4.0 or newer", "upgrade Argo Workflows")
    return ok("controller", f"{where} runs {image}")


def cron_findings(cluster: Cluster) -> Iterator[Finding]:
    """Whether retraining on a schedule is switched on: a thing to know, not to mend."""
    cron = cluster.get(CRON_WORKFLOWS, CRON_NAME)
    schedules = ", ".join(cron["spec"].get("schedules") or [])
    state = "suspended" if cron["spec"].get("suspend") else "on"
    yield ok("schedule", f"{CRON_NAME} ({schedules}) is {state}")
