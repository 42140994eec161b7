"""Models: transformers' own Mixture-of-Experts classes, with our experts function and dispatcher attached."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

from moe.config import ModelConfig, MoeConfig
from moe.dispatch.base import ExpertShape
from moe.dispatch.catalog import build_dispatcher
from moe.experts import EXPERTS_IMPLEMENTATION, expert_modules, get_dispatcher, set_dispatcher
from moe.pretrained import reading, require_safetensors

logging.disable_progress_bar()  # logs are read as lines, a bar garbles them

ROPE_THETA = 10_000.0
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2


def default_device() -> torch.device:
    """Where models train and sample: the GPU when there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build_model(cfg: ModelConfig, vocab_size: int, seed: int) -> PreTrainedModel:
    """A freshly initialised model; equal arguments give bit-identical weights, and the global generator is untouched.

    Its weights are float32 and on the CPU: `cfg.dtype` is that of its publications. Token ids 0, 1 and 2 are pad, bos
    and eos, as `moe.tokenizer.build_char_tokenizer` numbers them. Raises ValueError naming the field when the attention
    or expert sizes do not fit together.
    """
    for problem in cfg.problems():
        raise ValueError(problem)
    model_class, configure = _FAMILIES[cfg.family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class._from_config(configure(cfg, vocab_size), dtype=torch.float32, attn_implementation="sdpa")
    attach_dispatcher(model, MoeConfig())
    return _as_model(model)


def _qwen3_moe_config(cfg: ModelConfig, vocab_size: int) -> PreTrainedConfig:
    return Qwen3MoeConfig(
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


_FAMILIES: dict[str, tuple[Any, Callable[[ModelConfig, int], PreTrainedConfig]]] = {
    "qwen3_moe": (Qwen3MoeForCausalLM, _qwen3_moe_config),
}


def load_model(folder: Path, dtype: str | None = None) -> PreTrainedModel:
    """The model of a Hugging Face folder, in `dtype` ("float32", "bfloat16") or, by default, the dtype it was saved in.

    Only safetensors are read, and no code of the folder runs. Raises ValueError of one line when the folder has no
    config.json or no safetensors, when a file is corrupt or a weight missing or misshapen, and when the model is of an
    unknown type or has no fused experts.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {folder} has no config.json: give a Hugging Face checkpoint folder")
    require_safetensors(folder)
    with reading("model", folder):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or "auto",
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    # transformers would go on with random numbers in their place.
    if unread := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
        raise ValueError(
            f"model folder {folder}: weight {unread[0]} is missing or not of the shape that config.json says; "
            "give a complete Hugging Face checkpoint folder"
        )
    attach_dispatcher(model, MoeConfig())
    return _as_model(model)


def stored_dtype(folder: Path) -> str:
    """Name of the dtype that a folder's config.json gives its weights ("bfloat16"); float32 when it gives none.

    Raises ValueError when config.json is missing or not JSON.
    """
    with reading("config.json", folder):
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(name)


def attach_dispatcher(model: PreTrainedModel, moe: MoeConfig) -> None:
    """Send the tokens of every expert layer of `model` through the dispatcher that `moe` names.

    The one that was attached before is closed. The name of the implementation lives on the config object: models must
    not share one. Raises ValueError when the
    model has no fused experts or its shape breaks a limit of the dispatcher.
    """
    experts = expert_modules(model)
    if not experts:
        raise ValueError(f"model class {type(model).__name__} has no fused experts: choose a Mixture-of-Experts model")
    config = model.config.get_text_config()
    dispatcher = build_dispatcher(moe)
    shape = ExpertShape(experts[0].num_experts, config.num_experts_per_tok, config.hidden_size, model.dtype)
    dispatcher.validate(shape)
    if (previous := get_dispatcher(experts[0])) is not None:
        previous.close()
    for module in experts:
        set_dispatcher(module, dispatcher)
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)


def transport_report(model: PreTrainedModel) -> dict[str, Any]:
    """How the tokens of `model` reach its experts: what was requested, what was observed, and details; JSON values."""
    dispatcher = get_dispatcher(expert_modules(model)[0])
    if dispatcher is None:
        raise ValueError(f"model class {type(model).__name__} has no dispatcher: attach one first")
    return asdict(dispatcher.transport_report())


def _as_model(model: Any) -> PreTrainedModel:
    """transformers is untyped; this states the type once."""
    return model
