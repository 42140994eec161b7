"""Hardware and capacity profiles as data: what a pod requests, and on which kind of capacity it should run.

One profile is one file, `workflows/profiles/NAME.toml`. What it says is checked when it is read: an unknown key, a
quantity that Kubernetes would not take and more memory for /dev/shm than the pod has are refused by name.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from steps.errors import ConfigError

PROFILES = Path(__file__).parent / "profiles"

FailureDomain = Literal["stable", "interruptible", "training"]
"""stable: losing the pod costs a restart of the stage. interruptible: leases make the loss of a pod cost one unit.
training: as stable, on the nodes that were set aside for the trainer."""

Workload = Literal["control", "sampler", "engine", "engine_client", "solo_trainer", "trainer", "publisher"]
"""control: no model in memory. sampler: one policy for inference. engine: a vLLM or SGLang server. engine_client: a
step that samples by such a server. solo_trainer: one process with policy, gradients and optimizer state. trainer: all
ranks of a node. publisher: one layer of the policy at a time, on the CPU."""

SERVED_ENGINES = ("vllm", "sglang")
"""Values of `rollout.engine` that sample by a server."""

CapacityType = Literal["spot", "on-demand", "reserved"]

CAPACITY_TYPE_LABEL = "karpenter.sh/capacity-type"
"""Node label with the capacity type (Karpenter; EKS managed node groups use their own, in upper case)."""
INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"
GPU_RESOURCE = "nvidia.com/gpu"
EFA_RESOURCE = "vpc.amazonaws.com/efa"
HUGEPAGES_RESOURCE = "hugepages-2Mi"
HUGEPAGE_BYTES = 2 << 20

_BINARY_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_BINARY_QUANTITY = re.compile(r"([1-9][0-9]*)(Ki|Mi|Gi|Ti)")


def quantity_bytes(quantity: str) -> int:
    """Bytes of a quantity with a binary unit, as "5120Mi"; ValueError for any other, a bare number included.

    A bare number would be bytes: `hugepages-2Mi: 5120` is the mistake that this refuses.
    """
    found = _BINARY_QUANTITY.fullmatch(quantity)
    if found is None:
        raise ValueError(f"{quantity!r} is no amount of memory: write a whole number with Ki, Mi, Gi or Ti")
    return int(found[1]) * _BINARY_UNITS[found[2]]


def _memory(quantity: str) -> str:
    if quantity:
        quantity_bytes(quantity)
    return quantity


def _hugepages(quantity: str) -> str:
    if quantity and quantity_bytes(quantity) % HUGEPAGE_BYTES:
        raise ValueError(f"{quantity!r} is no multiple of a huge page, 2Mi")
    return quantity


Cpu = Annotated[str, Field(pattern=r"^[1-9][0-9]*m?$")]
Memory = Annotated[str, AfterValidator(_memory)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PodResources:
    """Kubernetes quantities of one pod's main container.

    Memory is requested and limited alike, so that a pod is not killed for what its neighbours use; the CPU has no limit
    above its request where a burst does no harm.
    """

    __pydantic_config__ = {"extra": "forbid"}

    cpu_request: Cpu
    cpu_limit: Cpu
    memory: Memory
    """Includes `shm`: what lies in a memory-backed volume counts as the pod's memory."""
    gpus: Count = 0
    efa: Count = 0
    """EFA interfaces."""
    hugepages: Annotated[str, AfterValidator(_hugepages)] = ""
    """Of 2 MiB pages; libfabric's EFA provider keeps its buffers there."""
    shm: Memory = ""
    """Size of /dev/shm; empty: what the container runtime gives (64 MiB)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Toleration:
    """A taint of the accelerated nodes that their pods bear."""

    __pydantic_config__ = {"extra": "forbid"}

    key: str
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """One GPU, as its maker's data sheet and AWS describe it; rates are of one direction."""

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    memory_mib: Annotated[int, Field(gt=0)]
    """As EC2 reports it."""
    bf16_tflops: Annotated[float, Field(gt=0.0)]
    """Dense, without sparsity."""
    memory_gb_per_s: Annotated[float, Field(gt=0.0)]
    network_gb_per_s: Annotated[float, Field(gt=0.0)]
    """This GPU's share of the node's EFA bandwidth."""
    nvlink_gb_per_s: Annotated[float, Field(ge=0.0)] = 0.0
    """0: GPUs of a node reach each other over PCIe."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformProfile:
    """One kind of cluster: sizes by workload, capacity by failure domain, and what the exchange of tokens needs."""

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    description: str
    resources: Mapping[Workload, PodResources]
    capacity: Mapping[FailureDomain, CapacityType]
    threads: Annotated[int, Field(ge=1)]
    """OpenMP threads of a step's process."""
    instance_type: str = ""
    """EC2 instance type of the accelerated nodes; empty: there are none."""
    gpus: Count = 0
    """Of one node; also the most ranks of a node. 0: one pod holds all ranks, unless several nodes are asked for."""
    accelerator: Accelerator | None = None
    """What `moerl plan` reckons with."""
    efa: Count = 0
    """EFA interfaces of one node."""
    node_memory: Memory = ""
    """Memory of one node, before what the system takes."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes of accelerated pods."""
    tolerations: tuple[Toleration, ...] = ()
    """Of accelerated pods."""
    capabilities: tuple[str, ...] = ()
    """Linux capabilities that the trainer's containers get back after all are dropped."""
    transports: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Environment of accelerated pods by what it serves: `network`, or a dispatcher. All are set together, since the
    dispatcher is only known when a workflow is submitted; none contradicts another."""

    engines: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Environment of the servers of rollout engines, by engine; all are set together, as those of `transports`."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a whole node; 0: as many as there are."""
        return self.gpus

    @property
    def transport_environment(self) -> dict[str, str]:
        """Variables of an accelerated pod, in alphabetical order."""
        return _merged(self.transports)

    @property
    def engine_environment(self) -> dict[str, str]:
        """Variables of an accelerated pod with a rollout engine's server, in alphabetical order."""
        return _merged({"network": self.transports.get("network", {}), **self.engines})


