"""The policy update: one batch of scored responses becomes several optimizer steps, resumable between any two."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.advantages import GroupAdvantages, compute_advantages
from moe.batch import BatchCutter, MicroBatch, TrainingBatch, mini_batches
from moe.config import LossConfig, MoeConfig, OptimizerConfig, SamplingConfig, UpdateConfig
from moe.divergence import Diverged
from moe.forward import ResponseScorer, ResponseScores
from moe.losses import correction_weights, k3_kl, log_ratio, policy_loss, token_weights
from moe.optimizer import PolicyOptimizer
from moe.router_load import RouterLoad, balance_loss, measure_load
from moe.update_metrics import (
    BatchMetrics,
    StepMetrics,
    batch_statistics,
    mean_metrics,
    mismatch_metrics,
    throughput,
)

MISMATCH_ROWS = 128
"""Responses on which the sampler's log-probabilities are compared with the trainer's."""


class UpdateStopped(Exception):
    """`should_stop` asked to stop between optimizer steps; save the trainer's state, and continue from it later."""

    def __init__(self, steps_done: int) -> None:
        super().__init__(f"stopped after optimizer step {steps_done} of the batch")
        self.steps_done = steps_done


@dataclass(frozen=True, slots=True)
class _MiniBatch:
    """What one optimizer step needs; N are rows of the whole batch."""

    micro_batches: list[MicroBatch]
    num_tokens: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class _Targets:
    """What the ratio and the penalties are taken against: flat over response tokens, float32."""

    advantages_N: Tensor
    old_logprobs: Tensor
    weights: Tensor
    reference_logprobs: Tensor | None


