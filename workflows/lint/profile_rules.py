"""Rules on the platform: a manifest's pods against the profile that it was rendered for."""

import re
from collections.abc import Iterator

from workflows.lint.model import Manifests, Place, Rule, listing, mapping, strings
from workflows.lint.pod_rules import amount, memory_volumes
from workflows.lint.pods import Pod, environment, pods, resources
from workflows.platform import (
    CAPACITY_TYPE_LABEL,
    EFA_RESOURCE,
    GPU_RESOURCE,
    HUGEPAGES_RESOURCE,
    FailureDomain,
    PlatformProfile,
    PodResources,
    Workload,
)

_WORKLOADS: dict[str, tuple[Workload, ...]] = {
    "rollout": ("sampler",),
    "evaluate": ("sampler",),
    "engine_host": ("engine",),
    "benchmark_rollout": ("sampler", "trainer"),
    "transport_probe": ("trainer",),
    "train": ("trainer", "solo_trainer"),
    "init_run": ("solo_trainer", "trainer"),
    "publish": ("publisher",),
}
"""Module of steps -> the sizes that its pod may have; of any other, control."""
_ENGINE = "engine_host"
_INTERRUPTIBLE = ("rollout", "reward", _ENGINE)
_ON_TRAINING_NODES = ("train", "transport_probe", "benchmark_rollout")
_MODULE = re.compile(r"steps\.([a-z_]+)")
_LAUNCHERS = ("torchrun",)

Step = tuple[Pod, str, PlatformProfile, tuple[PodResources, ...]]


def _steps(manifests: Manifests) -> Iterator[Step]:
    """(pod, module, profile, sizes that it may have) of each pod that runs a step."""
    profile = manifests.profile
    if profile is None:
        return
    for pod in pods(manifests):
        modules = [found[1] for word in pod.words if (found := _MODULE.fullmatch(word))]
        modules = [module for module in modules if module not in _LAUNCHERS]
        if modules:
            workloads: tuple[Workload, ...] = ("trainer",) if pod.in_gang else _WORKLOADS.get(modules[0], ("control",))
            yield pod, modules[0], profile, tuple(profile.resources[workload] for workload in workloads)


def _count(pod: Pod, resource: str) -> int:
    number = amount(resources(pod.main, "limits").get(resource, "0"))
    return int(number or 0)


def gpus(manifests: Manifests) -> Iterator[Place]:
    for pod, module, profile, sizes in _steps(manifests):
        wanted = sorted({size.gpus for size in sizes})
        if _count(pod, GPU_RESOURCE) not in wanted:
            problem = f"{_count(pod, GPU_RESOURCE)} GPUs for {module}, on {profile.name} {_either(wanted)}"
            yield _at(pod, problem)
        # A node's ranks are the workflow's parameter; what stands there as a number must fit the node's GPUs.
        ranks = re.search(r"--most-ranks-per-node[ =](\d+)", " ".join(pod.words))
        if ranks and int(ranks[1]) != profile.ranks_per_node:
            yield _at(pod, f"--most-ranks-per-node {ranks[1]}, on {profile.name} {profile.ranks_per_node}")


def efa(manifests: Manifests) -> Iterator[Place]:
    for pod, module, profile, sizes in _steps(manifests):
        wanted = {size.efa for size in sizes if size.gpus == _count(pod, GPU_RESOURCE)} or {size.efa for size in sizes}
        if _count(pod, EFA_RESOURCE) not in wanted:
            problem = (
                f"{_count(pod, EFA_RESOURCE)} EFA interfaces for {module}, on {profile.name} {_either(sorted(wanted))}"
            )
            yield _at(pod, problem)
    yield from _node_interfaces(manifests)


def _node_interfaces(manifests: Manifests) -> Iterator[Place]:
    profile = manifests.profile
    for node_class in manifests.of_kind("EC2NodeClass") if profile is not None else ():
        interfaces = [str(item.get("interfaceType")) for item in listing(node_class.spec.get("networkInterfaces"))]
        count = sum(kind.startswith("efa") for kind in interfaces)
        if count and profile is not None and count != profile.efa:
            problem = f"{count} EFA interfaces, a node of {profile.name} has {profile.efa}"
            yield Place(manifest=node_class, path="spec.networkInterfaces", problem=problem)


def hugepages(manifests: Manifests) -> Iterator[Place]:
    for pod, _, profile, sizes in _steps(manifests):
        given = resources(pod.main, "limits").get(HUGEPAGES_RESOURCE, "")
        wanted = {size.hugepages for size in sizes if size.efa == _count(pod, EFA_RESOURCE)}
        if wanted and amount(given or "0") not in {amount(size or "0") for size in wanted}:
            yield _at(pod, f"{given or 'no'} huge pages, on {profile.name} {_either(sorted(wanted))}")


def shm(manifests: Manifests) -> Iterator[Place]:
    for pod, _, profile, sizes in _steps(manifests):
        mounted = {
            str(mount.get("name"))
            for mount in listing(pod.main.get("volumeMounts"))
            if mount.get("mountPath") == "/dev/shm"
        }
        given = next((size for name, size in memory_volumes(pod) if name in mounted), "")
        wanted = {size.shm for size in sizes if size.gpus == _count(pod, GPU_RESOURCE)}
        if wanted and given not in wanted:
            yield _at(pod, f"/dev/shm of {given or '64Mi (the default)'}, on {profile.name} {_either(sorted(wanted))}")


