import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from moe.config import ModelConfig, SamplingConfig
from moe.decoder import ForwardDecoder, is_plain_qwen3_moe
from moe.model import build_model
from moe.routing import RouterControl
from moe.sampler import SampledResponse, Sampler, SamplingStopped, counter_uniforms, sampling_logprobs

torch.set_num_threads(1)
EOS, PAD = 2, 0
GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = [7, 3, 3, 9, 5, 1, 6]
PROMPTS = [torch.randint(3, 16, (length,), generator=GENERATOR).tolist() for length in LENGTHS]
CFG = SamplingConfig(max_new_tokens=14)


def _model(scale: float, **sizes: int) -> PreTrainedModel:
    """Random weights; a scale above 1 sharpens the distributions."""
    model = build_model(ModelConfig(**sizes), vocab_size=16, seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.dim() > 1 else 1.0)
    return model


@pytest.fixture(scope="module", params=[1.0, 3.0], ids=["random", "sharpened"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return _model(request.param)


def _mixtral() -> PreTrainedModel:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, eos_token_id=EOS, **heads, **sizes)).eval()


def _sampler(model: PreTrainedModel) -> Sampler:
    return Sampler(model, (EOS,), PAD)


def _forward_logprobs(model: PreTrainedModel, prompt: list[int], response: SampledResponse) -> torch.Tensor:
    ids = torch.tensor([prompt + response.response_ids])
    with torch.no_grad():
        logprobs = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(response.response_ids).unsqueeze(1)).squeeze(1)


def _assert_parity(model: PreTrainedModel, sampler: Sampler) -> None:
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    responses = sampler.sample(prompts, range(len(prompts)), CFG)
    for prompt, response in zip(prompts, responses, strict=True):
        want = _forward_logprobs(model, prompt, response)
        torch.testing.assert_close(torch.tensor(response.logprobs), want, rtol=0, atol=1e-5)


def _assert_greedy_equals_generate(model: PreTrainedModel, sampler: Sampler) -> None:
    responses = sampler.sample(PROMPTS, range(len(PROMPTS)), CFG, greedy=True)
    for prompt, response in zip(PROMPTS, responses, strict=True):
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": CFG.max_new_tokens, "do_sample": False, "pad_token_id": PAD}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert output[0, len(prompt) :].tolist() == response.response_ids


def test_greedy_tokens_equal_generate(model: PreTrainedModel) -> None:
    _assert_greedy_equals_generate(model, _sampler(model))


def test_logprobs_equal_the_full_forward(model: PreTrainedModel) -> None:
    _assert_parity(model, _sampler(model))


def test_another_family_runs_on_its_own_forward() -> None:
    mixtral = _mixtral()
    assert not is_plain_qwen3_moe(mixtral)
    _assert_greedy_equals_generate(mixtral, _sampler(mixtral))
    _assert_parity(mixtral, _sampler(mixtral))


def test_both_decoders_draw_the_same_tokens() -> None:
    model = _model(3.0)
    fast, plain = _sampler(model), _sampler(model)
    plain._decoder = ForwardDecoder(model)
    seeds = range(len(PROMPTS))
    drawn = [[r.response_ids for r in sampler.sample(PROMPTS, seeds, CFG)] for sampler in (fast, plain)]
    assert drawn[0] == drawn[1]


def test_widths_that_the_fused_kernel_refuses_still_work() -> None:
    model = _model(2.0, hidden_size=40, moe_intermediate_size=33)
    _assert_parity(model, _sampler(model))


def test_responses_depend_on_seeds_not_on_what_was_sampled_before(model: PreTrainedModel) -> None:
    sampler = _sampler(model)
    seeds = [2**64 - 1 - row for row in range(len(PROMPTS))]
    first = sampler.sample(PROMPTS, seeds, CFG)
    other = sampler.sample(PROMPTS, range(len(PROMPTS)), CFG)
    torch.manual_seed(123)
    assert sampler.sample(PROMPTS, seeds, CFG) == first
    assert _sampler(model).sample(PROMPTS, seeds, CFG) == first
    assert [r.response_ids for r in other] != [r.response_ids for r in first]


def test_a_group_gets_the_tokens_that_separate_prompts_get(model: PreTrainedModel) -> None:
    sampler = _sampler(model)
    grouped = sampler.sample([PROMPTS[0]] * 4, range(4), CFG)
    single = [sampler.sample([PROMPTS[0]], [seed], CFG)[0] for seed in range(4)]
    assert [r.response_ids for r in grouped] == [r.response_ids for r in single]


