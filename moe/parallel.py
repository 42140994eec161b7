"""Which rank holds which weights: expert-parallel groups, FSDP2 shards and their replicas over the ranks of one world.

Rank r is ((replica * efsdp) + shard) * ep + expert rank for the experts, and replica * fsdp + shard for all other
weights: the sparse and the dense mesh of torchtitan's expert parallelism. FSDP2 runs on the shards alone; gradients of
replicas are summed by `moe.gradient_sync`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from moe.config import MoeConfig, UpdateConfig, layout_problems
from moe.dispatch.base import ExpertGroup
from moe.dispatch.monitor import ExchangeMonitor
from moe.experts import expert_modules, set_recompute
from moe.model import attach_dispatcher
from moe.placement import EXPERT_SLICE_ATTRIBUTE, ExpertSlice
from moe.routing import RouterControl, freeze, max_nodes_per_token

_untyped: Any = dist


@dataclass(frozen=True, kw_only=True)
class WeightGroups:
    """Where this rank is among those that hold one kind of weights (the experts', or all others)."""

    shard_group: dist.ProcessGroup | None = None
    """The ranks over which FSDP2 shards these weights; None: they are not sharded."""
    replica_group: dist.ProcessGroup | None = None
    """The ranks that hold the same elements; None: there is one."""
    replica: int = 0
    replicas: int = 1


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """This rank's place among the ranks that train together; `single()` is a process without torch.distributed."""

    rank: int = 0
    ranks: int = 1
    ep_size: int = 1
    fsdp_size: int = 1
    ranks_per_node: int = 1
    world: dist.ProcessGroup | None = None
    """All ranks; None: this process alone."""
    expert_group: ExpertGroup = field(default_factory=lambda: ExpertGroup(monitor=ExchangeMonitor()))
    dense: WeightGroups = field(default_factory=WeightGroups)
    experts: WeightGroups = field(default_factory=WeightGroups)

    @classmethod
    def single(cls) -> "ParallelLayout":
        return cls()

    @classmethod
    def create(cls, ranks: int, moe: MoeConfig, fsdp_size: int, ranks_per_node: int) -> "ParallelLayout":
        """The groups of all `ranks` of the initialised world; every rank calls it, with equal arguments.

        `fsdp_size` 0 means all ranks. Raises ValueError of one line when the sizes do not fit together.
        """
        if dist.get_world_size() != ranks:
            raise ValueError(f"train.ranks = {ranks}: {dist.get_world_size()} processes were started")
        for problem in layout_problems(ranks, moe, fsdp_size):
            raise ValueError(problem)
        rank, timeout = dist.get_rank(), timedelta(seconds=moe.exchange_timeout_s)
        ep, fsdp = moe.expert_ranks(ranks), fsdp_size or ranks
        if ranks > ranks_per_node and ranks_per_node % ep and ep % ranks_per_node:
            raise ValueError(
                f"moe.expert_parallel_size = {ep}: must be a multiple or divisor of a node's {ranks_per_node} ranks"
            )
        expert_ranks = _grid_rows(ranks, ep)
        expert_process_group = _own_group(expert_ranks, timeout)
        monitor = ExchangeMonitor()
        return cls(
            rank=rank,
            ranks=ranks,
            ep_size=ep,
            fsdp_size=fsdp,
            ranks_per_node=ranks_per_node,
            world=_own_group([list(range(ranks))], timeout),
            expert_group=ExpertGroup(
                process_group=expert_process_group,
                rank=rank % ep,
                size=ep,
                ranks_per_node=ranks_per_node,
                monitor=monitor,
            ),
            dense=_weight_groups(rank, ranks, fsdp, 1, timeout),
            experts=_weight_groups(rank, ranks, max(1, fsdp // ep), ep, timeout),
        )

    def groups(self, is_expert: bool) -> WeightGroups:
        return self.experts if is_expert else self.dense

    def replica(self, is_expert: bool) -> tuple[int, int]:
        """Number of this rank, and count, among the ranks that hold the same elements of such a weight."""
        groups = self.groups(is_expert)
        return groups.replica, groups.replicas

    def sum(self, tensor: Tensor, phase: str) -> Tensor:
        """The sum of `tensor` over all ranks, equal on each, on the tensor's device; `phase` is for messages."""
        return self._reduce(tensor, dist.ReduceOp.SUM, phase)

    def max(self, tensor: Tensor, phase: str) -> Tensor:
        """The elementwise maximum of `tensor` over all ranks."""
        return self._reduce(tensor, dist.ReduceOp.MAX, phase)

    def _reduce(self, tensor: Tensor, operation: Any, phase: str) -> Tensor:
        if self.world is None:
            return tensor
        reduced = tensor.to(device_of(self.world), copy=True)
        with self.collective(phase):
            dist.all_reduce(reduced, operation, group=self.world)
        return reduced.to(tensor.device)

    @contextmanager
    def collective(self, phase: str) -> Iterator[None]:
        """One collective of all ranks: a failure says the optimizer step and `phase`, and who is gone."""
        monitor = self.expert_group.monitor
        monitor.place = f"optimizer step {monitor.step}, {phase}"
        with self.explaining(phase):
            yield
        monitor.place = ""

    @contextmanager
    def explaining(self, phase: str) -> Iterator[None]:
        """Work with collectives in it, as FSDP2's: their failure becomes ExchangeFailed, other errors stay."""
        monitor = self.expert_group.monitor
        try:
            yield
        except RuntimeError as error:
            if monitor.explain is None:
                raise
            explained = monitor.explain(error, f"optimizer step {monitor.step}, {phase}")
            if explained is error:
                raise
            raise explained from error


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device whose tensors `group` exchanges: the GPU when it has a backend for that beside the CPU's."""
    # gloo too claims to serve GPU tensors, by way of the CPU.
    on_gpu = "cuda:nccl" in dist.get_backend_config(group)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _grid_rows(ranks: int, size: int) -> list[list[int]]:
    """Consecutive ranks, `size` at a time."""
    return [list(range(first, first + size)) for first in range(0, ranks, size)]


def _weight_groups(rank: int, ranks: int, shards: int, experts: int, timeout: timedelta) -> WeightGroups:
    """Groups of weights that are split over `experts` (dispatcher) times `shards` (FSDP2) ranks and then replicated."""
    block = experts * shards
    shard_ranks = [
        [first + e + s * experts for s in range(shards)] for first in range(0, ranks, block) for e in range(experts)
    ]
    replica_ranks = [list(range(place, ranks, block)) for place in range(block)]
    return WeightGroups(
        shard_group=_own_group(shard_ranks, timeout),
        replica_group=_own_group(replica_ranks, timeout),
        replica=rank // block,
        replicas=ranks // block,
    )


def _own_group(partition: Sequence[Sequence[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """The group of `partition` that this rank is in; None for groups of one."""
    if len(partition[0]) == 1:
        return None
    own: dist.ProcessGroup = _untyped.new_subgroups_by_enumeration([list(r) for r in partition], timeout=timeout)[0]
    return own


def parallelize(model: PreTrainedModel, moe: MoeConfig, update: UpdateConfig, layout: ParallelLayout) -> None:
    """Keep this rank's part of `model`, in place, and make it train as `moe` and `update` say.

    Every rank gives the whole model, which may lie on the meta device. To compute in bfloat16 a process without
    torch.distributed becomes a world of its own. Raises ValueError of one line when the experts can't be divided or the
    dispatcher refuses the model's shape.
    """
    experts = expert_modules(model)
    for problem in layout_problems(layout.ranks, moe, layout.fsdp_size, experts[0].num_experts if experts else None):
        raise ValueError(problem)
    if layout.ep_size > 1:
        for module in experts:
            _keep_own_experts(module, layout.expert_group)
    bfloat16 = update.compute_dtype == "bfloat16"
    attach_dispatcher(model, moe, layout.expert_group, torch.bfloat16 if bfloat16 else None)
    max_nodes_per_token(model, layout.expert_group)
    if moe.freeze_router:
        freeze(model)
    for module in experts:
        set_recompute(module, update.recompute == "experts")
    if update.recompute == "moe":
        RouterControl.of(model).recompute_blocks(model)
    if layout.fsdp_size > 1 or bfloat16:
        _shard(model, experts, bfloat16, layout)


def _keep_own_experts(experts: Any, group: ExpertGroup) -> None:
    """Slice the fused parameters; `num_experts` stays that of the whole group, as the router numbers them."""
    count = experts.num_experts // group.size
    first = group.rank * count
    for name, parameter in list(experts.named_parameters(recurse=False)):
        own = parameter.detach()[first : first + count].clone()
        setattr(experts, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
    setattr(experts, EXPERT_SLICE_ATTRIBUTE, ExpertSlice(first, count, experts.num_experts))


def _shard(model: Any, experts: Sequence[Any], bfloat16: bool, layout: ParallelLayout) -> None:
    """FSDP2 over each decoder layer and the rest; over the experts where they are sharded further.

    In a group of one rank it only casts: weights stay in float32, and forward and backward run in the compute dtype.
    """
    inner = outer = MixedPrecisionPolicy()
    if bfloat16:
        inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        outer = replace(inner, output_dtype=torch.float32)
    ignored: set[nn.Parameter] = set()
    if layout.experts.shard_group is None:
        # The experts function casts their weights to the dtype of the rows itself.
        ignored = {parameter for module in experts for parameter in module.parameters()}
    else:
        mesh = _mesh(layout.experts.shard_group)
        for module in experts:
            fully_shard(module, mesh=mesh, mp_policy=inner, shard_placement_fn=partial(_placement, shards=mesh.size()))
    mesh = _mesh(layout.dense.shard_group or _group_of_one(layout))
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=inner, ignored_params=ignored)
    fully_shard(model, mesh=mesh, mp_policy=outer, ignored_params=ignored, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by global counts already: gradients are summed.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # A rank whose experts got no row still takes part in the reduction of their gradients.
    model.set_reduce_scatter_unused_params(True)


def _placement(weight: nn.Parameter, shards: int) -> Shard | None:
    """Shards of an experts' weight: whole experts (None), or where there are fewer than shards a part of each.

    FSDP2 divides only the first dimension unevenly.
    """
    is_divided = len(weight) < shards and weight.dim() > 1 and weight.shape[1] % shards == 0
    return Shard(1) if is_divided else None


def _mesh(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_of(group).type)


def _group_of_one(layout: ParallelLayout) -> dist.ProcessGroup:
    """FSDP2 wants a process group even to cast only."""
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=_untyped.HashStore(), rank=0, world_size=1)
    own: dist.ProcessGroup = _untyped.new_subgroups_by_enumeration([[rank] for rank in range(layout.ranks)])[0]
    return own
