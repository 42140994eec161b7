"""What a model weighs, as plain numbers: importable without torch. `moe.model_size` counts them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of one model; numbers of parameters count elements, whatever their dtype."""

    family: str
    num_layers: int
    num_moe_layers: int
    hidden_size: int
    vocab_size: int
    num_experts: int
    top_k: int
    expert_width: int
    """Hidden units of one expert."""
    query_width: int
    """Attention heads times their size."""
    key_value_values: int
    """Numbers that one token keeps in the cache, over all layers."""
    total_parameters: int
    expert_parameters: int
    """Of all routed experts; the rest is attention, routers, norms, shared experts and embeddings."""
    embedding_parameters: int
    """Rows that a token looks up; no multiplication is done with them."""
    largest_layer_parameters: int
    """Of the decoder layer with the most weights besides its routed experts."""

    @property
    def dense_parameters(self) -> int:
        return self.total_parameters - self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Weights that one token meets in a multiplication."""
        used = self.expert_parameters * self.top_k // self.num_experts
        return self.dense_parameters - self.embedding_parameters + used
