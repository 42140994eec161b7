"""Batched decoding with a key-value cache, reading the weights of a transformers model.

`open_session` prefills each distinct prompt once and yields next-token logits, step by step. Qwen3-MoE runs on a
decoder of few, fused operations: for small models the cost of a step is the number of operations in it. Any other
family runs on the model's own forward.
"""

import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from moe.decoding import Decoder, DecodingSession, PromptBatch, RoutingRecord, prompt_routing
from moe.experts import grouped_mm
from moe.routing import RouterControl

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose table depends on the position alone."""
_PREFILL_PROMPTS = 64
"""Distinct prompts in one prefill pass: it bounds the activations, which then stay in cache."""


def build_decoder(model: PreTrainedModel) -> Decoder:
    """The fast decoder for a plain Qwen3-MoE, the model's own forward for anything else."""
    return Qwen3MoeDecoder(model) if is_plain_qwen3_moe(model) else ForwardDecoder(model)


def is_plain_qwen3_moe(model: PreTrainedModel) -> bool:
    """Whether `Qwen3MoeDecoder` computes what this model computes."""
    config: Any = model.config
    return (
        config.model_type == "qwen3_moe"
        and not config.mlp_only_layers
        and config.decoder_sparse_step == 1
        and not config.attention_bias
        and config.sliding_window is None
        and config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in _ROPE_TYPES
    )


@dataclass(frozen=True)
class _Layer:
    """One layer's weights, laid out for `rows @ weight`; views of the model's parameters but for qkv and qk_norm."""

    attention_norm_H: Tensor
    qkv: Tensor
    qk_norm_ND: Tensor
    attention_out: Tensor
    experts_norm_H: Tensor
    router_HE: Tensor
    gate_up_EHI: Tensor
    down_EIH: Tensor


