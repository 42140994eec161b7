"""The model families: their configurations from scratch, their attention, and what is refused, by name and why."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe.config import ModelConfig

ROPE_THETA = 10_000.0
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Family:
    """How a family is built from scratch."""

    model_class: Any
    configure: Callable[[ModelConfig, int], PreTrainedConfig]
    """(sizes, vocabulary size) -> configuration."""


def attention_of(model_type: str) -> str:
    """Name of the attention implementation of transformers that a model type runs on.

    gpt_oss has attention sinks, which scaled-dot-product attention lacks; its fused kernels need a GPU.
    """
    return "eager" if model_type == "gpt_oss" else "sdpa"


def refuse_unsupported(model_type: str) -> None:
    """Raise ValueError, with the reason, for a model type of transformers that is known not to work here."""
    if model_type in _REFUSED:
        raise ValueError(
            f"model family {model_type} is not supported: {_REFUSED[model_type]}; use one of {', '.join(FAMILIES)} or "
            "another family with fused experts, a router of its own and full attention"
        )


def experts_per_token(config: PreTrainedConfig) -> int:
    """K of a model's configuration; ValueError naming the model type when it does not say."""
    text: Any = config.get_text_config()
    top_k = getattr(text, "num_experts_per_tok", None)
    if not isinstance(top_k, int):
        raise ValueError(
            f"model family {text.model_type} is not supported: num_experts_per_tok of its config is no number; use one "
            f"of {', '.join(FAMILIES)}"
        )
    return top_k


def _common(cfg: ModelConfig, vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_attention_heads,
        "num_key_value_heads": cfg.num_key_value_heads,
        "num_experts_per_tok": cfg.num_experts_per_token,
        "max_position_embeddings": cfg.max_position_embeddings,
        "initializer_range": cfg.initializer_range,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": False,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }


def _head_dim(cfg: ModelConfig) -> int:
    return cfg.hidden_size // cfg.num_attention_heads


def _qwen3_moe(cfg: ModelConfig, vocab_size: int) -> PreTrainedConfig:
    return Qwen3MoeConfig(
        **_common(cfg, vocab_size),
        intermediate_size=cfg.moe_intermediate_size,
        moe_intermediate_size=cfg.moe_intermediate_size,
        num_experts=cfg.num_experts,
        head_dim=_head_dim(cfg),
        norm_topk_prob=True,
    )


def _mixtral(cfg: ModelConfig, vocab_size: int) -> PreTrainedConfig:
    return MixtralConfig(
        **_common(cfg, vocab_size), intermediate_size=cfg.moe_intermediate_size, num_local_experts=cfg.num_experts
    )


def _olmoe(cfg: ModelConfig, vocab_size: int) -> PreTrainedConfig:
    return OlmoeConfig(
        **_common(cfg, vocab_size), intermediate_size=cfg.moe_intermediate_size, num_experts=cfg.num_experts
    )


def _deepseek_v3(cfg: ModelConfig, vocab_size: int) -> PreTrainedConfig:
    """Latent attention with full-rank queries; half of each head is rotated; every layer has experts."""
    half = _head_dim(cfg) // 2
    rotated = half + half % 2
    common = _common(cfg, vocab_size) | {"num_key_value_heads": cfg.num_attention_heads}  # one latent serves all heads
    return DeepseekV3Config(
        **common,
        intermediate_size=cfg.moe_intermediate_size,
        moe_intermediate_size=cfg.moe_intermediate_size,
        n_routed_experts=cfg.num_experts,
        n_shared_experts=1,
        n_group=cfg.num_expert_groups,
        topk_group=cfg.num_groups_per_token,
        first_k_dense_replace=0,
        q_lora_rank=None,
        kv_lora_rank=max(16, cfg.hidden_size // 4),
        qk_rope_head_dim=rotated,
        qk_nope_head_dim=max(1, _head_dim(cfg) - rotated),
        v_head_dim=_head_dim(cfg),
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        num_mtp_layers=0,
    )


def _gpt_oss(cfg: ModelConfig, vocab_size: int) -> PreTrainedConfig:
    return GptOssConfig(
        **_common(cfg, vocab_size),
        intermediate_size=cfg.moe_intermediate_size,
        num_local_experts=cfg.num_experts,
        head_dim=_head_dim(cfg),
    )


FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(Qwen3MoeForCausalLM, _qwen3_moe),
    "mixtral": Family(MixtralForCausalLM, _mixtral),
    "olmoe": Family(OlmoeForCausalLM, _olmoe),
    "deepseek_v3": Family(DeepseekV3ForCausalLM, _deepseek_v3),
    "gpt_oss": Family(GptOssForCausalLM, _gpt_oss),
}

_NOT_FUSED = "its experts do not follow the fused-experts interface of transformers"
_RECURRENT = "some of its layers keep a recurrent state, which the responses to one prompt cannot share"
_INDEXED = "its sparse attention keeps an index beside the keys and values, which is not shared among responses"

_REFUSED: dict[str, str] = {
    **dict.fromkeys(("dbrx", "doge", "jetmoe", "llama4", "llama4_text", "longcat_flash", "step3p7"), _NOT_FUSED),
    **dict.fromkeys(
        (
            "bailing_hybrid",
            "granitemoehybrid",
            "jamba",
            "kimi_linear",
            "lfm2_moe",
            "minimax",
            "nemotron_h",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "qwen3_next",
        ),
        _RECURRENT,
    ),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), _INDEXED),
}
