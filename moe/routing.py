"""Control over the routers of a model: record, replay, pin, freeze and balance their choice of experts.

Layers L (those with experts), tokens T, experts E, K experts a token. Only the selection is ever replaced: the weights
stay the router's own for the given experts, with gradient (`moe.routing_rules`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe.dispatch.base import ExpertGroup
from moe.experts import expert_modules, get_dispatcher, repeating
from moe.families import experts_per_token
from moe.router_load import RouterTrace, router_modules
from moe.routing_rules import WeightsRule, weights_rule

_CONTROL_ATTRIBUTE = "moerl_router_control"
_BALANCE_BIAS = "e_score_correction_bias"


class RouterControl:
    """The one hook on each router of a model, and what it does at the moment; nothing until a context is entered."""

    def __init__(self, model: Any) -> None:
        self._top_k = experts_per_token(model.config)
        self._experts = expert_modules(model)
        self._hooks = [_RouterHook(router, self._top_k) for router in router_modules(model)]

    @classmethod
    def of(cls, model: Any) -> "RouterControl":
        """The control of `model`, made at the first call: a model has one. ValueError when it has no routers."""
        control: RouterControl | None = getattr(model, _CONTROL_ATTRIBUTE, None)
        if control is None:
            control = cls(model)
            object.__setattr__(model, _CONTROL_ATTRIBUTE, control)
        return control

    @property
    def num_layers(self) -> int:
        """L: layers with a router."""
        return len(self._hooks)

    @property
    def top_k(self) -> int:
        return self._top_k

    @property
    def num_experts(self) -> int:
        """E: experts that a router chooses from."""
        return int(self._experts[0].num_experts)

    def require_rules(self) -> None:
        """Raise ValueError, naming the class, unless the weights that each router gives to chosen experts are known."""
        for hook in self._hooks:
            hook.require_rule()

    @contextmanager
    def recording(self) -> Iterator[RouterTrace]:
        """Collect logits and experts of the forward passes inside the block; what is replayed counts as chosen."""
        trace = RouterTrace([[] for _ in self._hooks], [[] for _ in self._hooks])
        for layer, hook in enumerate(self._hooks):
            hook.record = (trace.logits_LTE[layer], trace.expert_ids_LTK[layer])
        try:
            yield trace
        finally:
            for hook in self._hooks:
                hook.record = None

    @contextmanager
    def replaying(self, passes: Sequence[Tensor]) -> Iterator[None]:
        """Send the tokens of the forward passes inside the block to the experts of `passes`, one tensor a pass.

        Each is integer (T, L, K) on the model's device; a row with a -1 is missing and leaves the token to the router.
        Raises ValueError for a router whose rule is not known, and when shapes or the number of passes do not fit.
        """
        for given in passes:
            if given.dim() != 3 or given.shape[1:] != (self.num_layers, self.top_k):
                raise ValueError(
                    f"routing to replay: shape {tuple(given.shape)} does not fit a model of {self.num_layers} layers "
                    f"with {self.top_k} experts a token; it was recorded from another model"
                )
        self.require_rules()
        for layer, hook in enumerate(self._hooks):
            hook.replay = [given[:, layer].long() for given in passes]
        try:
            yield
            if any(hook.replay for hook in self._hooks):
                raise ValueError(f"routing to replay: {len(passes)} passes were given and fewer were run")
        finally:
            for hook in self._hooks:
                hook.replay = None

    @contextmanager
    def skipping(self, passes: Sequence[Tensor]) -> Iterator[None]:
        """Send the tokens for which `passes`, one bool (T,) a forward pass inside the block, is True to no expert.

        They are padding, and tokens whose output nobody reads. The record still says what the router chose for them.
        Without a dispatcher of ours nothing is skipped: transformers' own experts know no masked routes.
        """
        for hook in self._hooks if get_dispatcher(self._experts[0]) else ():
            hook.skip = [skip_T.unsqueeze(1) for skip_T in passes]
        try:
            yield
        finally:
            for hook in self._hooks:
                hook.skip = None

    def pin_for_recompute(self, layer: int) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts of a checkpointed forward pass and of its recomputation, for `context_fn` of torch's checkpoint.

        The second one sends every token to the experts of the first, whatever the router would choose by then. Both run
        the same operations, as checkpointing requires.
        """
        hook, chosen = self._hooks[layer], list[Tensor]()
        hook.require_rule()
        return hook.pinning(chosen), self._repeating(layer, chosen)

    @contextmanager
    def _repeating(self, layer: int, chosen: list[Tensor]) -> Iterator[None]:
        with self._hooks[layer].repeating(chosen), repeating(self._experts[layer]):
            yield

    def recompute_blocks(self, model: nn.Module) -> None:
        """Have the backward pass compute each Mixture-of-Experts block of `model` again, exchanges included.

        The block is the module that holds the router. Its routing stays that of the forward pass. Raises ValueError for
        a router whose rule is not known.
        """
        self.require_rules()
        for layer, hook in enumerate(self._hooks):
            block = _parent(model, hook.router)
            # Set over the class's forward: hooks that others put on the block still run once.
            block.forward = partial(_checkpointed, block.forward, partial(self.pin_for_recompute, layer))


