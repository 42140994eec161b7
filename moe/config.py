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

    family: Literal["qwen3_moe"] = "qwen3_moe"
    hidden_size: Positive = 96
    num_layers: Positive = 2
    num_attention_heads: Positive = 4
    num_key_value_heads: Positive = 2
    num_experts: Positive = 8
    num_experts_per_token: Positive = 2
    moe_intermediate_size: Positive = 96
    max_position_embeddings: Positive = 128
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How a response is drawn from the policy."""

    __pydantic_config__ = {"extra": "forbid"}

    max_new_tokens: Positive = 8
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Smallest set of most likely tokens to draw from; below 1 the trainer scores the batch once before it starts."""
    max_prompt_tokens: Positive = 64


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


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """How tokens reach the experts, and how the router is kept balanced."""

    __pydantic_config__ = {"extra": "forbid"}

    dispatcher: Literal["local"] = "local"
    aux_loss_coefficient: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss (Switch Transformer, eq. 4), over the whole mini-batch."""
