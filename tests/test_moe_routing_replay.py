import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from moe.batch import BatchCutter, MicroBatch, TrainingBatch
from moe.config import ModelConfig, SamplingConfig
from moe.families import FAMILIES
from moe.forward import ResponseScorer
from moe.losses import k3_kl
from moe.model import build_model
from moe.router_load import RouterTrace
from moe.routing import RouterControl
from moe.routing_replay import RoutingRows, collect_routing, micro_routing
from moe.sampler import Sampler

VOCAB, EOS = 13, 2
SAMPLING = SamplingConfig(max_new_tokens=6)
PROMPTS = [[1, 5, 6, 7, 8]] * 3 + [[1, 9, 10]] * 2 + [[1, 11]] * 2


def model(family: str = "qwen3_moe") -> PreTrainedModel:
    groups: dict[str, Any] = {"num_expert_groups": 4, "num_groups_per_token": 2} if family == "deepseek_v3" else {}
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 16}
    return build_model(ModelConfig(family=family, initializer_range=0.3, **(shape | groups)), VOCAB, seed=0)


def sampled(
    own: PreTrainedModel, prompts: list[list[int]] = PROMPTS, sampling: SamplingConfig = SAMPLING
) -> TrainingBatch:
    rows = Sampler(own, (EOS,), 0, record_routing=True).sample(prompts, range(len(prompts)), sampling)
    return TrainingBatch.from_rows(
        prompts=prompts,
        responses=[row.response_ids for row in rows],
        logprobs=[row.logprobs for row in rows],
        versions=[[0] * len(row.response_ids) for row in rows],
        rewards=[0.0] * len(rows),
        groups=[0] * 3 + [1] * 2 + [2] * 2 if prompts is PROMPTS else [0] * len(rows),
        routings=[row.expert_ids for row in rows],
    )


def micro_batches(batch: TrainingBatch, max_tokens: int = 60) -> list[MicroBatch]:
    return list(BatchCutter(batch, 0).micro_batches(range(len(batch)), max_tokens))


def routing_of(batch: TrainingBatch) -> RoutingRows:
    rows = RoutingRows.of_batch(batch)
    assert rows is not None
    return rows


def stacked(trace: RouterTrace) -> Tensor:
    return torch.stack([torch.cat(passes) for passes in trace.expert_ids_LTK], dim=1)


