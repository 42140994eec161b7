"""Workflow parameters: what a person may change on submit, as the Argo UI's form and `moerl submit` show it.

A value is text, as everywhere in Argo. Parameters of a campaign that an iteration has as well are passed on to it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

from hera.workflows import Parameter

from workflows.platform import CapacityType

DEFAULT_IMAGE = "argo-moe-rl:0.1.0"
ENVIRONMENT_CONFIG_MAP = "moerl-environment"
CREDENTIALS_SECRET = "moerl-credentials"
FROM_CONFIG = "from-config"
DISPATCHERS = ("local", "all_to_all", "deepep", "uccl_ep", "nccl_ep")
"""Values of `moe.dispatcher`."""
ENGINES = ("torch", "vllm", "sglang")
"""Values of `rollout.engine`."""
SPOT_THEN_ON_DEMAND = "spot-then-on-demand"
CAPACITIES: tuple[str, ...] = ("spot", SPOT_THEN_ON_DEMAND, "on-demand")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowParameter:
    """One parameter of a WorkflowTemplate; without a `value`, whoever submits must give one."""

    name: str
    description: str
    value: str | None = None
    enum: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """What the manifest says where the value is to stand."""
        return workflow_parameter(self.name)

    def to_hera(self) -> Parameter:
        """Hera writes a value of None as null, which Argo would take for a value."""
        given: dict[str, Any] = {"value": self.value} if self.value is not None else {}
        if self.enum:
            given["enum"] = list(self.enum)
        return Parameter(name=self.name, description=self.description, **given)


def workflow_parameter(name: str) -> str:
    """`{{workflow.parameters.name}}`."""
    return f"{{{{workflow.parameters.{name}}}}}"


def references(names: Iterable[str]) -> dict[str, str]:
    """Parameters handed on as they are."""
    return {name: workflow_parameter(name) for name in names}


RUN = WorkflowParameter(name="run", description="Id of the run: 1 to 40 lower-case letters, digits and inner hyphens")
CONFIG = WorkflowParameter(
    name="config",
    value="configs/reverse-digits.toml",
    description="Configuration of the run: TOML text, a path in the image, or an s3:// URI of a TOML file",
)
ITERATIONS = WorkflowParameter(
    name="iterations", value="0", description="Iterations to add to the run; 0: as many as its configuration says"
)
ITERATION_NUMBER = WorkflowParameter(
    name="iteration", description="Number of the iteration, from 1; it makes the policy version of that number"
)
ROLLOUT_WORKERS = WorkflowParameter(name="rollout-workers", value="2", description="Pods that sample in parallel")
REWARD_WORKERS = WorkflowParameter(name="reward-workers", value="1", description="Pods that score in parallel")
ROLLOUT_CAPACITY = WorkflowParameter(
    name="rollout-capacity",
    value="spot",
    enum=CAPACITIES,
    description="Nodes of the pods that sample; spot-then-on-demand: the last attempt asks for on-demand",
)
REWARD_CAPACITY = WorkflowParameter(
    name="reward-capacity",
    value="spot",
    enum=CAPACITIES,
    description="Nodes of the pods that score; spot-then-on-demand: the last attempt asks for on-demand",
)
ROLLOUT_DEADLINE = WorkflowParameter(
    name="rollout-deadline",
    value="7200",
    description="Seconds after which a pod that samples is stopped; what it has committed stays, others take its units",
)
STRAGGLER_DEADLINE = WorkflowParameter(
    name="straggler-deadline",
    value="0",
    description=(
        "Seconds after the first unit was begun; then the iteration goes on with what is sampled and drops the rest. "
        "0: it waits for all, and the weights do not depend on how long anything took"
    ),
)
DISPATCHER = WorkflowParameter(
    name="dispatcher",
    value=FROM_CONFIG,
    enum=(FROM_CONFIG, *DISPATCHERS),
    description="How tokens reach the experts (moe.dispatcher); fixed for the run when it is made",
)
TRAINING_NODES = WorkflowParameter(
    name="training-nodes", value="1", description="Nodes that train together; 1: one pod, more: a JobSet"
)
RANKS_PER_NODE = WorkflowParameter(
    name="ranks-per-node", value="1", description="Ranks of each node when several train; nodes x ranks = train.ranks"
)
ROLLOUT_ENGINE = WorkflowParameter(
    name="rollout-engine",
    value=FROM_CONFIG,
    enum=(FROM_CONFIG, *ENGINES),
    description="Who samples (rollout.engine); fixed for the run when it is made",
)
ENGINE_PODS = WorkflowParameter(
    name="engine-pods",
    value="0",
    description="Pods that each keep a vLLM or SGLang server for the rollouts of all iterations; 0: none",
)
ENGINE_IMAGE = WorkflowParameter(
    name="engine-image",
    value=f"{DEFAULT_IMAGE}-engine",
    description="Image of the pods that keep a server (Dockerfile, target engine)",
)
QUEUE = WorkflowParameter(
    name="queue", value="", description="Kueue LocalQueue that admits the JobSet of several nodes; empty: none"
)
IMAGE = WorkflowParameter(
    name="image", value=DEFAULT_IMAGE, description="Image of every step (Dockerfile, target cpu or gpu)"
)
ENVIRONMENT = WorkflowParameter(
    name="environment",
    value=ENVIRONMENT_CONFIG_MAP,
    description="Name of the ConfigMap that says where the store and MLflow are",
)
CREDENTIALS = WorkflowParameter(
    name="credentials",
    value=CREDENTIALS_SECRET,
    description="Name of the Secret with the database's URL and, where needed, keys of the store",
)

FIRST_DISPATCHER = WorkflowParameter(
    name="first-dispatcher", value="local", enum=DISPATCHERS, description="Dispatcher to compare with"
)
SECOND_DISPATCHER = WorkflowParameter(
    name="second-dispatcher", value="all_to_all", enum=DISPATCHERS, description="Dispatcher that is compared"
)
BENCHMARK_RANKS = WorkflowParameter(
    name="ranks", value="2", description="Ranks of the node; where it has GPUs, one for each"
)
BENCHMARK_PROMPTS = WorkflowParameter(name="prompts", value="64", description="Prompts that each rank samples")

_AS_CONFIGURED = "; 0: as many as the configuration says"


def _from_config(parameter: WorkflowParameter) -> WorkflowParameter:
    return replace(parameter, value="0", description=parameter.description + _AS_CONFIGURED)


SHARED = (
    ROLLOUT_CAPACITY,
    REWARD_CAPACITY,
    ROLLOUT_DEADLINE,
    STRAGGLER_DEADLINE,
    QUEUE,
    IMAGE,
    ENVIRONMENT,
    CREDENTIALS,
)
"""The same for a campaign and for its iterations, and passed on with the value that was given."""
RESOLVED = (ROLLOUT_WORKERS, REWARD_WORKERS, TRAINING_NODES, RANKS_PER_NODE, ENGINE_PODS)
"""What `init` finds out for a campaign's iterations."""

