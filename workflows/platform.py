"""Hardware and capacity profiles as data: what a pod requests, and on which kind of capacity it should run."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

FailureDomain = Literal["stable", "interruptible"]
"""stable: losing the pod costs a restart of the stage. interruptible: leases make the loss of a pod cost one unit."""

Workload = Literal["control", "sampler", "trainer"]
"""control: no model in memory. sampler: one policy for inference. trainer: policy, gradients and optimizer state."""

CapacityType = Literal["spot", "on-demand"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PodResources:
    """Kubernetes quantities of one pod's main container.

    Memory is requested and limited alike, so that a pod is not killed for what its neighbours use; the CPU has no limit
    above its request where a burst does no harm.
    """

    cpu_request: str
    cpu_limit: str
    memory: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformProfile:
    """One kind of cluster: sizes by workload and capacity by failure domain."""

    name: str
    resources: Mapping[Workload, PodResources]
    capacity: Mapping[FailureDomain, CapacityType]
    threads: int
    """OpenMP threads of a step's process."""


CAPACITY_TYPE_LABEL = "karpenter.sh/capacity-type"
"""Node label that says spot or on-demand (Karpenter; EKS managed node groups use their own, in upper case)."""

CPU = PlatformProfile(
    name="cpu",
    resources=MappingProxyType(
        {
            "control": PodResources(cpu_request="250m", cpu_limit="1", memory="1Gi"),
            "sampler": PodResources(cpu_request="1", cpu_limit="2", memory="2Gi"),
            "trainer": PodResources(cpu_request="1", cpu_limit="2", memory="4Gi"),
        }
    ),
    capacity=MappingProxyType({"stable": "on-demand", "interruptible": "spot"}),
    threads=1,
)