def memory(manifests: Manifests) -> Iterator[Place]:
    for pod, module, profile, sizes in _steps(manifests):
        given = amount(resources(pod.main, "limits").get("memory", "0")) or 0
        least = min(amount(size.memory) or 0 for size in sizes)
        node = amount(profile.node_memory) if profile.node_memory else None
        if given < least:
            wanted = _either(sorted({size.memory for size in sizes}))
            yield _at(
                pod, f"{resources(pod.main, 'limits').get('memory')} of memory for {module}, on {profile.name} {wanted}"
            )
        elif node is not None and given >= node:
            yield _at(pod, f"more memory than a node of {profile.name} has ({profile.node_memory})")


def _on_gpus(manifests: Manifests) -> Iterator[Step]:
    return (step for step in _steps(manifests) if _count(step[0], GPU_RESOURCE))


def missing_toleration(manifests: Manifests) -> Iterator[Place]:
    for pod, _, profile, _ in _on_gpus(manifests):
        given = [(item.get("key"), item.get("operator") or "Equal") for item in listing(pod.spec.get("tolerations"))]
        for wanted in profile.tolerations:
            if wanted.key == EFA_RESOURCE and not _count(pod, EFA_RESOURCE):
                continue
            if (wanted.key, wanted.operator) not in given:
                yield _at(pod, f"it does not bear the taint {wanted.key} of {profile.name}")


def node_selector(manifests: Manifests) -> Iterator[Place]:
    for pod, _, profile, _ in _on_gpus(manifests):
        given = mapping(pod.spec.get("nodeSelector"))
        for key, value in profile.node_selector.items():
            if given.get(key) != value:
                yield _at(pod, f"nodeSelector {key} is {given.get(key)!r}, on {profile.name} {value!r}")


def transport_environment(manifests: Manifests) -> Iterator[Place]:
    for pod, module, profile, _ in _on_gpus(manifests):
        if not _count(pod, EFA_RESOURCE):
            continue
        given = environment(pod.main)
        wanted = profile.engine_environment if module == _ENGINE else profile.transport_environment
        for name, value in wanted.items():
            if name not in given:
                yield _at(pod, f"{name} is not set, on {profile.name} it is {value!r}")
            elif given[name].get("value") != value:
                yield _at(pod, f"{name} is {given[name].get('value')!r}, on {profile.name} {value!r}")


def capacity(manifests: Manifests) -> Iterator[Place]:
    if manifests.profile is None:
        return
    for pod, module, profile, _ in _steps(manifests):
        domain: FailureDomain = "training" if module in _ON_TRAINING_NODES else "stable"
        wanted = {profile.capacity[domain], *(("spot", "on-demand") if module in _INTERRUPTIBLE else ())}
        plain = [value for value in pod.capacity_types if "{{" not in value]
        if not pod.capacity_types:
            yield _at(pod, f"it says nothing of {CAPACITY_TYPE_LABEL}, on {profile.name} {_either(sorted(wanted))}")
        for value in plain:
            if value not in wanted:
                yield _at(
                    pod, f"{CAPACITY_TYPE_LABEL} {value!r} for {module}, on {profile.name} {_either(sorted(wanted))}"
                )


def added_capabilities(manifests: Manifests) -> Iterator[Place]:
    for pod, _, profile, _ in _steps(manifests):
        added = set(strings(mapping(mapping(pod.main.get("securityContext")).get("capabilities")).get("add")))
        wanted = set(profile.capabilities) if _count(pod, EFA_RESOURCE) else set()
        if added != wanted:
            given, needed = _either(sorted(added)) or "none", _either(sorted(wanted)) or "none"
            yield _at(pod, f"capabilities added: {given}; on {profile.name}: {needed}")


def _either(values: list[int] | list[str]) -> str:
    return " or ".join(str(value) or "none" for value in values)


def _at(pod: Pod, problem: str) -> Place:
    return Place(manifest=pod.manifest, path=pod.path, problem=problem)


_ADVICE = "render it with this profile, or lint it against the one that it was rendered for"
RULES = (
    Rule(name="profile-gpus", severity="error", advice=_ADVICE, check=gpus),
    Rule(
        name="profile-efa",
        severity="error",
        advice="request all interfaces of the node: without them NCCL falls back to TCP without a word",
        check=efa,
    ),
    Rule(name="profile-hugepages", severity="error", advice=_ADVICE, check=hugepages),
    Rule(name="profile-shm", severity="error", advice="mount a volume of this size in memory there", check=shm),
    Rule(name="profile-memory", severity="error", advice=_ADVICE, check=memory),
    Rule(
        name="profile-toleration", severity="error", advice="no node takes the pod otherwise", check=missing_toleration
    ),
    Rule(
        name="profile-node",
        severity="error",
        advice="select the accelerated nodes: another type has other numbers of devices",
        check=node_selector,
    ),
    Rule(name="profile-environment", severity="error", advice=_ADVICE, check=transport_environment),
    Rule(name="profile-capacity", severity="error", advice=_ADVICE, check=capacity),
    Rule(name="profile-capabilities", severity="error", advice=_ADVICE, check=added_capabilities),
)