def profile_names() -> list[str]:
    """Names of the profiles there are, in alphabetical order."""
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


@cache
def load_profile(name: str) -> PlatformProfile:
    """The profile of that name. ConfigError, one line, for a name that does not exist or a file that is wrong."""
    if name not in profile_names():
        raise ConfigError(f"no platform profile {name!r}: use one of {', '.join(profile_names())}")
    return parse_profile(name, (PROFILES / f"{name}.toml").read_text(encoding="utf-8"))


def parse_profile(name: str, text: str) -> PlatformProfile:
    """The profile that a TOML file describes; ConfigError names the file and what is wrong in it."""
    where = f"platform profile {name}"
    try:
        document = tomllib.loads(text)
        profile = TypeAdapter(PlatformProfile).validate_python({**document, "name": name})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    for problem in _problems(profile):
        raise ConfigError(f"{where}: {problem}")
    return profile


def _problems(profile: PlatformProfile) -> list[str]:
    """What the fields say of each other that can't be."""
    missing = [name for name in get_args(Workload) if name not in profile.resources]
    missing += [name for name in get_args(FailureDomain) if name not in profile.capacity]
    problems = [f"{name} is missing" for name in missing]
    for workload, size in profile.resources.items():
        for kind in ("gpus", "efa"):
            if getattr(size, kind) > getattr(profile, kind):
                problems.append(f"resources.{workload}.{kind} is more than a node's {getattr(profile, kind)}")
        if size.shm and quantity_bytes(size.shm) >= quantity_bytes(size.memory):
            problems.append(f"resources.{workload}.shm = {size.shm}: must be less than its memory, {size.memory}")
        if profile.node_memory and quantity_bytes(size.memory) >= quantity_bytes(profile.node_memory):
            problems.append(f"resources.{workload}.memory = {size.memory}: a node has {profile.node_memory}")
        if size.efa and not size.hugepages:
            problems.append(f"resources.{workload}.hugepages is missing: EFA needs huge pages")
    for engine in profile.engines.keys() - set(SERVED_ENGINES):
        problems.append(f"engines.{engine} is no engine with a server: use {' or '.join(SERVED_ENGINES)}")
    if profile.gpus and not profile.node_selector:
        problems.append("node_selector is missing: pods with GPUs need the nodes that have them")
    return problems + _contradictions("transports", profile.transports) + _contradictions("engines", profile.engines)


def _contradictions(table: str, environments: Mapping[str, Mapping[str, str]]) -> list[str]:
    seen: dict[str, tuple[str, str]] = {}
    problems = []
    for user, variables in environments.items():
        for name, value in variables.items():
            other, other_value = seen.setdefault(name, (user, value))
            if other_value != value:
                problems.append(f"{table}.{user}.{name} = {value!r}: {table}.{other} sets {other_value!r}")
    return problems


def _merged(environments: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    merged = {name: value for variables in environments.values() for name, value in variables.items()}
    return dict(sorted(merged.items()))


CPU = load_profile("cpu")
"""A laptop's cluster, CI, and the local executor."""
