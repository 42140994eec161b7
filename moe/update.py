"""The policy update: one batch of scored responses becomes several optimizer steps, resumable between any two."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.advantages import GroupAdvantages, compute_advantages
from moe.batch import BatchCutter, TrainingBatch, mini_batches
from moe.config import LossConfig, MoeConfig, OptimizerConfig, SamplingConfig, UpdateConfig
from moe.dispatch.monitor import LayerExchange
from moe.experts import expert_modules, get_dispatcher
from moe.forward import ResponseScorer, ResponseScores
from moe.losses import correction_weights
from moe.optimizer import PolicyOptimizer
from moe.parallel import ParallelLayout
from moe.placement import Piece, expert_slices
from moe.router_load import RouterLoad, balance_loss, measure_load
from moe.router_metrics import (
    ExchangeTotals,
    add_exchanges,
    layer_metrics,
    step_metrics,
    sum_loads,
    without_wall_clock,
)
from moe.routing import RouterControl, balance_biases, update_balance_bias
from moe.routing_replay import RoutingRows, micro_routing
from moe.update_metrics import (
    BatchMetrics,
    StepMetrics,
    batch_statistics,
    mean_metrics,
    mismatch_metrics,
    throughput,
)
from moe.update_objective import MiniBatch, Targets, objective
from moe.update_shares import BatchShares, Pass, agree_to_stop
from moe.update_state import check_names, model_pieces, replicated_piece

MISMATCH_ROWS = 128
"""Responses on which the sampler's log-probabilities are compared with the trainer's."""


_OLD_LOGPROBS, _PROMPT_ROUTING, _RESPONSE_ROUTING = (
    "batch.old_logprobs",
    "batch.routing.prompt",
    "batch.routing.response",
)


class UpdateStopped(Exception):
    """`should_stop` asked to stop between optimizer steps; save the trainer's state, and continue from it later."""

    def __init__(self, steps_done: int) -> None:
        super().__init__(f"stopped after optimizer step {steps_done} of the batch")
        self.steps_done = steps_done


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
        layout: ParallelLayout | None = None,
    ) -> None:
        """`sampling` tells the temperature, the nucleus and the longest response.

        `model` must be in float32, and `reference_model` on its device; with a `layout` both were given to
        `parallelize`, and every rank makes the same calls. A KL needs `reference_model`, but only to run a batch.
        Raises ValueError when the update has a single optimizer step, the model has no bias for
        `moe.bias_update_rate`, or `moe.routing_replay` is not known for its routers.
        """
        if update.epochs * update.optimizer_steps_per_epoch < 2:
            raise ValueError(
                f"train.update.optimizer_steps_per_epoch = {update.optimizer_steps_per_epoch}: with one optimizer step "
                "a batch the ratio is 1 and the clip inert; use at least 2"
            )
        if moe.bias_update_rate > 0:
            balance_biases(model)
        if moe.routing_replay != "none":
            RouterControl.of(model).require_rules()
        self.model = model
        self.layout = layout or ParallelLayout.single()
        self.global_step = 0
        self.exchanged = LayerExchange()
        """Sums over the layers and steps that this trainer did, of this rank alone."""
        self._loss, self._update, self._moe, self._sampling = loss, update, moe, sampling
        # Ranks wait for each other in every pass: none may leave one out.
        two_passes = self.layout.ranks > 1
        self._scorer = ResponseScorer(model, sampling.temperature, two_passes=two_passes)
        self._reference = None
        if reference_model is not None and loss.kl_coefficient > 0:
            self._reference = ResponseScorer(reference_model, sampling.temperature, two_passes=two_passes)
        self._optimizer = PolicyOptimizer(model, optimizer, "train.optimizer", self.layout)
        self._pad_id = int(model.config.pad_token_id or 0)
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._batch_seed: int | None = None
        self._before: dict[str, float] = {}
        self._history: list[dict[str, float]] = []
        self._router_steps: list[dict[str, Any]] = []
        self._expert_load: list[list[float]] = []
        self._old_logprobs: Tensor | None = None
        self._routing: RoutingRows | None = None

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

        Every rank gives the whole batch and gets the metrics of all ranks. Raises UpdateStopped between two optimizer
        steps when `should_stop()` says so on any rank (not after the last one); calling again with the same batch and
        seed and `start_step` = `batch_step` goes on exactly there. Raises ValueError when `start_step` or `seed` is not
        the interrupted batch's, a KL has no reference model, or the batch lacks the routing to replay, and Diverged
        when the loss, its gradient or a log-probability is not finite.
        """
        started = time.monotonic()
        if self._loss.kl_coefficient > 0 and self._reference is None:
            raise ValueError(
                f"train.loss.kl_coefficient = {self._loss.kl_coefficient} needs a reference model: give one or use 0"
            )
        self._check_resume(seed, start_step)
        self.model.train()
        cutter = BatchCutter(batch, self._pad_id, self.model.device)
        shares = BatchShares(batch, cutter, self._update.micro_batch_tokens, self.layout)
        groups = compute_advantages(self._loss, batch.rewards_N, batch.reward_ok_N, batch.group_N)
        plan = [
            rows
            for epoch in range(self._update.epochs)
            for rows in mini_batches(batch.group_N, self._update.optimizer_steps_per_epoch, seed, epoch)
        ]
        if self._moe.routing_replay == "sampler":
            self._routing = self._sampler_routing(batch)
        if start_step == 0:
            self._begin(shares, plan[0], seed)
        targets = self._targets(shares, groups)
        for step in range(start_step, len(plan)):
            mini_batch = self._mini_batch(shares, plan[step], targets.advantages_N)
            values = self._optimizer_step(mini_batch, targets)
            self._history.append(values)
            on_step(StepMetrics(step=step + 1, num_steps=len(plan), global_step=self.global_step, values=values))
            if step + 1 < len(plan) and agree_to_stop(should_stop, self.layout):
                raise UpdateStopped(step + 1)
        metrics = batch_statistics(batch, groups, self._sampling.max_new_tokens)
        metrics |= mean_metrics(self._history) | self._before | {"training/global_step": float(self.global_step)}
        metrics |= throughput(batch, (len(plan) - start_step) / len(plan), started)
        result = BatchMetrics(
            global_step=self.global_step,
            values=metrics,
            expert_load_LE=self._expert_load,
            router_steps=self._router_steps,
        )
        self._start_afresh()
        return result

    def _check_resume(self, seed: int, start_step: int) -> None:
        if start_step != self.batch_step:
            raise ValueError(f"start_step {start_step}: the trainer's state is at step {self.batch_step} of the batch")
        if start_step and seed != self._batch_seed:
            raise ValueError(f"seed {seed}: the interrupted batch was started with seed {self._batch_seed}")

    def _sampler_routing(self, batch: TrainingBatch) -> RoutingRows:
        rows = RoutingRows.of_batch(batch)
        if rows is None:
            raise ValueError(
                'moe.routing_replay = "sampler": the batch carries no routing; sample with an engine that records it'
            )
        control = RouterControl.of(self.model)
        rows.check(control.num_layers, control.top_k, control.num_experts)
        return rows

    def _begin(self, shares: BatchShares, first_rows: Sequence[int], seed: int) -> None:
        """Measure the mismatch with the sampler and, where needed, freeze pi_old and the routing before any step.

        A correction needs the trainer's own pi_old. So does `top_p` < 1: the sampler's log-probabilities are then of
        the nucleus alone, and a ratio of the whole vocabulary to them would be the nucleus's probability, not 1, at the
        first step.
        """
        self._batch_seed = seed
        batch, everything = shares.batch, range(len(shares.batch))
        rows = _usable(batch, first_rows)[:MISMATCH_ROWS].tolist()
        logprobs, seen = shares.score(self._scorer, rows, self._routing)
        self._before = mismatch_metrics(logprobs[seen], batch.logprobs[seen])
        needs_old = self._loss.correction != "none" or self._sampling.top_p < 1.0
        recorded = None
        if self._moe.routing_replay == "trainer":
            control = RouterControl.of(self.model)
            recorded = RoutingRows.missing(batch, control.num_layers, control.top_k)
        if needs_old or recorded is not None:
            old_logprobs, _ = shares.score(self._scorer, everything, self._routing, recorded)
            self._old_logprobs = old_logprobs if needs_old else None
        self._routing = self._routing or recorded
        if self._routing is not None:
            self._before["moe/replayed_share"] = self._routing.coverage(batch.response_lens_N)

    def _targets(self, shares: BatchShares, groups: GroupAdvantages) -> Targets:
        sampled = shares.batch.logprobs
        old = sampled if self._old_logprobs is None else self._old_logprobs
        reference = None
        if self._reference is not None:
            reference, _ = shares.score(self._reference, range(len(shares.batch)))
        return Targets(groups.advantages_N, old, correction_weights(self._loss, old, sampled), reference)

    def _mini_batch(self, shares: BatchShares, rows: Sequence[int], advantages_N: Tensor) -> MiniBatch:
        """Counts cover all usable rows; the forward pass only those that can contribute to the gradient."""
        lens_N, usable = shares.batch.sampled_lens_N, _usable(shares.batch, rows)
        penalties = self._loss.kl_coefficient + self._loss.entropy_coefficient + self._moe.aux_loss_coefficient
        contributing = usable if penalties > 0 else usable[advantages_N[usable] != 0]
        return MiniBatch(
            passes=shares.passes(contributing.tolist()),
            num_tokens=int(lens_N[usable].sum()),
            num_sequences=len(usable),
            num_scored_tokens=int(lens_N[contributing].sum()),
        )

    def _optimizer_step(self, mini_batch: MiniBatch, targets: Targets) -> dict[str, float]:
        """One step of AdamW; without a contributing response there is no gradient and the weights stay as they are."""
        learning_rate = self._optimizer.set_learning_rate(self.global_step)
        self.global_step += 1
        values = {"actor/lr": learning_rate, "actor/grad_norm": 0.0, "actor/pg_loss": 0.0}
        if not mini_batch.passes:
            return values
        started_s = time.perf_counter()
        self.layout.expert_group.monitor.step = self.global_step
        self._take_exchanges()  # those before this step
        with self.layout.explaining("forward and backward passes"):
            sums, load = self._accumulate_gradients(mini_batch, targets)
        values |= self._sum_over_ranks(sums)
        values["actor/grad_norm"] = self._optimizer.step(values["actor/pg_loss"])
        load = sum_loads(load, self.layout)
        if self._moe.bias_update_rate > 0:
            update_balance_bias(self.model, load.counts_LE, self._moe.bias_update_rate)
        self._expert_load = (load.counts_LE + torch.tensor(self._expert_load or 0.0, dtype=torch.float64)).tolist()
        step_s = time.perf_counter() - started_s
        exchanges = ExchangeTotals.over_ranks(self._take_exchanges(), len(load.counts_LE), step_s, self.layout)
        layers = layer_metrics(load, exchanges, self.layout)
        self._router_steps.append({"step": self.batch_step + 1, "layers": layers})
        return values | load.metrics() | step_metrics(layers)

    def _take_exchanges(self) -> dict[int, LayerExchange]:
        layers = self.layout.expert_group.monitor.take()
        add_exchanges(self.exchanged, layers.values())
        return layers

    def _accumulate_gradients(self, mini_batch: MiniBatch, targets: Targets) -> tuple[dict[str, float], RouterLoad]:
        """Backward of this rank's passes; returns its shares of the metrics, and its routers' load."""
        values: dict[str, float] = {}
        loads: list[RouterLoad] = []
        total = self._count_first(mini_batch)
        for own in mini_batch.passes:
            scores = self._score(own, entropy_gradient=self._loss.entropy_coefficient > 0)
            weights_T = own.token_weights_T(scores)
            loads.append(measure_load(scores.trace, weights_T))
            loss, parts = objective(self._loss, self._sampling, own.micro, scores, targets, mini_batch)
            if self._moe.aux_loss_coefficient > 0:
                balance = balance_loss(scores.trace, weights_T, total or sum_loads(loads[0], self.layout))
                loss = loss + self._moe.aux_loss_coefficient * balance
                parts["actor/aux_loss"] = float(balance.detach())
            torch.autograd.backward(loss)
            for name, value in parts.items():
                values[name] = values.get(name, 0.0) + value
        return values, sum(loads[1:], start=loads[0])

    def _score(self, own: Pass, *, entropy_gradient: bool = False) -> ResponseScores:
        routing = None if self._routing is None else micro_routing(self._routing, own.micro)
        return self._scorer.score(own.micro, entropy_gradient=entropy_gradient, routing=routing)

    def _count_first(self, mini_batch: MiniBatch) -> RouterLoad | None:
        """The balance loss needs the counts of all passes before the first backward pass (None: of the only one)."""
        if self._moe.aux_loss_coefficient == 0 or len(mini_batch.passes) == 1:
            return None
        with torch.no_grad(), self.layout.expert_group.monitor.repeating():
            scored = [(own, self._score(own)) for own in mini_batch.passes]
        loads = [measure_load(scores.trace, own.token_weights_T(scores)) for own, scores in scored]
        return sum_loads(sum(loads[1:], start=loads[0]), self.layout)

    def _sum_over_ranks(self, values: dict[str, float]) -> dict[str, float]:
        summed = self.layout.sum(torch.tensor(list(values.values()), dtype=torch.float64), "metrics")
        return dict(zip(values, summed.tolist(), strict=True))

    def close(self) -> None:
        """Give back what the dispatchers hold; all ranks call it, after the last batch and before they part."""
        with self.layout.explaining("release of the dispatchers"):
            for scorer in (self._scorer, self._reference):
                if scorer is not None and (dispatcher := get_dispatcher(expert_modules(scorer.model)[0])) is not None:
                    dispatcher.close()

    def state_pieces(self) -> dict[str, Piece]:
        """This rank's part of everything that training continues from, as live tensors.

        `model.NAME`, `optimizer.NAME.MOMENT` and, inside a batch, pi_old and the recorded routing.
        """
        pieces = {f"model.{name}": piece for name, piece in model_pieces(self.model, self.layout).items()}
        moments = self._optimizer.state_pieces(expert_slices(self.model))
        pieces |= {f"optimizer.{name}": piece for name, piece in moments.items()}
        return pieces | {name: replicated_piece(tensor, self.layout) for name, tensor in self._batch_tensors().items()}

    def _batch_tensors(self) -> dict[str, Tensor]:
        tensors = {} if self._old_logprobs is None else {_OLD_LOGPROBS: self._old_logprobs}
        if self._moe.routing_replay == "trainer" and self._routing is not None:
            tensors[_PROMPT_ROUTING] = self._routing.prompt_ids_PLK
            tensors[_RESPONSE_ROUTING] = self._routing.response_ids_RLK
        return tensors

    def prepare_load(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, Piece]:
        """The pieces into which a state of these tensors (name to whole shape) is to be copied; may be called again.

        Raises ValueError naming the first tensor that does not fit; the trainer must then not be used.
        """
        check_names(model_pieces(self.model, self.layout), stored)
        optimizer = [name.removeprefix("optimizer.") for name in stored if name.startswith("optimizer.")]
        self._optimizer.prepare_load(optimizer)
        self._old_logprobs = self._routing = None
        if _OLD_LOGPROBS in stored:
            self._old_logprobs = torch.zeros(stored[_OLD_LOGPROBS])
        if _PROMPT_ROUTING in stored and _RESPONSE_ROUTING in stored:
            shapes = (stored[_PROMPT_ROUTING], stored[_RESPONSE_ROUTING])
            self._routing = RoutingRows(*(torch.zeros(shape, dtype=torch.int16) for shape in shapes))
        return self.state_pieces()

    def progress(self) -> dict[str, Any]:
        """The rest of the state, as JSON values: `global_step`, and the position inside a batch with its metrics.

        Nothing in it depends on the clock: the same steps done again give the same values.
        """
        return {
            "global_step": self.global_step,
            "batch_seed": self._batch_seed,
            "batch_before": self._before,
            "batch_history": [without_wall_clock(values) for values in self._history],
            "batch_router_steps": [
                step | {"layers": [without_wall_clock(layer) for layer in step["layers"]]}
                for step in self._router_steps
            ],
            "batch_expert_load": self._expert_load,
        }

    def restore_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on where `progress` was taken, after the tensors were loaded; ValueError naming a missing key."""
        if missing := self.progress().keys() - progress.keys():
            raise ValueError(f"trainer state: key {min(missing)} is missing; the checkpoint is of another version")
        self.global_step = int(progress["global_step"])
        self._batch_seed = progress["batch_seed"]
        self._before = dict(progress["batch_before"])
        self._history = [dict(values) for values in progress["batch_history"]]
        self._router_steps = [dict(step) for step in progress["batch_router_steps"]]
        self._expert_load = [list(layer) for layer in progress["batch_expert_load"]]


def _usable(batch: TrainingBatch, rows: Sequence[int]) -> Tensor:
    """Those of `rows` that have a usable reward, int64."""
    rows_M = torch.tensor(rows, dtype=torch.long)
    return rows_M[batch.reward_ok_N[rows_M]]
