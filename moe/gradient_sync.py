"""Gradients of weights that several ranks hold: summed over the replicas, and their norm over the whole model.

The loss is divided by counts of the whole mini-batch, so that the gradient is a sum over ranks, never a mean. FSDP2 has
summed over the shards of a weight already, and the exchange of tokens over the ranks of an expert-parallel group.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe.experts import expert_modules
from moe.parallel import ParallelLayout

BUCKET_BYTES = 64 * 2**20
"""Gradients that are summed in one all-reduce: few calls, little memory besides the gradients."""


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a weight or gradient, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The weights of the experts, which an expert-parallel group divides."""
    return {parameter for module in expert_modules(model) for parameter in module.parameters()}


class GradientSync:
    """Sums and measures the gradients of `weights` (local tensors by name) over the ranks of `layout`."""

    def __init__(self, weights: Mapping[str, Tensor], expert_names: set[str], layout: ParallelLayout) -> None:
        self._layout = layout
        self._kinds = {
            is_expert: [weight for name, weight in weights.items() if (name in expert_names) == is_expert]
            for is_expert in (False, True)
        }

    def sum_replicas(self) -> None:
        """Make every rank's gradients those of the whole mini-batch, in place; a missing one counts as zeros."""
        for is_expert, weights in self._kinds.items():
            group = self._layout.groups(is_expert).replica_group
            if group is not None:
                for bucket in _buckets([_gradient(weight) for weight in weights]):
                    self._sum(bucket, group)

    def _sum(self, gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        with self._layout.collective("sum of gradients"):
            dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def scale(self, factor: float) -> None:
        """Multiply this rank's gradients, in place."""
        torch._foreach_mul_([_gradient(weight) for weights in self._kinds.values() for weight in weights], factor)

    def norm(self) -> float:
        """L2 norm over all distinct elements of the model, equal on all ranks."""
        device = next(weight.device for weights in self._kinds.values() for weight in weights)
        squares = torch.zeros((), dtype=torch.float64, device=device)
        for is_expert, weights in self._kinds.items():
            if self._layout.replica(is_expert)[0] == 0:
                for weight in weights:
                    squares += torch.linalg.vector_norm(_gradient(weight), dtype=torch.float64).square()
        return math.sqrt(float(self._layout.sum(squares, "norm of gradients")))


def _gradient(weight: Tensor) -> Tensor:
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive gradients of one dtype, up to BUCKET_BYTES together (a larger one alone)."""
    bucket: list[Tensor] = []
    size_bytes = 0
    for gradient in gradients:
        if bucket and (size_bytes + gradient.nbytes > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(gradient)
        size_bytes += gradient.nbytes
    if bucket:
        yield bucket