class PolicyTrainer:
    """Trains `model` in place on batches of scored responses.

    State that survives an interruption: weights, optimizer moments, `global_step`, and the progress inside a batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        loss: LossConfig,
        optimizer: OptimizerConfig,
        update: UpdateConfig,
        moe: MoeConfig,
        sampling: SamplingConfig,
        reference_model: PreTrainedModel | None = None,
    ) -> None:
        """`sampling` tells the temperature, the nucleus and the longest response.

        `model` must be in float32, and `reference_model` on its device. A KL needs `reference_model`, but only to run a
        batch. Raises ValueError when the update has a single optimizer step.
        """
        if update.epochs * update.optimizer_steps_per_epoch < 2:
            raise ValueError(
                f"train.update.optimizer_steps_per_epoch = {update.optimizer_steps_per_epoch}: with one optimizer step "
                "a batch the ratio is 1 and the clip inert; use at least 2"
            )
        self.model = model
        self.global_step = 0
        self._loss, self._update, self._moe, self._sampling = loss, update, moe, sampling
        self._scorer = ResponseScorer(model, sampling.temperature)
        self._reference = None
        if reference_model is not None and loss.kl_coefficient > 0:
            self._reference = ResponseScorer(reference_model, sampling.temperature)
        self._optimizer = PolicyOptimizer(model, optimizer, "train.optimizer")
        self._pad_id = int(model.config.pad_token_id or 0)
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._batch_seed: int | None = None
        self._before: dict[str, float] = {}
        self._history: list[dict[str, float]] = []
        self._expert_load: list[list[float]] = []
        self._old_logprobs: Tensor | None = None

    @property
    def batch_step(self) -> int:
        """Optimizer steps already done in the batch that was interrupted; 0 when the next batch starts afresh."""
        return len(self._history)

    def run_batch(
        self,
        batch: TrainingBatch,
        seed: int,
        start_step: int,
        on_step: Callable[[StepMetrics], None],
        should_stop: Callable[[], bool],
    ) -> BatchMetrics:
        """Train on `batch`; `seed` decides the mini-batches, so give each iteration its own.

        Raises UpdateStopped between two optimizer steps when `should_stop()` says so (not after the last one);
        calling again with the same batch and seed and `start_step` = `batch_step` goes on exactly there. Raises
        ValueError when `start_step` or `seed` is not the interrupted batch's or a KL has no reference model, and
        Diverged when the loss, its gradient or a log-probability is not finite.
        """
        started = time.monotonic()
        if self._loss.kl_coefficient > 0 and self._reference is None:
            raise ValueError(
                f"train.loss.kl_coefficient = {self._loss.kl_coefficient} needs a reference model: give one or use 0"
            )
        self._check_resume(seed, start_step)
        self.model.train()
        cutter = BatchCutter(batch, self._pad_id, self.model.device)
        groups = compute_advantages(self._loss, batch.rewards_N, batch.reward_ok_N, batch.group_N)
        plan = [
            rows
            for epoch in range(self._update.epochs)
            for rows in mini_batches(batch.group_N, self._update.optimizer_steps_per_epoch, seed, epoch)
        ]
        if start_step == 0:
            self._begin(batch, cutter, plan[0], seed)
        targets = self._targets(batch, cutter, groups)
        for step in range(start_step, len(plan)):
            mini_batch = self._mini_batch(batch, cutter, plan[step], targets.advantages_N)
            values = self._optimizer_step(mini_batch, targets)
            self._history.append(values)
            on_step(StepMetrics(step=step + 1, num_steps=len(plan), global_step=self.global_step, values=values))
            if step + 1 < len(plan) and should_stop():
                raise UpdateStopped(step + 1)
        metrics = batch_statistics(batch, groups, self._sampling.max_new_tokens)
        metrics |= mean_metrics(self._history) | self._before | {"training/global_step": float(self.global_step)}
        expert_load = self._expert_load
        self._start_afresh()
        metrics |= throughput(batch, (len(plan) - start_step) / len(plan), started)
        return BatchMetrics(global_step=self.global_step, values=metrics, expert_load_LE=expert_load)

    def _check_resume(self, seed: int, start_step: int) -> None:
        if start_step != self.batch_step:
            raise ValueError(f"start_step {start_step}: the trainer's state is at step {self.batch_step} of the batch")
        if start_step and seed != self._batch_seed:
            raise ValueError(f"seed {seed}: the interrupted batch was started with seed {self._batch_seed}")

    def _begin(self, batch: TrainingBatch, cutter: BatchCutter, first_rows: Sequence[int], seed: int) -> None:
        """Measure the mismatch with the sampler and, where needed, freeze pi_old before any step is taken.

        A correction needs the trainer's own pi_old. So does `top_p` < 1: the sampler's log-probabilities are then of
        the nucleus alone, and a ratio of the whole vocabulary to them would be the nucleus's probability, not 1, at the
        first step.
        """
        self._batch_seed = seed
        rows = _usable(batch, first_rows)[:MISMATCH_ROWS].tolist()
        logprobs, seen = self._score_without_gradient(self._scorer, cutter, rows, batch)
        self._before = mismatch_metrics(logprobs[seen], batch.logprobs[seen])
        if self._loss.correction != "none" or self._sampling.top_p < 1.0:
            self._old_logprobs, _ = self._score_without_gradient(self._scorer, cutter, range(len(batch)), batch)

    @torch.no_grad()
    def _score_without_gradient(
        self, scorer: ResponseScorer, cutter: BatchCutter, rows: Sequence[int], batch: TrainingBatch
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of `rows`, flat over the batch's response tokens, and which of them were computed."""
        logprobs, seen = torch.zeros_like(batch.logprobs), torch.zeros_like(batch.logprobs, dtype=torch.bool)
        for micro in cutter.micro_batches(rows, self._update.micro_batch_tokens):
            mask_BR = micro.response_mask_BR
            flat = micro.flat_BR[mask_BR.cpu()]
            logprobs[flat] = scorer.score(micro).logprobs_BR[mask_BR].cpu()
            seen[flat] = True
        if not bool(torch.isfinite(logprobs).all()):
            raise Diverged(
                "model: log-probabilities are not finite; the weights diverged, go back to an earlier version and "
                "lower train.optimizer.learning_rate"
            )
        return logprobs, seen

    def _targets(self, batch: TrainingBatch, cutter: BatchCutter, groups: GroupAdvantages) -> _Targets:
        old = batch.logprobs if self._old_logprobs is None else self._old_logprobs
        reference = None
        if self._reference is not None:
            reference, _ = self._score_without_gradient(self._reference, cutter, range(len(batch)), batch)
        return _Targets(groups.advantages_N, old, correction_weights(self._loss, old, batch.logprobs), reference)

    def _mini_batch(
        self, batch: TrainingBatch, cutter: BatchCutter, rows: Sequence[int], advantages_N: Tensor
    ) -> _MiniBatch:
        """Counts cover all usable rows; the forward pass only those that can contribute to the gradient."""
        usable = _usable(batch, rows)
        penalties = self._loss.kl_coefficient + self._loss.entropy_coefficient + self._moe.aux_loss_coefficient
        contributing = usable if penalties > 0 else usable[advantages_N[usable] != 0]
        return _MiniBatch(
            micro_batches=list(cutter.micro_batches(contributing.tolist(), self._update.micro_batch_tokens)),
            num_tokens=int(batch.response_lens_N[usable].sum()),
            num_sequences=len(usable),
        )

    def _optimizer_step(self, mini_batch: _MiniBatch, targets: _Targets) -> dict[str, float]:
        """One step of AdamW; without a contributing response there is no gradient and the weights stay as they are."""
        learning_rate = self._optimizer.set_learning_rate(self.global_step)
        self.global_step += 1
        values = {"actor/lr": learning_rate, "actor/grad_norm": 0.0, "actor/pg_loss": 0.0}
        if not mini_batch.micro_batches:
            return values
        total = self._count_first(mini_batch)
        loads: list[RouterLoad] = []
        for micro in mini_batch.micro_batches:
            scores = self._scorer.score(micro, entropy_gradient=self._loss.entropy_coefficient > 0)
            own = measure_load(scores.trace, scores.token_weights_T)
            loads.append(own)
            objective, parts = self._objective(micro, scores, targets, mini_batch)
            if self._moe.aux_loss_coefficient > 0:
                balance = balance_loss(scores.trace, scores.token_weights_T, total or own)
                objective = objective + self._moe.aux_loss_coefficient * balance
                parts["actor/aux_loss"] = float(balance.detach())
            torch.autograd.backward(objective)
            for name, value in parts.items():
                values[name] = values.get(name, 0.0) + value
        values["actor/grad_norm"] = self._optimizer.step(values["actor/pg_loss"])
        load = sum(loads[1:], start=loads[0])
        self._expert_load = (load.counts_LE + torch.tensor(self._expert_load or 0.0, dtype=torch.float64)).tolist()
        return values | load.metrics()

    def _count_first(self, mini_batch: _MiniBatch) -> RouterLoad | None:
        """The balance loss needs the counts of all micro-batches before the first backward pass (None: of its own)."""
        if self._moe.aux_loss_coefficient == 0 or len(mini_batch.micro_batches) == 1:
            return None
        with torch.no_grad():
            scored = [self._scorer.score(micro) for micro in mini_batch.micro_batches]
        loads = [measure_load(scores.trace, scores.token_weights_T) for scores in scored]
        return sum(loads[1:], start=loads[0])

    def _objective(
        self, micro: MicroBatch, scores: ResponseScores, targets: _Targets, mini_batch: _MiniBatch
    ) -> tuple[Tensor, dict[str, float]]:
        """This micro-batch's share of the mini-batch's loss, and its shares of the metrics."""
        mask_BR, device = micro.response_mask_BR, scores.logprobs_BR.device

        def rows_of(flat: Tensor) -> Tensor:
            return flat[micro.flat_BR].to(device)

        old_BR = rows_of(targets.old_logprobs)
        logprobs_BR = torch.where(mask_BR, scores.logprobs_BR, old_BR)
        advantages_B = targets.advantages_N[micro.rows_B].to(device)
        tokens = policy_loss(self._loss, logprobs_BR, old_BR, advantages_B, mask_BR)
        weights_BR = token_weights(
            self._loss, mask_BR, mini_batch.num_tokens, mini_batch.num_sequences, self._sampling.max_new_tokens
        )
        pg_loss = (tokens.loss_BT * rows_of(targets.weights) * weights_BR).sum()
        entropy = (scores.entropy_BR * weights_BR).sum()
        objective = pg_loss - self._loss.entropy_coefficient * entropy
        mean_BR = mask_BR / sum(int(other.response_mask_BR.sum()) for other in mini_batch.micro_batches)
        sums = {
            "actor/pg_loss": pg_loss,
            "actor/ppo_kl": -(log_ratio(logprobs_BR, old_BR) * mean_BR).sum(),
            "actor/pg_clipfrac": (tokens.clipped_BT * mean_BR).sum(),
            "actor/pg_clipfrac_lower": (tokens.dual_clipped_BT * mean_BR).sum(),
            "actor/entropy": (scores.entropy_BR * mean_BR).sum(),
        }
        if targets.reference_logprobs is not None:
            kl = (k3_kl(logprobs_BR, rows_of(targets.reference_logprobs)) * weights_BR).sum()
            objective = objective + self._loss.kl_coefficient * kl
            sums["actor/kl_loss"] = kl
        stacked = torch.stack([value.detach() for value in sums.values()]).tolist()
        return objective, dict(zip(sums, stacked, strict=True))

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that training continues from: `model.NAME`, `optimizer.NAME.MOMENT`, and pi_old inside a batch."""
        tensors = {f"model.{name}": tensor for name, tensor in _distinct(self.model.state_dict()).items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self._optimizer.state_tensors().items()}
        if self._old_logprobs is not None:
            tensors["batch.old_logprobs"] = self._old_logprobs
        return tensors

    def progress(self) -> dict[str, Any]:
        """The rest of the state, as JSON values: `global_step`, and the position inside a batch with its metrics."""
        return {
            "global_step": self.global_step,
            "batch_seed": self._batch_seed,
            "batch_before": self._before,
            "batch_history": self._history,
            "batch_expert_load": self._expert_load,
        }

    def load_state(self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
        """Restore what `state_tensors` and `progress` returned.

        Raises ValueError naming the first tensor or key that does not fit; the trainer must then not be used.
        """
        own = _distinct(self.model.state_dict())
        given = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        if different := sorted(own.keys() ^ given.keys()):
            raise ValueError(
                f"trainer state: tensor model.{different[0]} is missing or unknown; it is of another model"
            )
        for name, tensor in own.items():
            if (tensor.shape, tensor.dtype) != (given[name].shape, given[name].dtype):
                raise ValueError(
                    f"trainer state: tensor model.{name} has another shape or dtype; it is of another model"
                )
        if missing := self.progress().keys() - progress.keys():
            raise ValueError(f"trainer state: key {min(missing)} is missing; the checkpoint is of another version")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(given[name])
        moments = {n.removeprefix("optimizer."): t for n, t in tensors.items() if n.startswith("optimizer.")}
        self._optimizer.load_state(moments)
        self.global_step = int(progress["global_step"])
        self._batch_seed = progress["batch_seed"]
        self._before = dict(progress["batch_before"])
        self._history = [dict(values) for values in progress["batch_history"]]
        self._expert_load = [list(layer) for layer in progress["batch_expert_load"]]
        self._old_logprobs = tensors.get("batch.old_logprobs")


def _usable(batch: TrainingBatch, rows: Sequence[int]) -> Tensor:
    """Those of `rows` that have a usable reward, int64."""
    rows_M = torch.tensor(rows, dtype=torch.long)
    return rows_M[batch.reward_ok_N[rows_M]]


def _distinct(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state dict, each shared one (tied weights) once."""
    first = {state[name].data_ptr(): name for name in reversed(list(state))}
    return {name: tensor for name, tensor in state.items() if first[tensor.data_ptr()] == name}
