"""What a model weighs, from its configuration alone: parameters are counted on the meta device, nothing is loaded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from moe.config import MoeConfig
from moe.dispatch.base import ExpertShape
from moe.dispatch.buffer_limits import UCCL, common_problems, normal_problems
from moe.dispatch.deepep_elastic import elastic_problems
from moe.dispatch.nccl_ep import nccl_ep_problems
from moe.experts import expert_modules
from moe.families import experts_per_token, refuse_unsupported
from moe.model import empty_model
from moe.model_shape import ModelShape


def measure(folder: Path) -> ModelShape:
    """The size of the model that `folder`/config.json describes.

    Raises ValueError of one line for a configuration that can't be read, and for a family that is not supported.
    """
    model = empty_model(folder)
    text: Any = model.config.get_text_config()
    refuse_unsupported(text.model_type)
    experts = expert_modules(model)
    if not experts:
        raise ValueError(f"model family {text.model_type} has no fused experts: nothing to plan for")
    routed = {id(parameter) for module in experts for parameter in module.parameters()}
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    return ModelShape(
        family=text.model_type,
        num_layers=text.num_hidden_layers,
        num_moe_layers=len(experts),
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_experts=experts[0].num_experts,
        top_k=experts_per_token(text),
        expert_width=experts[0].down_proj.numel() // (experts[0].num_experts * text.hidden_size),
        query_width=text.num_attention_heads * (getattr(text, "head_dim", None) or _head_size(text)),
        key_value_values=_cache_values(text),
        total_parameters=sum(parameter.numel() for parameter in model.parameters()),
        expert_parameters=sum(parameter.numel() for module in experts for parameter in module.parameters()),
        embedding_parameters=0 if tied else model.get_input_embeddings().weight.numel(),
        largest_layer_parameters=max(_dense_layers(model, routed)),
    )


def exchange_problems(
    size: ModelShape, moe: MoeConfig, ranks: int, ranks_per_node: int, tokens_per_rank: int
) -> Iterator[str]:
    """Limits of `moe.dispatcher` that this model breaks on `ranks` ranks, one line each; no library is needed.

    deepep is taken for the flavour that EFA needs, DeepEP 2 (`ElasticBuffer`).
    """
    shape = ExpertShape(
        num_experts=size.num_experts,
        top_k=size.top_k,
        hidden_size=size.hidden_size,
        dtype=torch.bfloat16,
        ep_size=moe.expert_ranks(ranks),
        ranks_per_node=min(ranks_per_node, moe.expert_ranks(ranks)),
        tokens_per_rank=tokens_per_rank,
    )
    if moe.dispatcher == "deepep":
        yield from elastic_problems(shape, moe)
    elif moe.dispatcher == "nccl_ep":
        yield from nccl_ep_problems(shape, moe)
    elif moe.dispatcher == "uccl_ep":
        yield from common_problems(shape, "uccl_ep", casts=moe.exchange_dtype == "bfloat16")
        yield from normal_problems(shape, UCCL, moe.num_sms)


def _dense_layers(model: PreTrainedModel, routed: set[int]) -> Iterator[int]:
    decoder: Any = model.get_decoder()
    for layer in decoder.layers:
        yield sum(parameter.numel() for parameter in layer.parameters() if id(parameter) not in routed)


def _head_size(text: Any) -> int:
    return int(text.hidden_size) // int(text.num_attention_heads)


def _cache_values(text: Any) -> int:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1) keeps one latent vector and one rotary key."""
    layers = int(text.num_hidden_layers)
    if latent := getattr(text, "kv_lora_rank", None):
        return layers * (int(latent) + int(text.qk_rope_head_dim))
    head = getattr(text, "head_dim", None) or _head_size(text)
    return layers * 2 * int(text.num_key_value_heads) * int(head)