CAMPAIGN: tuple[WorkflowParameter, ...] = (
    RUN,
    CONFIG,
    ITERATIONS,
    _from_config(ROLLOUT_WORKERS),
    _from_config(REWARD_WORKERS),
    DISPATCHER,
    _from_config(TRAINING_NODES),
    ROLLOUT_ENGINE,
    replace(
        ENGINE_PODS,
        value=FROM_CONFIG,
        description=f"{ENGINE_PODS.description}; {FROM_CONFIG}: one for each rollout worker, none for torch",
    ),
    ENGINE_IMAGE,
    *SHARED,
)
ITERATION: tuple[WorkflowParameter, ...] = (RUN, ITERATION_NUMBER, *RESOLVED, *SHARED)
BENCHMARK: tuple[WorkflowParameter, ...] = (
    replace(RUN, description="Id of a run that exists: its latest policy and its prompts are used"),
    FIRST_DISPATCHER,
    SECOND_DISPATCHER,
    BENCHMARK_RANKS,
    BENCHMARK_PROMPTS,
    IMAGE,
    ENVIRONMENT,
    CREDENTIALS,
)


def to_hera(parameters: Iterable[WorkflowParameter]) -> list[Parameter]:
    return [parameter.to_hera() for parameter in parameters]


def names(parameters: Iterable[WorkflowParameter]) -> tuple[str, ...]:
    return tuple(parameter.name for parameter in parameters)


def capacity_expression(parameter: WorkflowParameter, retry_limit: int) -> str:
    """The value of Karpenter's label for this attempt of a pod, as a template tag.

    Argo resolves it when it makes the attempt's pod: `retries` is "0" for the first one and the limit for the last.
    """
    spot, on_demand = "spot", "on-demand"
    assert {spot, on_demand} <= set(get_args(CapacityType))
    given = f"workflow.parameters['{parameter.name}']"
    last = f"{given} == '{SPOT_THEN_ON_DEMAND}' && asInt(retries) >= {retry_limit}"
    return f"{{{{={given} == '{on_demand}' || {last} ? '{on_demand}' : '{spot}'}}}}"
