"""Settings of the model, the sampler and the policy update: plain data, importable without torch.

Each class is a frozen dataclass that `steps.config` composes into the run's configuration. Ranges are declared in the
annotations and enforced by pydantic when a configuration is read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of a Mixture-of-Experts model built from scratch; ignored when `warmup.start` names a checkpoint."""

    __pydantic_config__ = {"extra": "forbid"}

    family: Literal["qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss"] = "qwen3_moe"
    hidden_size: Positive = 96
    num_layers: Positive = 2
    num_attention_heads: Positive = 4
    num_key_value_heads: Positive = 2
    num_experts: Positive = 8
    num_experts_per_token: Positive = 2
    moe_intermediate_size: Positive = 96
    max_position_embeddings: Positive = 128
    num_expert_groups: Positive = 1
    """deepseek_v3: groups of experts; with `num_groups_per_token` below it the choice is limited to that many."""
    num_groups_per_token: Positive = 1
    initializer_range: PositiveFloat = 0.05
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the published weights; training holds them in float32."""

    def problems(self) -> Iterator[str]:
        """One line, `model.field = value: the rule`, for each rule between the sizes that is broken."""
        if self.num_experts_per_token > self.num_experts:
            yield (
                f"model.num_experts_per_token = {self.num_experts_per_token}: must be at most "
                f"model.num_experts = {self.num_experts}"
            )
        heads = self.num_attention_heads
        if self.hidden_size % heads:
            yield f"model.hidden_size = {self.hidden_size}: must be a multiple of model.num_attention_heads = {heads}"
        elif (self.hidden_size // heads) % 2:
            yield (
                f"model.hidden_size = {self.hidden_size}: with model.num_attention_heads = {heads} a head has "
                f"{self.hidden_size // heads} dimensions; rotary embeddings need an even number"
            )
        if heads % self.num_key_value_heads:
            yield (
                f"model.num_attention_heads = {heads}: must be a multiple of "
                f"model.num_key_value_heads = {self.num_key_value_heads}"
            )
        yield from self._group_problems()

    def _group_problems(self) -> Iterator[str]:
        groups, chosen = self.num_expert_groups, self.num_groups_per_token
        if groups > 1 and self.family != "deepseek_v3":
            yield f"model.num_expert_groups = {groups}: family {self.family} has no expert groups; use 1 or deepseek_v3"
        elif chosen > groups:
            yield f"model.num_groups_per_token = {chosen}: must be at most model.num_expert_groups = {groups}"
        elif self.num_experts % groups or (self.family == "deepseek_v3" and self.num_experts < 2 * groups):
            yield (
                f"model.num_experts = {self.num_experts}: with model.num_expert_groups = {groups} the groups must be "
                "equal and of at least 2 experts"
            )
        elif self.num_experts_per_token > chosen * self.num_experts // groups and groups > 1:
            yield (
                f"model.num_experts_per_token = {self.num_experts_per_token}: model.num_groups_per_token = {chosen} "
                f"leaves {chosen * self.num_experts // groups} experts to choose from"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How a response is drawn from the policy."""

    __pydantic_config__ = {"extra": "forbid"}

    max_new_tokens: Positive = 8
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Smallest set of most likely tokens to draw from; below 1 the trainer scores the batch once before it starts."""
    max_prompt_tokens: Positive = 64
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the stop token; the token that completes one is kept, and so is its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """The policy-gradient objective. Formulas and their sources are in `moe.losses`."""

    __pydantic_config__ = {"extra": "forbid"}

    algorithm: Literal["grpo", "dapo", "dr_grpo", "gspo", "rloo", "cispo"] = "grpo"
    clip_low: PositiveFloat | None = None
    """Lower clip range; None takes the algorithm's published default."""
    clip_high: PositiveFloat | None = None
    """Upper clip range; None takes the algorithm's published default."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Bound on the loss of negative-advantage tokens (None: off)."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the k3 KL to the reference policy (version 0)."""
    entropy_coefficient: NonNegativeFloat = 0.0
    correction: Literal["none", "tis", "icepop"] = "none"
    """Rollout/training mismatch correction by the ratio of trainer to sampler log-probabilities."""
    tis_cap: PositiveFloat = 2.0
    icepop_low: PositiveFloat = 0.5
    icepop_high: PositiveFloat = 5.0
    advantage_epsilon: PositiveFloat = 1e-4
    """Added to the group's standard deviation; a degenerate group's advantage is exactly 0 whatever its value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    __pydantic_config__ = {"extra": "forbid"}

    learning_rate: PositiveFloat = 1e-4
    warmup_steps: NonNegative = 10
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateConfig:
    """How one batch becomes optimizer steps."""

    __pydantic_config__ = {"extra": "forbid"}

    epochs: Positive = 1
    optimizer_steps_per_epoch: Positive = 4
    """Mini-batches of whole groups; at least two optimizer steps a batch keep the clip live."""
    micro_batch_tokens: Positive = 16384
    """Padded tokens in one forward pass; it changes memory and speed, never the loss (global normalisation)."""
    threads: Positive = 1
    recompute: Literal["none", "experts", "moe"] = "none"
    """What the backward pass computes again instead of keeping: nothing, the experts' feed-forward, or the whole
    Mixture-of-Experts block with its exchanges; the routing stays that of the forward pass."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass; the weights and the optimizer stay in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """How tokens reach the experts, and how the router is kept balanced."""

    __pydantic_config__ = {"extra": "forbid"}

    dispatcher: Literal["local", "all_to_all", "deepep", "uccl_ep", "nccl_ep"] = "local"
    """local: every rank holds all experts. The others spread the experts over the ranks of an expert-parallel group."""
    expert_parallel_size: NonNegative = 0
    """Ranks of one expert-parallel group (0: all ranks, or 1 with the local dispatcher)."""
    deduplicate: Literal["none", "rank", "node"] = "none"
    """all_to_all: a token that goes to several experts of one rank, or of one node, crosses once."""
    exchange_dtype: Literal["model", "bfloat16"] = "model"
    """Of hidden states on the wire; deepep, uccl_ep and nccl_ep carry bfloat16 only."""
    exchange_timeout_s: PositiveFloat = 600.0
    """A rank that waits longer than this for the others gives up and names the ones that are gone."""
    low_latency: bool = False
    """deepep, uccl_ep: the kernels for few tokens, without gradients; for sampling and for probes."""
    max_tokens_per_rank: Positive = 8192
    """Most tokens that a rank dispatches at once; it sizes the buffers of deepep and nccl_ep, and of low_latency."""
    num_sms: Annotated[int, Field(ge=2, multiple_of=2)] = 20
    """Streaming multiprocessors that deepep, uccl_ep and nccl_ep may use."""
    network: Literal["auto", "rdma", "any"] = "auto"
    """What must carry bytes between nodes. auto: RDMA where the backend needs it or such a device is there."""
    on_downgrade: Literal["fail", "warn"] = "fail"
    """What happens when the transport that was observed is not the one that was requested."""
    capacity_factor: NonNegativeFloat = 0.0
    """An expert takes at most ceil(factor * tokens * top_k / experts) routes of a rank's pass (0: no limit)."""
    aux_loss_coefficient: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss (Switch Transformer, eq. 4), over the whole mini-batch."""
    bias_update_rate: NonNegativeFloat = 0.0
    """Step of the auxiliary-loss-free balancing bias (arXiv 2408.15664); needs a family that publishes such a bias."""
    freeze_router: bool = False
    """The routers' weights are not trained."""
    routing_replay: Literal["none", "trainer", "sampler"] = "none"
    """Experts that a token goes to in training: the router's choice, its choice when the batch began (R2), or the
    sampler's (R3). Only the selection is replayed; the weights are the router's own."""

    def expert_ranks(self, ranks: int) -> int:
        """Ranks of one expert-parallel group when `ranks` train together."""
        return self.expert_parallel_size or (1 if self.dispatcher == "local" else ranks)