def disturb(own: PreTrainedModel) -> None:
    """Change the weights enough that routers choose otherwise."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainers_choice_comes_back_whatever_the_router_says_by_then(family: str) -> None:
    """R2: collected in passes cut one way, replayed in passes cut another way, after the weights have changed."""
    own = model(family)
    batch = replace(sampled(own), prompt_routing_PLK=None, response_routing_RLK=None)
    control, scorer = RouterControl.of(own), ResponseScorer(own)
    rows = RoutingRows.missing(batch, control.num_layers, control.top_k)
    with torch.no_grad():
        for micro in micro_batches(batch, 60):
            collect_routing(scorer.score(micro).trace, micro, rows)
        disturb(own)
        for micro in micro_batches(batch, 10_000):
            given = micro_routing(rows, micro)
            scores = scorer.score(micro, routing=given)
            counted = scores.token_weights_T > 0
            given_TLK = torch.cat([given.prompt_TLK, given.response_TLK])[counted].long()
            assert bool((given_TLK >= 0).all())
            assert torch.equal(stacked(scores.trace)[counted], given_TLK)
            assert not torch.equal(stacked(scorer.score(micro).trace)[counted], given_TLK)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_samplers_choice_is_what_the_trainer_computes_on(family: str) -> None:
    """R3: equal weights, so the recorded experts are the trainer's own, the log-probabilities the sampler's."""
    own = model(family)
    batch = sampled(own)
    rows, scorer = routing_of(batch), ResponseScorer(own)
    rows.check(2, 2, 8)
    for micro in micro_batches(batch):
        with torch.no_grad():
            plain, replayed = scorer.score(micro), scorer.score(micro, routing=micro_routing(rows, micro))
        assert torch.equal(stacked(plain.trace), stacked(replayed.trace))
        mask = micro.response_mask_BR
        expected = batch.logprobs[micro.flat_BR][mask]
        torch.testing.assert_close(replayed.logprobs_BR[mask], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_replay_closes_the_gap_between_a_bfloat16_sampler_and_a_float32_trainer(family: str) -> None:
    sizes = ModelConfig(family=family, hidden_size=64, num_layers=4, num_experts=16, initializer_range=0.15)
    sampling_model = build_model(replace(sizes, num_experts_per_token=4), VOCAB, seed=0).to(torch.bfloat16)
    training_model = copy.deepcopy(sampling_model).float()
    batch = sampled(sampling_model, [[1, *range(3, 12)]] * 8, SamplingConfig(max_new_tokens=24))
    (micro,) = micro_batches(batch, 10_000)
    scorer, mask = ResponseScorer(training_model), micro.response_mask_BR
    given = micro_routing(routing_of(batch), micro)
    with torch.no_grad():
        plain, replayed = scorer.score(micro), scorer.score(micro, routing=given)
    sampler_logprobs = batch.logprobs[micro.flat_BR][mask]
    gap, closed = (float(k3_kl(scores.logprobs_BR[mask], sampler_logprobs).mean()) for scores in (plain, replayed))
    assert not torch.equal(stacked(plain.trace), stacked(replayed.trace))
    assert closed < gap / 5


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_every_token_that_was_fed_has_its_experts(family: str) -> None:
    batch = sampled(model(family))
    rows = routing_of(batch)
    last = batch.response_lens_N.cumsum(0) - 1
    fed = torch.ones(len(batch.response_ids), dtype=torch.bool)
    fed[last] = False
    assert bool((rows.response_ids_RLK[fed] >= 0).all())
    assert bool((rows.response_ids_RLK[last] == -1).all())
    assert bool((rows.prompt_ids_PLK[:, 0] >= 0).all())
    ends = batch.prompt_lens_N.cumsum(0) - 1
    assert bool((rows.prompt_ids_PLK[ends] >= 0).all())
    assert rows.coverage(batch.response_lens_N) == 1.0
    rows.response_ids_RLK[fed.nonzero()[0], 1] = -1
    assert rows.coverage(batch.response_lens_N) == pytest.approx(1 - 1 / (2 * int(fed.sum())))


def test_rows_that_were_not_recorded_are_the_routers_own() -> None:
    own = model()
    batch = sampled(own)
    rows, scorer = routing_of(batch), ResponseScorer(own)
    rows.prompt_ids_PLK[:] = -1
    rows.response_ids_RLK[::2] = -1
    disturb(own)
    (micro,) = micro_batches(batch, 10_000)
    given = micro_routing(rows, micro)
    with torch.no_grad():
        control = RouterControl.of(own)
        prompts = stacked(scorer.score(micro).trace)[: len(given.prompt_TLK)]
        replayed = stacked(scorer.score(micro, routing=given).trace)
    assert control.num_layers == 2
    assert torch.equal(replayed[: len(prompts)], prompts)
    present = (given.response_TLK >= 0).all(-1)
    assert torch.equal(replayed[len(prompts) :][present], given.response_TLK[present].long())
    assert bool(present.any()) and not bool(present.all())


def test_equal_prompts_that_went_to_different_experts_are_computed_apart() -> None:
    own = model()
    prompts = [[1, 5, 6, 7]] * 4
    batch = sampled(own, prompts)
    assert batch.prompt_routing_PLK is not None
    (shared,) = micro_batches(batch, 10_000)
    assert shared.prompt_ids_UP.shape[0] == 1
    other = batch.prompt_routing_PLK.clone()
    other[8:12] = (other[8:12] + 1) % 8
    (apart,) = micro_batches(replace(batch, prompt_routing_PLK=other), 10_000)
    assert apart.prompt_ids_UP.shape[0] == 2
    given = micro_routing(RoutingRows(other, routing_of(batch).response_ids_RLK), apart)
    second = int(apart.prompt_of_row_B[apart.rows_B.tolist().index(2)])
    assert torch.equal(given.prompt_TLK.view(2, 4, 2, 2)[second], other[8:12])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=6), st.integers(4, 60))
def test_what_is_collected_is_what_is_handed_out(lengths: list[tuple[int, int]], max_tokens: int) -> None:
    batch = TrainingBatch.from_rows(
        prompts=[[10 + prompt] * prompt for prompt, _ in lengths],
        responses=[[5] * response for _, response in lengths],
        logprobs=[[0.0] * response for _, response in lengths],
        versions=[[0] * response for _, response in lengths],
        rewards=[0.0] * len(lengths),
        groups=[0] * len(lengths),
    )
    collected = RoutingRows.missing(batch, 3, 2)
    generator = torch.Generator().manual_seed(max_tokens)
    for micro in micro_batches(batch, max_tokens):
        tokens = micro.prompt_mask_UP.numel(), micro.response_mask_BR[:, 1:].numel()
        passes = [[torch.randint(0, 40, (count, 2), generator=generator) for count in tokens] for _ in range(3)]
        trace = RouterTrace([[] for _ in passes], passes)
        collect_routing(trace, micro, collected)
        given = micro_routing(collected, micro)
        mask = torch.cat([micro.prompt_mask_UP.reshape(-1), micro.response_mask_BR[:, 1:].reshape(-1)])
        expected = stacked(trace).to(torch.int16).masked_fill(~mask.view(-1, 1, 1), -1)
        assert torch.equal(torch.cat([given.prompt_TLK, given.response_TLK]), expected)
    fed = int((batch.response_lens_N - 1).sum())
    assert int((collected.response_ids_RLK[:, 0, 0] >= 0).sum()) == fed


@pytest.mark.parametrize("routed", [False, True])
def test_a_filling_pass_changes_no_score_and_counts_for_nothing(routed: bool) -> None:
    """Ranks that exchange tokens run equally many passes, also where responses have one token."""
    own = model()
    prompts = [[1, 5, 6], [1, 7, 8]]
    batch = TrainingBatch.from_rows(
        prompts=prompts,
        responses=[[5], [6]],
        logprobs=[[0.0]] * 2,
        versions=[[0]] * 2,
        rewards=[1.0, 2.0],
        groups=[0, 1],
    )
    (micro,) = micro_batches(batch)
    rows = RoutingRows.missing(batch, 2, 2)
    routing = micro_routing(rows, micro) if routed else None
    one = ResponseScorer(own).score(micro, routing=routing)
    two = ResponseScorer(own, two_passes=True).score(micro, routing=routing)
    assert torch.equal(one.logprobs_BR, two.logprobs_BR)
    assert two.token_weights_T.tolist() == [*one.token_weights_T.tolist(), 0.0, 0.0]
    assert [len(passes) for passes in two.trace.expert_ids_LTK] == [2, 2]
    collect_routing(two.trace, micro, rows)
    assert bool((rows.prompt_ids_PLK >= 0).all()) and bool((rows.response_ids_RLK == -1).all())
    first, *_ = torch.autograd.grad(one.logprobs_BR.sum(), own.get_input_embeddings().weight)
    second, *_ = torch.autograd.grad(two.logprobs_BR.sum(), own.get_input_embeddings().weight)
    torch.testing.assert_close(first, second)


def test_routing_of_another_model_is_refused() -> None:
    rows = routing_of(sampled(model()))
    with pytest.raises(ValueError, match="2 layers of 2 experts a token, the model has 3 of 2"):
        rows.check(3, 2, 8)
    with pytest.raises(ValueError, match="does not exist, the model has 4"):
        rows.check(2, 2, 4)
    batch = replace(sampled(model()), prompt_routing_PLK=None, response_routing_RLK=None)
    assert RoutingRows.of_batch(batch) is None
