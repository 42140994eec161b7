import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.batch import BatchCutter, TrainingBatch
from moe.config import LossConfig, ModelConfig, MoeConfig, OptimizerConfig, SamplingConfig, UpdateConfig
from moe.dispatch.local import LocalDispatcher
from moe.divergence import Diverged
from moe.experts import expert_modules, get_dispatcher
from moe.forward import ResponseScorer
from moe.model import build_model
from moe.sampler import Sampler
from moe.update import PolicyTrainer, UpdateStopped

VOCAB, EOS = 11, 2
SAMPLING = SamplingConfig(max_new_tokens=5, temperature=0.8)
SIZES = ModelConfig(
    hidden_size=16, num_attention_heads=2, num_key_value_heads=1, num_experts=4, moe_intermediate_size=16
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(seed: int = 0) -> PreTrainedModel:
    return build_model(SIZES, VOCAB, seed)


def trainer(policy: PreTrainedModel, *, reference: PreTrainedModel | None = None, **fields: Any) -> PolicyTrainer:
    sampling = fields.pop("sampling", SAMPLING)
    update = fields.pop("update", UpdateConfig(epochs=2, optimizer_steps_per_epoch=2))
    aux = fields.pop("aux", 0.0)
    optimizer = fields.pop("optimizer", OptimizerConfig(learning_rate=1e-2, warmup_steps=3))
    return PolicyTrainer(
        policy,
        loss=LossConfig(**fields),
        optimizer=optimizer,
        update=update,
        moe=MoeConfig(aux_loss_coefficient=aux),
        sampling=sampling,
        reference_model=reference,
    )


def sampled_batch(
    policy: PreTrainedModel, groups: int = 6, size: int = 4, sampling: SamplingConfig = SAMPLING
) -> TrainingBatch:
    """Real samples; rewards are the share of token 5, one group is degenerate, one sample has no reward."""
    prompts = [[1, *range(3, 5 + group % 4)] for group in range(groups) for _ in range(size)]
    rows = Sampler(policy, (EOS,), 0).sample(prompts, range(len(prompts)), sampling)
    rewards: list[float | None] = [
        row.response_ids.count(5) / len(row.response_ids) + i % 3 for i, row in enumerate(rows)
    ]
    rewards[:size] = [0.25] * size
    rewards[-1] = None
    return TrainingBatch.from_rows(
        prompts=prompts,
        responses=[row.response_ids for row in rows],
        logprobs=[row.logprobs for row in rows],
        versions=[[0] * len(row.response_ids) for row in rows],
        rewards=rewards,
        groups=[i // size for i in range(len(prompts))],
    )


def weights(policy: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}


def run(own: PolicyTrainer, batch: TrainingBatch, seed: int = 7) -> dict[str, float]:
    return own.run_batch(batch, seed, 0, lambda step: None, lambda: False).values


def state(own: PolicyTrainer) -> dict[str, Tensor]:
    return {name: piece.tensor.clone() for name, piece in own.state_pieces().items()}


def transfer(source: PolicyTrainer, target: PolicyTrainer) -> None:
    """What saving the state of `source` and loading it into `target` does."""
    stored = source.state_pieces()
    for name, piece in target.prepare_load({name: piece.full_shape for name, piece in stored.items()}).items():
        piece.tensor.copy_(stored[name].tensor)
    target.restore_progress(source.progress())


def test_scores_are_the_plain_forwards_log_probabilities() -> None:
    policy = model()
    batch = sampled_batch(policy)
    scorer = ResponseScorer(policy, SAMPLING.temperature)
    start = 0
    scored = torch.zeros_like(batch.logprobs)
    for micro in BatchCutter(batch, 0).micro_batches(range(len(batch)), 60):
        scored[micro.flat_BR[micro.response_mask_BR]] = scorer.score(micro).logprobs_BR[micro.response_mask_BR].detach()
    prompts = batch.prompt_ids.split(batch.prompt_lens_N.tolist())
    for prompt, response in zip(prompts, batch.response_ids.split(batch.response_lens_N.tolist()), strict=True):
        ids = torch.cat([prompt, response]).long().unsqueeze(0)
        logits = policy(input_ids=ids).logits[0, len(prompt) - 1 : -1] / SAMPLING.temperature
        expected = logits.log_softmax(-1).gather(-1, response.long().unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(scored[start : start + len(response)], expected, atol=1e-5, rtol=1e-4)
        start += len(response)
    torch.testing.assert_close(scored, batch.logprobs, atol=1e-5, rtol=1e-4)


def test_gradients_of_shared_prompts_are_those_of_separate_sequences() -> None:
    policy = model()
    batch = sampled_batch(policy, groups=4)
    scorer = ResponseScorer(policy)

    def gradients(row_sets: list[list[int]]) -> dict[str, Tensor]:
        policy.zero_grad()
        for rows in row_sets:
            for micro in BatchCutter(batch, 0).micro_batches(rows, 10_000):
                scorer.score(micro).logprobs_BR[micro.response_mask_BR].sum().backward()
        return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}

    shared, separate = gradients([list(range(16))]), gradients([[row] for row in range(16)])
    for name, gradient in separate.items():
        torch.testing.assert_close(shared[name], gradient, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "fields",
    [
        {"algorithm": "grpo"},
        {"algorithm": "gspo"},
        {"algorithm": "dr_grpo"},
        {"algorithm": "rloo"},
        {"algorithm": "cispo", "correction": "tis"},
        {"algorithm": "dapo", "correction": "icepop", "entropy_coefficient": 0.01, "aux": 0.05},
        {"algorithm": "grpo", "kl_coefficient": 0.1},
    ],
)
def test_the_update_does_not_depend_on_the_micro_batch_size(fields: dict[str, Any]) -> None:
    batch = sampled_batch(model())
    results = []
    for tokens in (10_000, 40):
        policy = model()
        update = UpdateConfig(epochs=1, optimizer_steps_per_epoch=2, micro_batch_tokens=tokens)
        # A large epsilon keeps AdamW from amplifying rounding where the gradient is nearly zero.
        optimizer = OptimizerConfig(learning_rate=1e-2, epsilon=1e-3)
        run(trainer(policy, update=update, optimizer=optimizer, reference=model(1), **fields), batch)
        results.append(weights(policy))
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("fields", [{}, {"correction": "tis"}, {"kl_coefficient": 0.1, "aux": 0.01}])
@pytest.mark.parametrize("stop_after", [1, 3])
def test_an_interrupted_batch_goes_on_bit_identically(fields: dict[str, Any], stop_after: int) -> None:
    batch = sampled_batch(model())
    straight = trainer(model(), reference=model(1), **fields)
    metrics = straight.run_batch(batch, 7, 0, lambda step: None, lambda: False)

    first = trainer(model(), reference=model(1), **fields)
    steps: list[int] = []
    with pytest.raises(UpdateStopped) as stopped:
        first.run_batch(batch, 7, 0, lambda step: steps.append(step.step), lambda: len(steps) == stop_after)
    assert stopped.value.steps_done == first.batch_step == stop_after
    second = trainer(model(5), reference=model(1), **fields)
    transfer(first, second)
    resumed = second.run_batch(batch, 7, second.batch_step, lambda step: steps.append(step.step), lambda: False)

    assert steps == [1, 2, 3, 4]
    assert second.progress() == straight.progress()
    straight_tensors, second_tensors = state(straight), state(second)
    assert straight_tensors.keys() == second_tensors.keys()
    assert [name for name in straight_tensors if not torch.equal(straight_tensors[name], second_tensors[name])] == []
    measured = [name for name in metrics.values if not name.startswith(("perf/", "timing_s/", "moe/exchange_"))]
    assert {name: resumed.values[name] for name in measured} == {name: metrics.values[name] for name in measured}
    assert resumed.expert_load_LE == metrics.expert_load_LE


def test_resuming_at_another_step_or_with_another_seed_is_refused() -> None:
    batch, own = sampled_batch(model()), trainer(model())
    with pytest.raises(UpdateStopped):
        own.run_batch(batch, 7, 0, lambda step: None, lambda: True)
    with pytest.raises(ValueError, match="start_step 0"):
        own.run_batch(batch, 7, 0, lambda step: None, lambda: True)
    with pytest.raises(ValueError, match="seed 8"):
        own.run_batch(batch, 8, 1, lambda step: None, lambda: True)


def test_a_stop_after_the_last_step_is_no_interruption() -> None:
    done: list[int] = []
    own = trainer(model())
    own.run_batch(sampled_batch(model()), 7, 0, lambda step: done.append(step.step), lambda: len(done) == 4)
    assert (done, own.batch_step, own.global_step) == ([1, 2, 3, 4], 0, 4)


def test_equal_rewards_everywhere_leave_the_weights_alone() -> None:
    policy = model()
    before = weights(policy)
    batch = sampled_batch(policy)
    flat = TrainingBatch.from_tensors(batch.to_tensors() | {"rewards_N": torch.full_like(batch.rewards_N, 0.95)})
    metrics = run(trainer(policy), flat)
    assert metrics["frac_reward_zero_std"] == 1.0
    assert metrics["actor/grad_norm"] == 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())


def test_degenerate_groups_count_in_the_normalisation() -> None:
    """A mini-batch with a degenerate group has the gradient of the other groups, over all tokens."""
    policy = model()
    batch = sampled_batch(policy, groups=2)
    update = UpdateConfig(epochs=2, optimizer_steps_per_epoch=1)
    norms: list[float] = []
    trainer(policy, update=update).run_batch(
        batch, 7, 0, lambda step: norms.append(step.values["actor/grad_norm"]), lambda: False
    )
    alone = {name: tensor for name, tensor in batch.to_tensors().items()}
    tokens = int(batch.response_lens_N[:7].sum())
    active = int(batch.response_lens_N[4:7].sum())
    first_prompt, first_response = int(batch.prompt_lens_N[:4].sum()), int(batch.response_lens_N[:4].sum())
    alone = {name: tensor[4:] if name.endswith("_N") else tensor for name, tensor in alone.items()}
    alone["prompt_ids"] = batch.prompt_ids[first_prompt:]
    for name in ("response_ids", "logprobs", "versions"):
        alone[name] = alone[name][first_response:]
    alone["group_N"] = torch.zeros(4, dtype=torch.int32)
    norms_alone: list[float] = []
    trainer(model(), update=update).run_batch(
        TrainingBatch.from_tensors(alone),
        7,
        0,
        lambda s: norms_alone.append(s.values["actor/grad_norm"]),
        lambda: False,
    )
    assert norms[0] == pytest.approx(norms_alone[0] * active / tokens, rel=1e-4)


def test_the_update_raises_the_probability_of_rewarded_responses() -> None:
    policy = model()
    batch = sampled_batch(policy, groups=8)
    best = batch.rewards_N >= batch.rewards_N.median()

    def mean_logprob() -> float:
        flat = torch.zeros_like(batch.logprobs)
        for micro in BatchCutter(batch, 0).micro_batches(range(len(batch)), 10_000):
            scored = ResponseScorer(policy).score(micro).logprobs_BR
            flat[micro.flat_BR[micro.response_mask_BR]] = scored[micro.response_mask_BR].detach()
        totals = torch.stack([part.sum() for part in flat.split(batch.response_lens_N.tolist())])
        return float(totals[best].mean() - totals[~best].mean())

    before = mean_logprob()
    run(trainer(policy), batch)
    assert mean_logprob() > before + 0.05


def test_the_learning_rate_warms_up_over_global_steps() -> None:
    rates: list[float] = []
    own = trainer(model())
    batch = sampled_batch(model())
    own.run_batch(batch, 7, 0, lambda step: rates.append(step.values["actor/lr"]), lambda: False)
    own.run_batch(batch, 8, 0, lambda step: rates.append(step.values["actor/lr"]), lambda: False)
    assert rates == pytest.approx([1e-2 / 3, 2e-2 / 3, *[1e-2] * 6])


def test_metrics_are_complete_finite_and_leaf_only() -> None:
    metrics = run(trainer(model(), kl_coefficient=0.1, reference=model(1), aux=0.01), sampled_batch(model()))
    assert all(math.isfinite(value) for value in metrics.values())
    assert [n for n in metrics for other in metrics if other.startswith(n + "/")] == []
    expected = {
        *(
            f"actor/{n}"
            for n in ("pg_loss", "ppo_kl", "pg_clipfrac", "pg_clipfrac_lower", "entropy", "grad_norm", "lr")
        ),
        *("actor/kl_loss", "actor/aux_loss", "frac_reward_zero_std", "response_length/clip_ratio"),
        *("rollout_corr/k3_kl", "training/rollout_probs_diff_mean", "training/global_step"),
        *("rollout/moe/max_vio", "rollout/moe/avg_vio", "moe/dead_experts", "moe/router_entropy"),
        *("perf/throughput", "perf/total_num_tokens", "perf/train_samples_per_s", "timing_s/update_actor"),
        *(
            f"{group}/{part}"
            for group in ("critic/rewards", "critic/advantages", "response_length", "prompt_length")
            for part in ("mean", "max", "min")
        ),
    }
    assert expected <= metrics.keys()
    assert abs(metrics["rollout_corr/k3_kl"]) < 1e-8
    assert metrics["training/rollout_probs_diff_mean"] < 1e-5
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 / 6)


