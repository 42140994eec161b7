"""Models: transformers' own Mixture-of-Experts classes, with our experts function and dispatcher attached."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

from moe.config import ModelConfig, MoeConfig
from moe.dispatch.base import ExpertShape
from moe.dispatch.catalog import build_dispatcher
from moe.experts import EXPERTS_IMPLEMENTATION, expert_modules, set_dispatcher

logging.disable_progress_bar()  # logs are read as lines, a bar garbles them

ROPE_THETA = 10_000.0
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2


def build_model(cfg: ModelConfig, vocab_size: int, seed: int) -> PreTrainedModel:
    """A freshly initialised model; equal arguments give bit-identical weights, and the global generator is untouched.

    Token ids 0, 1 and 2 are pad, bos and eos, as `moe.tokenizer.build_char_tokenizer` numbers them. Raises ValueError
    naming the field when the attention or expert sizes do not fit together.
    """
    _check_attention(cfg)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=cfg.hidden_size,
        intermediate_size=cfg.moe_intermediate_size,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=cfg.num_attention_heads,
        num_key_value_heads=cfg.num_key_value_heads,
        head_dim=cfg.hidden_size // cfg.num_attention_heads,
        num_experts=cfg.num_experts,
        num_experts_per_tok=cfg.num_experts_per_token,
        moe_intermediate_size=cfg.moe_intermediate_size,
        max_position_embeddings=cfg.max_position_embeddings,
        initializer_range=cfg.initializer_range,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        norm_topk_prob=True,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM._from_config(config, dtype=getattr(torch, cfg.dtype), attn_implementation="sdpa")
    attach_dispatcher(model, MoeConfig())
    return _as_model(model)


def load_model(folder: Path, dtype: str | None = None) -> PreTrainedModel:
    """The model of a Hugging Face folder, in `dtype` ("float32", "bfloat16") or, by default, the dtype it was saved in.

    Raises ValueError when the folder holds no config.json or the model has no fused experts.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {folder} has no config.json: give a Hugging Face checkpoint folder")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype or "auto", attn_implementation="sdpa", local_files_only=True
    )
    attach_dispatcher(model, MoeConfig())
    return _as_model(model)


def attach_dispatcher(model: PreTrainedModel, moe: MoeConfig) -> None:
    """Send the tokens of every expert layer of `model` through the dispatcher that `moe` names.

    The name of the implementation lives on the config object: models must not share one. Raises ValueError when the
    model has no fused experts or its shape breaks a limit of the dispatcher.
    """
    experts = expert_modules(model)
    if not experts:
        raise ValueError(f"model class {type(model).__name__} has no fused experts: choose a Mixture-of-Experts model")
    config = model.config.get_text_config()
    dispatcher = build_dispatcher(moe)
    shape = ExpertShape(experts[0].num_experts, config.num_experts_per_tok, config.hidden_size, model.dtype)
    dispatcher.validate(shape)
    for module in experts:
        set_dispatcher(module, dispatcher)
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)


def _check_attention(cfg: ModelConfig) -> None:
    if cfg.hidden_size % (2 * cfg.num_attention_heads):
        raise ValueError(
            f"model.hidden_size {cfg.hidden_size} must be a multiple of 2 x num_attention_heads "
            f"({2 * cfg.num_attention_heads}): rotary embeddings need an even head size"
        )
    if cfg.num_attention_heads % cfg.num_key_value_heads:
        raise ValueError(
            f"model.num_attention_heads {cfg.num_attention_heads} must be a multiple of num_key_value_heads "
            f"{cfg.num_key_value_heads}"
        )


def _as_model(model: Any) -> PreTrainedModel:
    """transformers is untyped; this states the type once."""
    return model
