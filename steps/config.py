"""The run's configuration: one TOML file, read into frozen dataclasses without loading torch.

Unknown keys and wrong types are refused with the dotted path and the nearest valid name (`steps.config_loader`).
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from moe.config import (
    Fraction,
    LossConfig,
    ModelConfig,
    MoeConfig,
    NonNegative,
    NonNegativeFloat,
    OptimizerConfig,
    Positive,
    PositiveFloat,
    SamplingConfig,
    UpdateConfig,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """Where prompts come from and how an answer is verified."""

    __pydantic_config__ = {"extra": "forbid"}

    kind: Literal["reverse_digits", "sort_digits", "two_digit_addition", "reasoning_gym", "jsonl"] = "reverse_digits"
    digits: Annotated[int, Field(ge=1, le=12)] = 6
    """Length of the digit string (reverse_digits, sort_digits)."""
    reasoning_gym_task: str = ""
    """Name of a reasoning-gym task, for example spell_backward."""
    reasoning_gym_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that task, for example {max_word_len = 4}."""
    train_path: str = ""
    """JSONL file, or s3:// URI of one, with `prompt`, `answer`, optional `id` and `meta` (kind jsonl)."""
    heldout_path: str = ""
    """The same with held-out rows; empty: the last `heldout_size` rows of a seeded shuffle of train_path."""
    verifier: str = "exact"
    """exact, numeric, math_verify, regex, per_position, reasoning_gym, or package.module:function."""
    prompt_format: Literal["plain", "chat"] = "plain"
    """chat: a prompt is the user's message, or the row's messages, through the tokenizer's chat template."""
    system_prompt: str = ""
    """Message of the system before every prompt that has none of its own (prompt_format chat)."""
    train_size: Positive = 20000
    """Prompts to generate for training (procedural and reasoning-gym tasks)."""
    heldout_size: Positive = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupConfig:
    """How policy version 0 comes to be."""

    __pydantic_config__ = {"extra": "forbid"}

    start: str = "random"
    """`random`, or the path or s3:// URI of a Hugging Face checkpoint folder."""
    max_steps: NonNegative = 0
    """Supervised steps at most on the task's answers; 0: none."""
    stop_reward: Fraction = 0.3
    """Stop as soon as the held-out greedy reward reaches this."""
    check_every: Positive = 5
    batch_size: Positive = 128
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-3, warmup_steps=20, weight_decay=0.01)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """The server of rollout.engine = vllm or sglang: one for all workers of a machine, or a fleet that runs already."""

    __pydantic_config__ = {"extra": "forbid"}

    url: str = ""
    """Addresses of running engine hosts (`python -m steps.engine_host`), separated by commas; worker n takes number n
    modulo their count. Empty: a host is started on the node of the worker that needs one."""
    tensor_parallel_size: Positive = 1
    data_parallel_size: Positive = 1
    expert_parallel: bool = False
    """Spread the experts over all ranks of the server."""
    all2all_backend: str = ""
    """vLLM's --all2all-backend, SGLang's --moe-a2a-backend; empty: the engine's default."""
    max_running_requests: Positive = 256
    """Requests that a worker keeps in flight, and sequences that the server decodes at once."""
    gpu_memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Of each GPU, for weights and key-value cache together."""
    kv_cache_gib: Positive = 1
    """Key-value cache of a server on CPU."""
    start_timeout_s: PositiveFloat = 600.0
    """A server that is not healthy by then counts as failed."""
    request_timeout_s: PositiveFloat = 300.0
    """A request without an answer by then makes the worker look whether the server is hung."""
    max_restarts: NonNegative = 2
    """Restarts of a dead or hung server during one worker's life; then the worker gives its unit back."""
    idle_s: PositiveFloat = 300.0
    """A server that a worker started ends when no worker has asked for anything for so long."""
    probe_tolerance: NonNegativeFloat = 0.0
    """Largest difference of a log-probability of the probe; 0: 1e-4 for float32 weights, 0.25 for others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Sampling of one iteration's experience."""

    __pydantic_config__ = {"extra": "forbid"}

    engine: Literal["torch", "vllm", "sglang"] = "torch"
    workers: Positive = 2
    """Pods that sample in parallel, unless whoever submits the workflow says otherwise."""
    prompts_per_iteration: Positive = 64
    group_size: Annotated[int, Field(ge=2)] = 16
    prompts_per_unit: Positive = 16
    """Prompts of one lease."""
    prompts_per_batch: NonNegative = 0
    """Prompts of a unit that are decoded and stored together: what a killed worker loses at most. 0: all."""
    lease_s: PositiveFloat = 60.0
    backup_after: NonNegativeFloat = 2.0
    """An idle worker samples a unit, too, on which nothing was stored for this many times the median seconds of the
    iteration's units (and for at least two seconds); the first to store a group wins. 0: never."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    drain_budget_s: NonNegativeFloat = 60.0
    """After a stop was asked for, the running batch is finished if it ends within this; then the lease is returned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """Scoring of samples."""

    __pydantic_config__ = {"extra": "forbid"}

    workers: Positive = 1
    """Pods that score in parallel, unless whoever submits the workflow says otherwise."""
    timeout_s: PositiveFloat = 10.0
    """Wall time for one sample; beyond it the reward status is `timeout`."""
    sandbox: Literal["required", "best-effort", "off"] = "best-effort"
    """What a verifier is held to, besides its time: no network, processes or secrets, few files. best-effort: what the
    kernel can do, and the report says what that is; required: all or nothing; off: nothing, it sees the environment."""
    memory_mib: Annotated[int, Field(ge=64)] = 4096
    """Address space of the process that scores, unless the sandbox is off."""
    lease_s: PositiveFloat = 60.0
    shuffle: bool = False
    """Permute rewards among samples: a control that must not learn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferConfig:
    """Selection of experience for training."""

    __pydantic_config__ = {"extra": "forbid"}

    max_staleness: NonNegative = 1
    """Policy versions between sampling and training; older groups are dropped with the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The policy update."""

    __pydantic_config__ = {"extra": "forbid"}

    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    ranks: Positive = 1
    """Processes that train together, each on its share of every mini-batch."""
    fsdp_size: NonNegative = 1
    """Ranks over which the weights that are no experts are sharded (FSDP2); 1: replicated, 0: all ranks."""
    max_rollout_kl: NonNegativeFloat = 0.0
    """The update fails when the k3 estimate of KL(sampler || trainer), before its first step, is above; 0: no bound."""
    checkpoint_every: NonNegative = 0
    """Optimizer steps between two states saved inside an update, while it goes on; 0: only when asked to stop."""
    keep_checkpoints: Positive = 2
    """Trainer states kept besides that of version 0; older ones are deleted after a publication."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishConfig:
    """How the weights of a policy version are stored."""

    __pydantic_config__ = {"extra": "forbid"}

    full_every: Positive = 1
    """A chain of versions has this many at most: one stored whole, the others as what changed since their parent.
    1: every version is stored whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """When an update counts as validated."""

    __pydantic_config__ = {"extra": "forbid"}

    min_reward: Fraction = 0.0
    max_regression: Fraction = 0.1
    """Held-out reward may fall by at most this below the last validated version."""
    on_reject: Literal["continue", "rollback"] = "continue"
    """rollback: the next iteration samples from and trains the last validated version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """Held-out greedy evaluation."""

    __pydantic_config__ = {"extra": "forbid"}

    max_prompts: Positive = 256
    gate: GateConfig = field(default_factory=GateConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingConfig:
    """MLflow mirror."""

    __pydantic_config__ = {"extra": "forbid"}

    experiment: str = "argo-moe-rl"
    budget_s: PositiveFloat = 3.0
    """Longest time that a step may spend on the tracking server; what is left stays in the spool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that decides what a run computes."""

    __pydantic_config__ = {"extra": "forbid"}

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,28}[a-z0-9]$")] = "reverse-digits"
    """Prefix of the run's id."""
    description: str = ""
    platform: str = "cpu"
    """Profile of the cluster that the sizes are made for: `moerl plan` reckons with it."""
    seed: NonNegative = 0
    iterations: Positive = 20
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
