"""What the plan is reckoned from: the model's size, the configuration and the platform, as plain numbers."""

from dataclasses import dataclass
from typing import Any

from moe.model_shape import ModelShape
from steps.config import RunConfig
from workflows.platform import Accelerator, PlatformProfile

BF16_BYTES, F32_BYTES = 2, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One configuration on one platform."""

    config: RunConfig
    model: ModelShape
    profile: PlatformProfile
    accelerator: Accelerator
    response_tokens: int
    """Mean length of a response that is reckoned with."""

    @property
    def ranks(self) -> int:
        return self.config.train.ranks

    @property
    def ranks_per_node(self) -> int:
        return min(self.ranks, self.profile.gpus)

    @property
    def training_nodes(self) -> int:
        return -(-self.ranks // self.profile.gpus)

    @property
    def expert_ranks(self) -> int:
        return self.config.moe.expert_ranks(self.ranks)

    @property
    def sharding(self) -> int:
        """Ranks over which the weights that are no experts are split."""
        return self.config.train.fsdp_size or self.ranks

    @property
    def expert_sharding(self) -> int:
        """Ranks over which one expert-parallel rank's experts are split in turn."""
        return max(1, self.sharding // self.expert_ranks)

    @property
    def engine_gpus(self) -> int:
        """GPUs of one rollout worker's engine."""
        server = self.config.rollout.server
        return server.tensor_parallel_size * server.data_parallel_size

    @property
    def rollout_gpus(self) -> int:
        return self.config.rollout.workers * self.engine_gpus

    @property
    def rollout_nodes(self) -> int:
        return -(-self.rollout_gpus // self.profile.gpus)

    @property
    def samples(self) -> int:
        """Of one iteration."""
        return self.config.rollout.prompts_per_iteration * self.config.rollout.group_size

    @property
    def sequence_tokens(self) -> int:
        """Mean tokens of a prompt and its response; prompts are reckoned with their limit."""
        return self.config.rollout.sampling.max_prompt_tokens + self.response_tokens

    @property
    def training_tokens(self) -> int:
        """Of one iteration, over all ranks."""
        return self.samples * self.sequence_tokens * self.config.train.update.epochs


def new_setting(
    config: RunConfig,
    sizes: dict[str, Any],
    profile: PlatformProfile,
    accelerator: Accelerator,
    mean_response: int | None,
) -> Setting:
    """Everything that the formulas read; `mean_response` None: half of the longest response."""
    limit = config.rollout.sampling.max_new_tokens
    return Setting(
        config=config,
        model=ModelShape(**sizes),
        profile=profile,
        accelerator=accelerator,
        response_tokens=min(mean_response or -(-limit // 2), limit),
    )
