"""Rules on a pod's resources, volumes, time and capacity, whatever the platform."""

import re
from collections.abc import Iterator

from workflows.lint.model import SERVING_KINDS, Body, Manifests, Place, Rule, listing, mapping
from workflows.lint.pods import Pod, containers, environment, pods, resources
from workflows.lint.tags import TAG
from workflows.platform import EFA_RESOURCE, HUGEPAGE_BYTES, quantity_bytes

SPOT_GRACE_S = 110
"""What is left of the two minutes between the notice and the end of a Spot node."""
DEFAULT_GRACE_S = 30
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|e[0-9]+)?")
_SCALE = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18} | {
    f"{prefix}i": 1024.0 ** (power + 1) for power, prefix in enumerate("KMGTPE")
}
_HOLD = "karpenter.sh/do-not-disrupt"
_INTERFACES = ("lo", "docker", "veth", "pod-id-link0")


def amount(quantity: str) -> float | None:
    """A Kubernetes quantity as a number; None if it is none."""
    if _QUANTITY.fullmatch(quantity) is None:
        return None
    number = re.match(r"[0-9]+(\.[0-9]+)?", quantity)
    assert number is not None
    unit = quantity[number.end() :]
    return float(number[0]) * (_SCALE[unit] if unit in _SCALE else float(f"1{unit}"))


def memory_volumes(pod: Pod) -> Iterator[tuple[str, str]]:
    """(name, size limit) of each volume that lies in memory."""
    for volume in listing(pod.spec.get("volumes")):
        empty_dir = mapping(volume.get("emptyDir"))
        if empty_dir.get("medium") == "Memory":
            yield str(volume.get("name")), str(empty_dir.get("sizeLimit") or "")


def bad_quantity(manifests: Manifests) -> Iterator[Place]:
    for pod, path, container in containers(manifests):
        requests, limits = resources(container, "requests"), resources(container, "limits")
        for name, quantity in [*requests.items(), *limits.items()]:
            if amount(quantity) is None and not TAG.search(quantity):
                yield _at(pod, path, f"{name}: {quantity!r} is no quantity")
        for name in set(requests) & set(limits):
            low, high = amount(requests[name]), amount(limits[name])
            if low is not None and high is not None and low > high:
                yield _at(pod, path, f"it requests {requests[name]} of {name}, above its limit {limits[name]}")
        for name in sorted(set(requests) | set(limits)):
            special = "/" in name or name.startswith("hugepages-")
            if special and requests.get(name, limits.get(name)) != limits.get(name):
                yield _at(pod, path, f"{name}: requests {requests.get(name)}, limit {limits.get(name)}")


def hugepage_units(manifests: Manifests) -> Iterator[Place]:
    for pod, path, container in containers(manifests):
        sizes = {(name, size) for which in ("requests", "limits") for name, size in resources(container, which).items()}
        for name, size in sorted(sizes):
            if name.startswith("hugepages-"):
                try:
                    whole = quantity_bytes(size) % HUGEPAGE_BYTES == 0
                except ValueError:
                    whole = False
                if not whole:
                    yield _at(pod, path, f"{name}: {size} (without a unit these are bytes)")


def no_memory(manifests: Manifests) -> Iterator[Place]:
    for pod in pods(manifests):
        if pod.is_watcher and "memory" not in resources(pod.main, "requests"):
            problem = "Argo's container has no requests (set them by podSpecPatch), so it is the first to be evicted"
            yield _at(pod, pod.path, problem)
    for pod, path, container in containers(manifests):
        requests, limits = resources(container, "requests"), resources(container, "limits")
        if "memory" not in requests or "cpu" not in requests:
            yield _at(pod, path, "it requests no cpu or no memory, so it is the first to be evicted")
        elif (pod.template or pod.in_gang) and requests["memory"] != limits.get("memory"):
            yield _at(pod, path, f"memory: requests {requests['memory']}, limit {limits.get('memory')}")


