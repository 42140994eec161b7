"""Engines: chosen by name, on a publication's folder."""

from pathlib import Path

import pytest

from moe.config import ModelConfig, SamplingConfig
from moe.model import build_model
from moe.publication import save_publication
from moe.tokenizer import build_char_tokenizer
from steps.adapters.engines.catalog import load_engine
from steps.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = build_model(ModelConfig(hidden_size=32, moe_intermediate_size=32, num_experts=4), vocab_size=5, seed=0)
    save_publication(model, build_char_tokenizer("ab"), tmp_path)
    return tmp_path


def test_the_torch_engine_samples_from_a_publication(folder: Path) -> None:
    engine = load_engine("torch", folder, policy_version=3)
    prompt = engine.encode("ab")
    first, second = engine.sample([prompt, prompt], [1, 1], SamplingConfig(max_new_tokens=4))
    assert (engine.policy_version, prompt) == (3, [1, 3, 4])
    assert first == second
    assert set(engine.decode(first.response_ids)) <= {"a", "b"}


def test_a_prompt_outside_the_alphabet_is_a_data_error(folder: Path) -> None:
    with pytest.raises(DataError, match="'z'"):
        load_engine("torch", folder, policy_version=0).encode("z")


def test_an_engine_that_is_a_server_is_not_loaded_into_the_worker(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout\.engine 'vllm' is not an engine inside the worker: use torch"):
        load_engine("vllm", folder, policy_version=0)


def test_the_torch_engine_tells_the_experts_of_every_token_when_asked(folder: Path) -> None:
    engine = load_engine("torch", folder, policy_version=0, record_routing=True)
    prompt = engine.encode("ab")
    (response,) = engine.sample([prompt], [1], SamplingConfig(max_new_tokens=4))
    assert response.expert_ids is not None
    assert response.expert_ids.shape == (len(prompt) + len(response.response_ids), 2, 2)


def test_the_torch_engine_is_refreshed_with_another_publication(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    model = build_model(ModelConfig(hidden_size=32, moe_intermediate_size=32, num_experts=4), vocab_size=5, seed=1)
    save_publication(model, build_char_tokenizer("ab"), other)
    engine, expected = load_engine("torch", folder, policy_version=0), load_engine("torch", other, policy_version=1)
    engine.refresh(other, 1)
    arguments = ([[1, 3]], [1], SamplingConfig(max_new_tokens=4))
    assert engine.sample(*arguments) == expected.sample(*arguments)
    assert engine.report()["policy_version"] == engine.policy_version == 1