def test_more_prompts_than_one_prefill_pass_takes(model: PreTrainedModel) -> None:
    prompts = [[3 + row % 13, 3 + row // 13, 5][: 1 + row % 3] for row in range(150) for _ in range(1 + row % 2)]
    responses = _sampler(model).sample(prompts, range(len(prompts)), SamplingConfig(max_new_tokens=2))
    for prompt, response in zip(prompts, responses, strict=True):
        want = _forward_logprobs(model, prompt, response)
        torch.testing.assert_close(torch.tensor(response.logprobs), want, rtol=0, atol=1e-5)


def test_refresh_follows_changed_weights() -> None:
    model = _model(3.0)
    sampler = _sampler(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    sampler.refresh()
    _assert_parity(model, sampler)


def test_a_response_ends_with_its_stop_token() -> None:
    model = _model(1.0)
    stops = (5, 6, 7)
    responses = Sampler(model, stops, PAD).sample([PROMPTS[0]] * 64, range(64), CFG)
    assert {r.finish_reason for r in responses} == {"stop", "length"}
    for response in responses:
        assert len(response.logprobs) == len(response.response_ids)
        assert not set(response.response_ids[:-1]) & set(stops)
        assert (response.response_ids[-1] in stops) == (response.finish_reason == "stop")
        assert response.finish_reason == "stop" or len(response.response_ids) == CFG.max_new_tokens


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.6), (0.7, 0.8)])
def test_draws_follow_the_distribution_that_the_logprobs_state(temperature: float, top_p: float) -> None:
    model, count = _model(3.0), 4000
    cfg = SamplingConfig(max_new_tokens=1, temperature=temperature, top_p=top_p)
    responses = _sampler(model).sample([PROMPTS[3]] * count, range(count), cfg)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[3]])).logits[0, -1:]
    want = sampling_logprobs(logits, temperature, top_p)[0].exp().tolist()
    drawn = Counter(response.response_ids[0] for response in responses)
    for token, probability in enumerate(want):
        deviation = math.sqrt(probability * (1 - probability) / count)
        assert abs(drawn[token] / count - probability) <= 5 * deviation
    for response in responses:
        assert math.exp(response.logprobs[0]) == pytest.approx(want[response.response_ids[0]], abs=1e-5)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    probs = sampling_logprobs(logits, 1.0, 0.65).exp()
    torch.testing.assert_close(probs, torch.tensor([[0.0, 4 / 7, 0.0, 3 / 7]]))
    torch.testing.assert_close(sampling_logprobs(logits, 1.0, 1e-6).exp(), torch.tensor([[0.0, 1.0, 0.0, 0.0]]))


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, -1.0]])
    torch.testing.assert_close(sampling_logprobs(logits, 0.5, 1.0), (logits / 0.5).log_softmax(-1))


def _splitmix64(seed: int, index: int) -> int:
    """The published algorithm, in Python integers."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4))
def test_uniforms_are_the_top_bits_of_splitmix64(seeds: list[int]) -> None:
    uniforms = counter_uniforms(seeds, 3)
    want = [[(_splitmix64(seed, t) >> 12) * 2.0**-52 for seed in seeds] for t in range(3)]
    assert uniforms.tolist() == want


def test_stop_ends_the_batch_between_two_tokens() -> None:
    answers = iter([False, False, True])
    with pytest.raises(SamplingStopped, match="after 2 of 14 tokens"):
        _sampler(_model(1.0)).sample(PROMPTS, range(len(PROMPTS)), CFG, stop=lambda: next(answers))


def test_sampling_leaves_the_models_mode_alone() -> None:
    model = _model(1.0).train()
    _sampler(model).sample(PROMPTS, range(len(PROMPTS)), CFG)
    assert model.training


def test_no_prompts_give_no_responses() -> None:
    assert _sampler(_model(1.0)).sample([], [], CFG) == []


@pytest.mark.parametrize(
    ("prompt", "cfg", "message"),
    [
        ([], CFG, "no tokens"),
        ([3] * 9, SamplingConfig(max_prompt_tokens=8), "sampling.max_prompt_tokens 8: a prompt has 9 tokens"),
        ([3] * 9, SamplingConfig(max_new_tokens=120), "sampling.max_new_tokens 120"),
    ],
)
def test_a_prompt_that_does_not_fit_is_named(prompt: list[int], cfg: SamplingConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _sampler(_model(1.0)).sample([prompt], [0], cfg)


def test_a_seed_is_needed_for_every_prompt() -> None:
    with pytest.raises(ValueError, match="seeds: 1 for 7 prompts"):
        _sampler(_model(1.0)).sample(PROMPTS, [0], CFG)


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        _sampler(_model(math.nan)).sample(PROMPTS, range(len(PROMPTS)), CFG)


def test_bfloat16_samples_close_to_its_own_forward() -> None:
    model = _model(1.0).to(torch.bfloat16)
    prompts = [PROMPTS[0]] * 4
    for prompt, response in zip(prompts, _sampler(model).sample(prompts, range(4), CFG), strict=True):
        want = _forward_logprobs(model, prompt, response)
        torch.testing.assert_close(torch.tensor(response.logprobs), want, rtol=0, atol=0.1)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_recorded_experts_are_those_of_the_forward_pass(family: str) -> None:
    own = build_model(ModelConfig(family=family, initializer_range=0.3), vocab_size=16, seed=1)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    responses = Sampler(own, (EOS,), PAD, record_routing=True).sample(prompts, range(len(prompts)), CFG)
    plain = _sampler(own).sample(prompts, range(len(prompts)), CFG)
    assert {response.finish_reason for response in responses} == {"stop", "length"}
    for prompt, response, unrecorded in zip(prompts, responses, plain, strict=True):
        assert unrecorded.expert_ids is None
        assert (response.response_ids, response.logprobs) == (unrecorded.response_ids, unrecorded.logprobs)
        ids = prompt + response.response_ids
        with torch.no_grad(), RouterControl.of(own).recording() as trace:
            own(input_ids=torch.tensor([ids]), use_cache=False)
        expected = torch.stack([torch.cat(passes) for passes in trace.expert_ids_LTK], dim=1).to(torch.int16)
        assert response.expert_ids is not None
        assert response.expert_ids.shape == (len(ids), 2, 2)
        known = (response.expert_ids >= 0).all(-1)
        assert torch.equal(response.expert_ids[known], expected[known])
        assert bool(known[len(prompt) - 1 : -1].all()) and not bool(known[-1].any())
        assert bool(known[: len(prompt), 0].all())