def shared_memory(manifests: Manifests) -> Iterator[Place]:
    for pod in pods(manifests):
        volumes = list(memory_volumes(pod))
        limits = [amount(resources(container, "limits").get("memory", "")) for container in pod.containers]
        memory = sum(limit for limit in limits if limit is not None)
        for name, size in volumes:
            used = amount(size)
            if used is None:
                yield _at(pod, pod.path, f"the volume {name} lies in memory without a sizeLimit")
            elif used >= memory:
                yield _at(pod, pod.path, f"the volume {name} may take {size}, which is all the memory the pod has")


def missing_volume(manifests: Manifests) -> Iterator[Place]:
    for pod, path, container in containers(manifests):
        names = {str(volume.get("name")) for volume in listing(pod.spec.get("volumes"))}
        names |= {
            str(mapping(claim.get("metadata")).get("name"))
            for claim in listing(pod.manifest.spec.get("volumeClaimTemplates"))
        }
        for mount in listing(container.get("volumeMounts")):
            if str(mount.get("name")) not in names:
                yield _at(pod, path, f"there is no volume {mount.get('name')!r} for {mount.get('mountPath')}")


def no_deadline(manifests: Manifests) -> Iterator[Place]:
    for pod in pods(manifests):
        if pod.template is None or pod.is_watcher:
            continue
        if not pod.template.body.get("activeDeadlineSeconds"):
            yield _at(pod, pod.path, "a container that hangs is waited for without end")


def watcher_deadline(manifests: Manifests) -> Iterator[Place]:
    """What serves never ends, so its watcher waits for its start alone."""
    for pod in pods(manifests):
        if pod.template is None or not pod.is_watcher:
            continue
        watches = mapping(pod.template.body.get("resource")).get("successCondition")
        ends = any(made.kind not in SERVING_KINDS for made in manifests.embedded_in(pod.template))
        if watches and ends and pod.template.body.get("activeDeadlineSeconds"):
            yield _at(pod, pod.path, "activeDeadlineSeconds ends the watcher and leaves its object running")


def spot_grace(manifests: Manifests) -> Iterator[Place]:
    for pod in pods(manifests):
        grace_s = pod.spec.get("terminationGracePeriodSeconds")
        if pod.on_spot and isinstance(grace_s, int) and grace_s > SPOT_GRACE_S:
            yield _at(pod, pod.path, f"{grace_s} s of grace on Spot, where {SPOT_GRACE_S} s are left after the notice")


def no_grace(manifests: Manifests) -> Iterator[Place]:
    for pod in pods(manifests):
        ours = pod.template is not None or pod.in_gang
        if ours and not pod.is_watcher and not isinstance(pod.spec.get("terminationGracePeriodSeconds"), int):
            problem = f"it says nothing of its grace period, which is {DEFAULT_GRACE_S} s then"
            yield _at(pod, pod.path, problem)


def gang_on_spot(manifests: Manifests) -> Iterator[Place]:
    for pod in pods(manifests):
        if pod.on_spot and (pod.in_gang or pod.is_watcher):
            what = "a gang" if pod.in_gang else "a watcher"
            yield _at(pod, pod.path, f"{what} on Spot: one node that goes ends the work of all")


def disruption_budget(manifests: Manifests) -> Iterator[Place]:
    for manifest in manifests.workflows():
        spot = any(pod.on_spot for pod in pods(manifests) if pod.manifest is manifest)
        if "podDisruptionBudget" in manifest.spec and spot:
            path = manifest.at(f"{manifest.spec_path}.podDisruptionBudget")
            yield Place(
                manifest=manifest, path=path, problem="it holds up the drain of Spot nodes, so no SIGTERM comes"
            )
    for manifest in manifests.of_kind("PodDisruptionBudget"):
        spec = manifest.spec
        if spec.get("maxUnavailable") in (0, "0", "0%") or spec.get("minAvailable") == "100%":
            yield Place(manifest=manifest, path="spec", problem="it lets no pod go, so a drain sends no SIGTERM")


def held_node(manifests: Manifests) -> Iterator[Place]:
    for pod in pods(manifests):
        if pod.template is None or not pod.on_spot:
            continue
        metadata = [mapping(pod.template.body.get("metadata")), mapping(pod.manifest.spec.get("podMetadata"))]
        if any(_HOLD in mapping(item.get("annotations")) for item in metadata):
            yield _at(pod, pod.path, f"{_HOLD} on Spot: the pod is not drained, and gets no SIGTERM in time")


