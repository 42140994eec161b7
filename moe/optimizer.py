"""AdamW with a linear warm-up and gradient clipping, and its state as plain tensors."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moe.config import OptimizerConfig
from moe.divergence import Diverged

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class PolicyOptimizer:
    """AdamW over all trainable parameters of `model`."""

    def __init__(self, model: nn.Module, cfg: OptimizerConfig, section: str) -> None:
        """`section` is where the configuration has `cfg`, for messages: "train.optimizer" or "warmup.optimizer".

        Raises ValueError for weights of less than float32: a usual step is smaller than half the gap between two
        bfloat16 values and would round to nothing.
        """
        self._cfg, self._section = cfg, section
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, parameter in self._parameters.items():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"weight {name} is {parameter.dtype}: load the model with dtype float32 to train it")
        # One fused pass is about three times faster than foreach, on CPU too.
        self._adamw = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=cfg.learning_rate,
            betas=cfg.betas,
            eps=cfg.epsilon,
            weight_decay=cfg.weight_decay,
            fused=True,
        )

    def set_learning_rate(self, steps_done: int) -> float:
        """Learning rate of the step after `steps_done` steps: linear up to the configured one over the warm-up."""
        factor = min(1.0, (steps_done + 1) / self._cfg.warmup_steps) if self._cfg.warmup_steps else 1.0
        self._adamw.param_groups[0]["lr"] = self._cfg.learning_rate * factor
        return self._cfg.learning_rate * factor

    def step(self, loss: float) -> float:
        """Clip the accumulated gradients, apply and clear them; returns their norm before clipping.

        Raises Diverged when `loss`, whose gradients they are, or the norm is not finite (clamps can hide the one from
        the other); the weights are then untouched.
        """
        norm = float(nn.utils.clip_grad_norm_(self._parameters.values(), self._cfg.max_grad_norm))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._adamw.zero_grad(set_to_none=True)
            raise Diverged(
                f"{self._section}.learning_rate = {self._cfg.learning_rate}: the loss became {loss} and its gradient's "
                f"norm {norm}; lower it"
            )
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return norm

    def state_tensors(self) -> dict[str, Tensor]:
        """`NAME.step`, `NAME.exp_avg`, `NAME.exp_avg_sq` of each parameter that was ever updated."""
        return {
            f"{name}.{moment}": self._adamw.state[parameter][moment]
            for name, parameter in self._parameters.items()
            if parameter in self._adamw.state
            for moment in _MOMENTS
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` returned; raises ValueError naming a tensor that does not fit."""
        names = {f"{name}.{moment}" for name in self._parameters for moment in _MOMENTS}
        if unknown := sorted(tensors.keys() - names):
            raise ValueError(f"optimizer state: unknown tensor {unknown[0]}; the checkpoint is of another model")
        self._adamw.state.clear()
        for name, parameter in self._parameters.items():
            present = {moment: tensors[f"{name}.{moment}"] for moment in _MOMENTS if f"{name}.{moment}" in tensors}
            if not present:
                continue
            if len(present) != len(_MOMENTS) or present["exp_avg"].shape != parameter.shape:
                raise ValueError(
                    f"optimizer state: {name} is incomplete or misshapen; the checkpoint is of another model"
                )
            self._adamw.state[parameter] = {
                moment: tensor.detach().clone().to(parameter.device) for moment, tensor in present.items()
            }