class Qwen3MoeDecoder:
    """Decoder for `transformers.Qwen3MoeForCausalLM`, on the model's device and in its dtype."""

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        self._model: Any = model
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self.num_experts: int = config.num_experts
        self.top_k: int = config.num_experts_per_tok
        self.normalises_top_k: bool = config.norm_topk_prob
        self.epsilon: float = config.rms_norm_eps
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the weights again: the fused query-key-value projection and the scaled norms are copies."""
        self.layers = [self._read_layer(layer) for layer in self._model.model.layers]
        self.embedding_VH: Tensor = self._model.model.embed_tokens.weight
        self.final_norm_H: Tensor = self._model.model.norm.weight
        self.head_HV: Tensor = self._model.lm_head.weight.t()
        self.expert_ids_E = torch.arange(self.num_experts, device=self.embedding_VH.device)

    def _read_layer(self, layer: Any) -> _Layer:
        attention, experts = layer.self_attn, layer.mlp.experts
        query_norm = (attention.q_norm.weight * attention.scaling).expand(self.num_heads, -1)
        key_norm = attention.k_norm.weight.expand(self.num_kv_heads, -1)
        qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        return _Layer(
            attention_norm_H=layer.input_layernorm.weight,
            qkv=qkv.t().contiguous(),
            qk_norm_ND=torch.cat([query_norm, key_norm]),
            attention_out=attention.o_proj.weight.t(),
            experts_norm_H=layer.post_attention_layernorm.weight,
            router_HE=layer.mlp.gate.weight.t(),
            gate_up_EHI=experts.gate_up_proj.transpose(1, 2),
            down_EIH=experts.down_proj.transpose(1, 2),
        )

    def rotary_table(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of positions 0 to `length`, each (length, head_dim).

        Rotating x is `x * cos + roll(x, head_dim / 2) * signed_sin`: rolling by half swaps the two halves.
        """
        positions = torch.arange(length, device=self.embedding_VH.device).unsqueeze(0)
        cos, sin = self._model.model.rotary_emb(self.embedding_VH, positions)
        signed = torch.cat([-sin[0, :, : self.head_dim // 2], sin[0, :, self.head_dim // 2 :]], dim=-1)
        return cos[0], signed

    def norm(self, hidden: Tensor, weight_H: Tensor) -> Tensor:
        """RMS normalisation over the last dimension."""
        return F.rms_norm(hidden, weight_H.shape, weight_H, self.epsilon)

    def query_key_value(
        self, layer: _Layer, hidden_TH: Tensor, cos_T1D: Tensor, sin_T1D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (T, heads, D), scaled for the attention, rotated keys and values (T, kv heads, D)."""
        heads = self.norm(hidden_TH, layer.attention_norm_H).mm(layer.qkv).view(len(hidden_TH), -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        normed = F.rms_norm(heads[:, :num_rotated], (self.head_dim,), None, self.epsilon) * layer.qk_norm_ND
        rotated = torch.addcmul(normed * cos_T1D, torch.roll(normed, self.head_dim // 2, -1), sin_T1D)
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], heads[:, num_rotated:]

    def add_experts(self, layer: _Layer, hidden_TH: Tensor, chosen: list[Tensor] | None) -> Tensor:
        """`hidden_TH` plus its mixture of experts, (T, H); the tokens' (T, K) experts are appended to `chosen`."""
        normed = self.norm(hidden_TH, layer.experts_norm_H)
        probs = torch.softmax(normed.mm(layer.router_HE), -1, dtype=torch.float32)
        weights_TK, ids_TK = torch.topk(probs, self.top_k, -1)
        if chosen is not None:
            chosen.append(ids_TK)
        if self.normalises_top_k:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        sorted_ids_S, order_S = torch.sort(ids_TK.view(-1))
        ends_E = torch.searchsorted(sorted_ids_S, self.expert_ids_E, right=True, out_int32=True)
        rows = normed.index_select(0, order_S // self.top_k)
        gate, up = grouped_mm(rows, layer.gate_up_EHI, ends_E).chunk(2, -1)
        down = grouped_mm(F.silu(gate).mul_(up), layer.down_EIH, ends_E)
        by_token_TKH = down.index_select(0, torch.argsort(order_S)).view(*ids_TK.shape, -1)
        return hidden_TH + (by_token_TKH * weights_TK.to(down.dtype).unsqueeze(-1)).sum(1)

    def next_logits(self, hidden_BH: Tensor) -> Tensor:
        """Float32 logits of the token after each row."""
        return self.norm(hidden_BH, self.final_norm_H).mm(self.head_HV).float()

    def open_session(
        self, prompts: PromptBatch, max_new_tokens: int, *, record_routing: bool = False
    ) -> DecodingSession:
        """Prefill the distinct prompts and spread their caches over the rows of the batch.

        In the last layer only the last prompt token is computed: the others' experts are unknown there, and matter to
        nothing.
        """
        return _Qwen3MoeSession(self, prompts, max_new_tokens, record_routing)


class _Qwen3MoeSession:
    def __init__(
        self, decoder: Qwen3MoeDecoder, prompts: PromptBatch, max_new_tokens: int, record_routing: bool
    ) -> None:
        self._decoder = decoder
        self.routing: RoutingRecord | None = None
        prefilled: list[Tensor] | None = [] if record_routing else None
        self._length = prompts.ids_UP.shape[1]
        self._cos, self._sin = decoder.rotary_table(self._length + max_new_tokens)
        num_rows, total = int(prompts.copies_U.sum()), self._length + max_new_tokens
        self._caches = [self._new_cache(num_rows, total) for _ in decoder.layers]
        self._row_positions_B1: Tensor | None = None
        self._bias_B1T: Tensor | None = None
        if prompts.is_padded:
            self._track_padding(prompts, max_new_tokens)
        chunks = prompts.split(_PREFILL_PROMPTS)
        self.logits_BV = torch.cat([self._prefill(chunk, prefilled) for chunk in chunks])
        if prefilled is not None:
            shape_LK = (len(decoder.layers), decoder.top_k)
            self.routing = RoutingRecord(torch.cat(prefilled), torch.empty(0, *shape_LK, dtype=torch.int16))

    def _track_padding(self, prompts: PromptBatch, max_new_tokens: int) -> None:
        valid_BP = prompts.valid_UP.repeat_interleave(prompts.copies_U, 0)
        bias_BT = torch.zeros(len(valid_BP), self._length + max_new_tokens, device=valid_BP.device)
        bias_BT[:, : self._length].masked_fill_(~valid_BP, float("-inf"))
        kv_heads = self._decoder.num_kv_heads
        self._bias_B1T = bias_BT.to(self._cos.dtype).repeat_interleave(kv_heads, 0).unsqueeze(1)
        self._row_positions_B1 = valid_BP.sum(1, keepdim=True)

    def _new_cache(self, num_rows: int, total: int) -> tuple[Tensor, Tensor]:
        """Keys (B, kv heads, D, T) and values (B, kv heads, T, D), T with room for the response.

        Keys lie transposed: the scores of a short query are then products of rows, which are faster.
        """
        kv_heads, head_dim = self._decoder.num_kv_heads, self._decoder.head_dim
        keys = self._cos.new_empty(num_rows, kv_heads, head_dim, total)
        return keys, self._cos.new_empty(num_rows, kv_heads, total, head_dim)

    def _prefill(self, prompts: PromptBatch, prefilled: list[Tensor] | None) -> Tensor:
        """Fill the rows of `prompts` in the caches; logits (rows, V). Their experts (U, P, L, K) go to `prefilled`."""
        chosen: list[Tensor] | None = None if prefilled is None else []
        decoder, (num_prompts, length) = self._decoder, prompts.ids_UP.shape
        hidden = decoder.embedding_VH.index_select(0, prompts.ids_UP.reshape(-1))
        positions = prompts.positions_UP().reshape(-1)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        mask = _attention_mask(prompts)
        for layer, cache in zip(decoder.layers, self._caches, strict=True):
            states = decoder.query_key_value(layer, hidden, cos, sin)
            shape = (num_prompts, length, -1, decoder.head_dim)
            query, key, value = (state.reshape(shape).transpose(1, 2) for state in states)
            self._store(cache, prompts, key, value)
            if layer is decoder.layers[-1]:
                # Only the last token's output is needed from here on.
                hidden, query, mask = hidden.view(num_prompts, length, -1)[:, -1], query[:, :, -1:], mask[:, :, -1:]
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0, enable_gqa=True)
            hidden = hidden.addmm(attended.transpose(1, 2).reshape(len(hidden), -1), layer.attention_out)
            hidden = decoder.add_experts(layer, hidden, chosen)
        if prefilled is not None and chosen is not None:
            prefilled.append(prompt_routing(prompts.valid_UP, chosen))
        return decoder.next_logits(hidden).repeat_interleave(prompts.copies_U, 0)

    def _store(self, cache: tuple[Tensor, Tensor], prompts: PromptBatch, key: Tensor, value: Tensor) -> None:
        """Spread the states (U, kv heads, P, D) of the prompts over their rows of the cache."""
        keys, values = cache
        start, end = prompts.first_row, prompts.first_row + int(prompts.copies_U.sum())
        keys[start:end, :, :, : self._length] = key.transpose(2, 3).repeat_interleave(prompts.copies_U, 0)
        values[start:end, :, : self._length] = value.repeat_interleave(prompts.copies_U, 0)

    def step(self, tokens_B: Tensor) -> None:
        decoder = self._decoder
        chosen: list[Tensor] | None = None if self.routing is None else []
        hidden = decoder.embedding_VH.index_select(0, tokens_B)
        cos, sin = self._next_rotary()
        for layer, cache in zip(decoder.layers, self._caches, strict=True):
            query, key, value = decoder.query_key_value(layer, hidden, cos, sin)
            attended = self._attend(cache, query, key, value)
            hidden = decoder.add_experts(layer, hidden.addmm(attended, layer.attention_out), chosen)
        if self.routing is not None and chosen is not None:
            self.routing.step_BLK = torch.stack(chosen, dim=1).to(torch.int16)
        self._length += 1
        self.logits_BV = decoder.next_logits(hidden)

    def _next_rotary(self) -> tuple[Tensor, Tensor]:
        if self._row_positions_B1 is None:
            return self._cos[self._length], self._sin[self._length]
        cos, sin = self._cos[self._row_positions_B1], self._sin[self._row_positions_B1]
        self._row_positions_B1 = self._row_positions_B1 + 1
        return cos, sin

    def _attend(self, cache: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of one new token a row, (B, heads x D). Batched products beat the fused kernel on short queries."""
        keys, values = cache
        keys[..., self._length] = key
        values[:, :, self._length] = value
        used = self._length + 1
        rows, kv_heads, head_dim = key.shape
        keys_NDT = keys.view(rows * kv_heads, head_dim, -1)[:, :, :used]
        values_NTD = values.view(rows * kv_heads, -1, head_dim)[:, :used]
        scores = torch.bmm(query.reshape(rows * kv_heads, -1, head_dim), keys_NDT)
        if self._bias_B1T is not None:
            scores += self._bias_B1T[:, :, :used]
        probs = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
        return torch.bmm(probs, values_NTD).view(rows, -1)

    def keep(self, rows: Tensor) -> None:
        self._caches = [(keys.index_select(0, rows), values.index_select(0, rows)) for keys, values in self._caches]
        if self._bias_B1T is not None and self._row_positions_B1 is not None:
            kv_heads = self._decoder.num_kv_heads
            by_row = self._bias_B1T.view(-1, kv_heads, self._bias_B1T.shape[2])
            self._bias_B1T = by_row.index_select(0, rows).view(len(rows) * kv_heads, 1, -1)
            self._row_positions_B1 = self._row_positions_B1.index_select(0, rows)


def _attention_mask(prompts: PromptBatch) -> Tensor:
    """Bool (U, 1, P, P), True where attention is allowed. Padding attends to itself, so that no row is empty (NaN)."""
    length = prompts.ids_UP.shape[1]
    square = torch.ones(length, length, dtype=torch.bool, device=prompts.ids_UP.device)
    causal = square.tril() & prompts.valid_UP.unsqueeze(1)
    return (causal | torch.eye(length, dtype=torch.bool, device=square.device)).unsqueeze(1)


class ForwardDecoder:
    """Decoder for any causal language model, through its own forward and cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def refresh(self) -> None:
        """Nothing is copied from the model."""

    def open_session(
        self, prompts: PromptBatch, max_new_tokens: int, *, record_routing: bool = False
    ) -> DecodingSession:
        """Prefill the distinct prompts; the model's cache grows by itself."""
        return _ForwardSession(self._model, prompts, RouterControl.of(self._model) if record_routing else None)


class _ForwardSession:
    def __init__(self, model: Any, prompts: PromptBatch, routers: RouterControl | None) -> None:
        self._model = model
        self._routers = routers
        self.routing: RoutingRecord | None = None
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        rows = torch.arange(len(prompts.ids_UP), device=prompts.ids_UP.device).repeat_interleave(prompts.copies_U)
        self._mask_BT = prompts.valid_UP.long()
        self._cache: Any = None
        last_UV, chosen = self._forward(prompts.ids_UP, prompts.positions_UP())
        if chosen:
            routing_UPLK = prompt_routing(prompts.valid_UP, chosen)
            self.routing = RoutingRecord(routing_UPLK, routing_UPLK[:0, 0])
        self.keep(rows)
        self.logits_BV = last_UV.index_select(0, rows)

    def step(self, tokens_B: Tensor) -> None:
        positions_B1 = self._mask_BT.sum(1, keepdim=True)
        self._mask_BT = F.pad(self._mask_BT, (0, 1), value=1)
        self.logits_BV, chosen = self._forward(tokens_B.unsqueeze(1), positions_B1)
        if self.routing is not None:
            self.routing.step_BLK = torch.stack(chosen, dim=1).to(torch.int16)

    def keep(self, rows: Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._mask_BT = self._mask_BT.index_select(0, rows)

    def _forward(self, ids_BT: Tensor, positions_BT: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits of the last position, (B, V), and each layer's (B * T, K) experts if they are recorded."""
        with nullcontext() if self._routers is None else self._routers.recording() as trace:
            output = self._model(
                input_ids=ids_BT,
                attention_mask=self._mask_BT,
                position_ids=positions_BT,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: self._cache},
            )
        self._cache = output[self._cache_argument]
        chosen = [] if trace is None else [ids_TK for passes in trace.expert_ids_LTK for ids_TK in passes]
        return output.logits[:, -1].float(), chosen