def fork_safe(manifests: Manifests) -> Iterator[Place]:
    for pod, path, container in containers(manifests):
        if "RDMAV_FORK_SAFE" in environment(container):
            yield _at(pod, path, "RDMAV_FORK_SAFE is set: AWS says that EFA must not have it")


def socket_interfaces(manifests: Manifests) -> Iterator[Place]:
    for pod, path, container in containers(manifests):
        variable = environment(container).get("NCCL_SOCKET_IFNAME")
        if variable is None:
            if EFA_RESOURCE in resources(container, "limits"):
                yield _at(pod, path, "NCCL_SOCKET_IFNAME is not set, so NCCL may take an interface that leads nowhere")
            continue
        value = str(variable.get("value") or "")
        left_out = value[1:].split(",") if value.startswith("^") and not value.startswith("^=") else []
        missing = [name for name in _INTERFACES if not any(name.startswith(prefix) for prefix in left_out if prefix)]
        if missing:
            yield _at(pod, path, f"NCCL_SOCKET_IFNAME = {value!r} does not leave out {', '.join(missing)}")


def _at(pod: Pod, path: str, problem: str) -> Place:
    return Place(manifest=pod.manifest, path=path, problem=problem)


def default_image(pod: Pod, container: Body) -> str:
    """The image, or the default of the parameter that gives it."""
    image = str(container.get("image") or "")
    for parameter in listing(mapping(pod.manifest.spec.get("arguments")).get("parameters")):
        if image == f"{{{{workflow.parameters.{parameter.get('name')}}}}}":
            return str(parameter.get("value", ""))
    return image


def floating_image(manifests: Manifests) -> Iterator[Place]:
    for pod, path, container in containers(manifests):
        image = default_image(pod, container)
        name = image.rsplit("/", 1)[-1]
        if image and not TAG.search(image) and "@sha256:" not in name and name.rsplit(":", 1)[-1] in (name, "latest"):
            yield _at(pod, path, f"the image {image!r} may be another one at each attempt")


RULES = (
    Rule(
        name="bad-quantity",
        severity="error",
        advice="write e.g. 500m, 4, 16Gi; of devices and huge pages as much in requests as in limits",
        check=bad_quantity,
    ),
    Rule(
        name="hugepages-units",
        severity="error",
        advice="write a multiple of 2Mi with its unit, e.g. 5120Mi",
        check=hugepage_units,
    ),
    Rule(name="memory-request", severity="error", advice="request cpu, and memory as it is limited", check=no_memory),
    Rule(
        name="shm-memory",
        severity="error",
        advice="set sizeLimit below the memory limit: what lies there counts as the pod's memory",
        check=shared_memory,
    ),
    Rule(name="unknown-volume", severity="error", advice="declare the volume", check=missing_volume),
    Rule(name="deadline-missing", severity="error", advice="set activeDeadlineSeconds", check=no_deadline),
    Rule(
        name="watcher-deadline",
        severity="error",
        advice="give what it watches a deadline instead",
        check=watcher_deadline,
    ),
    Rule(
        name="grace-beyond-notice",
        severity="error",
        advice="save and go within the notice",
        check=spot_grace,
    ),
    Rule(
        name="grace-missing",
        severity="error",
        advice="set terminationGracePeriodSeconds, in Argo by podSpecPatch",
        check=no_grace,
    ),
    Rule(name="gang-on-spot", severity="error", advice="take on-demand or reserved nodes", check=gang_on_spot),
    Rule(
        name="pdb-on-spot",
        severity="error",
        advice="leave it out: leases make the loss of a pod cheap",
        check=disruption_budget,
    ),
    Rule(name="rdmav-fork-safe", severity="error", advice="leave it out", check=fork_safe),
    Rule(
        name="socket-interface",
        severity="error",
        advice="set it to ^lo,docker,veth,pod-id-link0",
        check=socket_interfaces,
    ),
    Rule(name="floating-image", severity="error", advice="pin a version or a digest", check=floating_image),
    Rule(
        name="do-not-disrupt-on-spot",
        severity="error",
        advice="leave the annotation to pods on stable nodes",
        check=held_node,
    ),
)