def layout_problems(ranks: int, moe: MoeConfig, fsdp_size: int, num_experts: int | None = None) -> Iterator[str]:
    """One line, `field = value: the rule`, for each way in which the groups of ranks do not fit together.

    `fsdp_size` 0 means all ranks; `num_experts` None leaves out the rule about experts.
    """
    expert_ranks, sharding = moe.expert_ranks(ranks), fsdp_size or ranks
    expert_field = f"moe.expert_parallel_size = {expert_ranks}"
    if moe.expert_parallel_size == 0 and expert_ranks > 1:
        expert_field += " (all of train.ranks)"
    if moe.dispatcher == "local" and expert_ranks > 1:
        yield f'{expert_field}: moe.dispatcher = "local" holds all experts on every rank; use 1 or another dispatcher'
    if ranks % expert_ranks:
        yield f"{expert_field}: must divide train.ranks = {ranks}"
    if ranks % sharding:
        yield f"train.fsdp_size = {sharding}: must divide train.ranks = {ranks}"
    if sharding % expert_ranks and expert_ranks % sharding:
        yield f"train.fsdp_size = {sharding}: must be a multiple or a divisor of {expert_field}"
    if num_experts is not None and num_experts % expert_ranks:
        yield f"{expert_field}: must divide the model's number of experts, {num_experts}"