def test_expert_load_counts_every_routed_token_of_the_update() -> None:
    batch = sampled_batch(model())
    own = trainer(model(), update=UpdateConfig(epochs=3, optimizer_steps_per_epoch=1))
    load = torch.tensor(own.run_batch(batch, 7, 0, lambda step: None, lambda: False).expert_load_LE)
    trained = torch.arange(len(batch)) >= 4
    trained[-1] = False
    tokens = int((batch.prompt_lens_N + batch.response_lens_N - 1)[trained].sum())
    assert load.shape == (SIZES.num_layers, SIZES.num_experts)
    assert load.sum(dim=1).tolist() == [3.0 * tokens * SIZES.num_experts_per_token] * SIZES.num_layers


def test_a_stale_sampler_shows_in_the_mismatch() -> None:
    metrics = run(trainer(model(3)), sampled_batch(model(0)))
    assert metrics["rollout_corr/k3_kl"] > 1e-3


def test_a_single_optimizer_step_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer_steps_per_epoch = 1"):
        trainer(model(), update=UpdateConfig(epochs=1, optimizer_steps_per_epoch=1))


def test_a_kl_needs_its_reference_only_to_run_a_batch() -> None:
    own = trainer(model(), kl_coefficient=0.1)
    other = trainer(model(1), kl_coefficient=0.1, reference=model(2))
    transfer(own, other)
    with pytest.raises(ValueError, match=r"train\.loss\.kl_coefficient = 0\.1 needs a reference model"):
        run(own, sampled_batch(model()))


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo"])
def test_with_a_nucleus_the_first_step_has_ratio_one(algorithm: str) -> None:
    sampling = SamplingConfig(max_new_tokens=5, top_p=0.9)
    policy = model()
    batch = sampled_batch(policy, sampling=sampling)
    first: list[dict[str, float]] = []
    own = trainer(policy, sampling=sampling, algorithm=algorithm)
    metrics = own.run_batch(batch, 7, 0, lambda step: first.append(step.values), lambda: False).values
    assert (first[0]["actor/pg_clipfrac"], first[0]["actor/pg_clipfrac_lower"]) == (0.0, 0.0)
    assert first[0]["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    # The two distributions do differ: against the sampler's the ratio would not be 1.
    assert metrics["training/rollout_probs_diff_mean"] > 1e-3


def test_without_a_nucleus_nothing_is_scored_twice() -> None:
    own = trainer(model())
    with pytest.raises(UpdateStopped):
        own.run_batch(sampled_batch(model()), 7, 0, lambda step: None, lambda: True)
    assert "batch.old_logprobs" not in own.state_pieces()


def test_bfloat16_weights_are_not_trained() -> None:
    with pytest.raises(ValueError, match="load the model with dtype float32"):
        trainer(model().to(torch.bfloat16))


def test_a_diverged_model_is_reported_by_field_and_left_as_it_was() -> None:
    policy = model()
    batch = sampled_batch(policy)
    with torch.no_grad():
        policy.lm_head.weight[3] = torch.inf
    before = weights(policy)
    with pytest.raises(Diverged, match=r"train\.optimizer\.learning_rate"):
        run(trainer(policy), batch)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())


def test_state_of_another_model_is_refused() -> None:
    own = trainer(model())
    other = PolicyTrainer(
        build_model(ModelConfig(hidden_size=32), VOCAB, 0),
        loss=LossConfig(),
        optimizer=OptimizerConfig(),
        update=UpdateConfig(),
        moe=MoeConfig(),
        sampling=SAMPLING,
    )
    shapes = {name: piece.full_shape for name, piece in own.state_pieces().items()}
    with pytest.raises(ValueError, match=r"tensor model\."):
        other.prepare_load(shapes)
    shapes.popitem()
    with pytest.raises(ValueError, match=r"tensor model\."):
        own.prepare_load(shapes)


def test_closing_releases_what_the_dispatchers_of_both_models_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []
    monkeypatch.setattr(LocalDispatcher, "close", lambda dispatcher: closed.append(dispatcher))
    policy, reference = model(), model(seed=1)
    trainer(policy, reference=reference, kl_coefficient=0.1).close()
    assert closed == [get_dispatcher(expert_modules(each)[0]) for each in (policy, reference)]