class _RouterHook:
    """What one router's forward hook does."""

    def __init__(self, router: Any, top_k: int) -> None:
        self.router = router
        self.record: tuple[list[Tensor], list[Tensor]] | None = None
        """Where logits and expert ids go."""
        self.replay: list[Tensor] | None = None
        """Experts of the passes to come, (T, K) int64 each."""
        self.skip: list[Tensor] | None = None
        """Which tokens of the passes to come go to no expert, (T, 1) bool each."""
        self._pinned: list[Tensor] | None = None
        self._repeated: list[Tensor] | None = None
        self._top_k = top_k
        self._rule: WeightsRule | None = None
        router.register_forward_hook(self)

    def require_rule(self) -> None:
        """As `RouterControl.require_rules`."""
        self._rule = weights_rule(self.router)

    def __call__(self, router: Any, _inputs: Any, output: Any) -> Any:
        if self._repeated is not None:
            return self._reroute(output[0], self._repeated[0])
        if self.replay is not None or self._pinned is not None:
            output = self._reroute(output[0], self._choose(output[-1]))
        if self.record is not None:
            logits_TE, ids_TK = self._logits_and_choice(output)
            self.record[0].append(logits_TE)
            self.record[1].append(ids_TK)
        if self.skip and isinstance(output, tuple) and not output[-1].is_floating_point():
            output = (*output[:-1], output[-1].masked_fill(self.skip.pop(0), -1))
        if self._pinned is not None:
            self._pinned.append(output[-1])
        return output

    def _choose(self, own_TK: Tensor) -> Tensor:
        ids_TK = own_TK
        if self.replay is not None:
            if not self.replay:
                raise ValueError("routing to replay: more passes were run than given")
            given_TK = self.replay.pop(0)
            if given_TK.shape != own_TK.shape:
                raise ValueError(f"routing to replay: {len(given_TK)} tokens given, the pass has {len(own_TK)}")
            ids_TK = torch.where((given_TK >= 0).all(dim=-1, keepdim=True), given_TK, own_TK)
        return ids_TK

    def _reroute(self, logits_TE: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self._rule is not None
        return logits_TE, self._rule(self.router, logits_TE, ids_TK.clamp(min=0)), ids_TK

    def _logits_and_choice(self, output: Any) -> tuple[Tensor, Tensor]:
        """A router that returns its choice (as integers, last) is believed; of another the top logits are taken."""
        if not isinstance(output, tuple):
            return output, output.detach().topk(self._top_k, dim=-1).indices
        if output[-1].is_floating_point():
            return output[0], output[0].detach().topk(self._top_k, dim=-1).indices
        return output[0], output[-1]

    @contextmanager
    def pinning(self, chosen: list[Tensor]) -> Iterator[None]:
        self._pinned = chosen
        try:
            yield
        finally:
            self._pinned = None

    @contextmanager
    def repeating(self, chosen: list[Tensor]) -> Iterator[None]:
        self._repeated = chosen
        try:
            yield
        finally:
            self._repeated = None


def _checkpointed(forward: Callable[..., Any], context_fn: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # No early stop: every rank then recomputes the same exchanges, however its rows differ from the others'.
    return checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn, early_stop=False, **kwargs)


def _parent(model: nn.Module, child: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if any(child is own for own in module.children()))


def freeze(model: Any) -> None:
    """Take the routers' parameters out of training."""
    for router in router_modules(model):
        router.requires_grad_(False)


def balance_biases(model: Any) -> list[Tensor]:
    """The float32 (E,) selection bias of each router; ValueError when the family publishes none."""
    biases = [getattr(router, _BALANCE_BIAS, None) for router in router_modules(model)]
    found = [bias for bias in biases if isinstance(bias, Tensor)]
    if len(found) < len(biases):
        raise ValueError(
            f"moe.bias_update_rate: family {model.config.model_type} has no balancing bias in its published layout, as "
            "deepseek_v3 has; set it to 0 and use moe.aux_loss_coefficient"
        )
    return found


@torch.no_grad()
def update_balance_bias(model: Any, counts_LE: Tensor, rate: float) -> None:
    """Auxiliary-loss-free balancing: bias += rate * sign(mean count - count), by expert and layer.

    `counts_LE` are the tokens that each expert got in the whole optimizer step, on all ranks (arXiv 2408.15664,
    algorithm 1). Raises ValueError when the family publishes no such bias.
    """
    for bias_E, counts_E in zip(balance_biases(model), counts_LE, strict=True):
        bias_E.add_(rate * torch.sign(counts_E.mean() - counts_E).to(bias_E))


def max_nodes_per_token(model: Any, group: ExpertGroup) -> int:
    """Most nodes that one token's copies go to: bounded by K and, in families with expert groups, by their limit.

    Such a family chooses `topk_group` of `n_group` groups of consecutive experts (DeepSeek-V3, arXiv 2412.19437,
    section 2.1.2, "Node-Limited Routing"). Raises ValueError when groups and nodes are not aligned: the limit would
    then not mean nodes.
    """
    router: Any = router_modules(model)[0]
    num_experts, num_groups = int(expert_modules(model)[0].num_experts), int(getattr(router, "num_group", 1) or 1)
    limit = min(experts_per_token(model.config), group.num_nodes)
    if num_groups == 1 or group.num_nodes == 1:
        return limit
    group_size, per_node = num_experts // num_groups, num_experts * group.ranks_per_node // group.size
    if group_size % per_node and per_node % group_size:
        raise ValueError(
            f"model.num_expert_groups = {num_groups}: groups of {group_size} experts do not align with nodes of "
            f"{per_node}; choose moe.expert_parallel_size so that one is a multiple of the other"
        )
    return min(limit, int(router.topk_group) * max(1, group_size // per_node))
