"""Nodes: do they have what the profile's pods ask for, and can they get the image?"""

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal

from kubernetes.utils.quantity import parse_quantity

from workflows.cluster.client import PODS, Cluster, Forbidden, NotInstalled, Object, Resource
from workflows.cluster.findings import Finding, fail, ok, warn
from workflows.platform import (
    EFA_RESOURCE,
    GPU_RESOURCE,
    HUGEPAGES_RESOURCE,
    INSTANCE_TYPE_LABEL,
    PlatformProfile,
    PodResources,
)

NODES = Resource(group="", version="v1", plural="nodes", namespaced=False)
NODE_POOLS = Resource(group="karpenter.sh", version="v1", plural="nodepools", namespaced=False, product="Karpenter")
PULL_ERRORS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
DEVICE_PLUGINS = {
    GPU_RESOURCE: "is the NVIDIA device plugin running on them?",
    EFA_RESOURCE: "is the EFA device plugin running on them, do their network interfaces have EFA?",
    HUGEPAGES_RESOURCE: "preallocate them in the nodes' user data (vm.nr_hugepages)",
}


def node_findings(cluster: Cluster, profile: PlatformProfile) -> Iterator[Finding]:
    """Whether some node holds each kind of pod of the profile; nodes that Karpenter would add are not seen."""
    nodes = [node for node in cluster.select(NODES)[0] if not node["spec"].get("unschedulable")]
    pools = _node_pools(cluster)
    for workload, size in profile.resources.items():
        selector = profile.node_selector if size.gpus or size.efa else {}
        matching = [node for node in nodes if _matches(node, selector)]
        kind = f"{selector.get(INSTANCE_TYPE_LABEL, '')} node".strip()
        yield _workload_finding(f"nodes for {workload}", kind, matching, size, pools)


def _workload_finding(check: str, kind: str, nodes: Sequence[Object], size: PodResources, pools: int) -> Finding:
    wanted = _requests(size)
    fitting = [node for node in nodes if not _lacking(node, wanted)]
    asked = ", ".join(f"{name} {quantity}" for name, quantity in wanted.items())
    if fitting:
        return ok(check, f"{len(fitting)} node(s) hold a pod of {asked}")
    if not nodes:
        if pools:
            return warn(
                check,
                f"no {kind} now; {pools} Karpenter NodePool(s) may add one",
                "nothing, if one does: look at the events of a pod that waits",
            )
        mend = f"add a {kind}, or use the profile of the nodes that you have (moerl doctor --profile)"
        return fail(check, f"no {kind}", mend)
    closest = min((_lacking(node, wanted) for node in nodes), key=len)
    what = f"none of {len(nodes)} node(s) holds a pod of {asked}: short of {', '.join(closest)}"
    mends = [DEVICE_PLUGINS[name] for name in closest if name in DEVICE_PLUGINS]
    mend = "; ".join(mends) or "larger nodes, or the profile of the nodes that you have (moerl doctor --profile)"
    return warn(check, what, mend) if pools and not mends else fail(check, what, mend)


def _requests(size: PodResources) -> dict[str, str]:
    counts = {GPU_RESOURCE: size.gpus, EFA_RESOURCE: size.efa}
    requests = {"cpu": size.cpu_request, "memory": size.memory}
    requests |= {name: str(count) for name, count in counts.items() if count}
    return requests | ({HUGEPAGES_RESOURCE: size.hugepages} if size.hugepages else {})


def _lacking(node: Object, wanted: Mapping[str, str]) -> list[str]:
    """Resources of which the node can give less than asked, even when it is empty."""
    allocatable = node.get("status", {}).get("allocatable", {})
    return [name for name, quantity in wanted.items() if _quantity(allocatable.get(name)) < _quantity(quantity)]


def _quantity(text: str | None) -> Decimal:
    return Decimal(parse_quantity(text or "0"))


def _matches(node: Object, selector: Mapping[str, str]) -> bool:
    labels = node["metadata"].get("labels", {})
    return all(labels.get(name) == value for name, value in selector.items())


def _node_pools(cluster: Cluster) -> int:
    try:
        return len(cluster.select(NODE_POOLS)[0])
    except (NotInstalled, Forbidden):
        return 0


def image_findings(cluster: Cluster, image: str) -> Iterator[Finding]:
    """Whether pods get the image: no pod of the namespace waits for one, and some node or registry has it."""
    waiting = sorted({reason for pod in cluster.select(PODS)[0] for reason in _pull_errors(pod, image)})
    if waiting:
        mend = f"push {image}, or give the nodes the right to pull it (imagePullSecrets, the node's role)"
        yield fail("image", f"pods wait for {image}: {', '.join(waiting)}", mend)
        return
    registry = image.split("/")[0] if "/" in image else ""
    if "." in registry or ":" in registry:
        yield ok("image", f"{image}, and no pod waits for it")
        return
    nodes, _ = cluster.select(NODES)
    holding = sum(any(_same_image(name, image) for name in _image_names(node)) for node in nodes)
    if nodes and holding == len(nodes):
        yield ok("image", f"{image} is on all {holding} node(s)")
        return
    mend = "push it to your registry and submit with -p image=..., or load it into every node (docs/install-laptop.md)"
    yield warn("image", f"{image} names no registry, and is on {holding} of {len(nodes)} node(s)", mend)


def _pull_errors(pod: Object, image: str) -> Iterator[str]:
    for container in pod.get("status", {}).get("containerStatuses") or []:
        reason = container.get("state", {}).get("waiting", {}).get("reason", "")
        if reason in PULL_ERRORS and _same_image(container.get("image", ""), image):
            yield reason


def _image_names(node: Object) -> Iterator[str]:
    for entry in node.get("status", {}).get("images") or []:
        yield from entry.get("names") or []


def _same_image(name: str, image: str) -> bool:
    """Container runtimes write docker.io/library/NAME for NAME."""
    return name.removeprefix("docker.io/").removeprefix("library/") == image
