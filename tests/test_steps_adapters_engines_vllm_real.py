"""The real vLLM, where MOERL_TEST_VLLM_PYTHON names an interpreter that has it (its CPU build is enough)."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe.config import ModelConfig, SamplingConfig
from moe.model import build_model
from moe.probe import largest_difference, read_probe
from moe.publication import save_publication
from moe.tokenizer import build_char_tokenizer
from steps.adapters.engines.catalog import SERVER_KINDS
from steps.adapters.engines.server_kind import Launch
from steps.adapters.engines.server_process import ServerProcess
from steps.config import ServerConfig

PYTHON = os.environ.get("MOERL_TEST_VLLM_PYTHON", "")
KIND = SERVER_KINDS["vllm"]
EOS = 2
pytestmark = pytest.mark.skipif(not PYTHON, reason="MOERL_TEST_VLLM_PYTHON names no interpreter with vllm")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two publications of one model's shape."""
    shape = ModelConfig(hidden_size=128, num_layers=2, num_key_value_heads=4, moe_intermediate_size=64)
    made = [tmp_path_factory.mktemp(f"publication-{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(made):
        save_publication(build_model(shape, vocab_size=14, seed=seed), build_char_tokenizer("0123456789>"), folder)
    return made[0], made[1]


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = int(unused.getsockname()[1])
    launch = Launch(
        folder=folders[0],
        dtype="float32",
        address="127.0.0.1",
        port=port,
        max_model_len=128,
        server=ServerConfig(),
        on_gpu=False,
        record_routing=bool(os.environ.get("MOERL_TEST_VLLM_ROUTING")),
    )
    started = ServerProcess(KIND, launch, PYTHON, tmp_path_factory.mktemp("log") / "server.log")
    try:
        started.wait_until_healthy(KIND, 280.0, lambda: False)
        yield started
    finally:
        started.stop()


@pytest.mark.timeout(300)
def test_a_publication_is_served_and_refreshed_in_place_within_1e_5(
    server: ServerProcess, folders: tuple[Path, Path]
) -> None:
    for version in (0, 1, 0):
        KIND.reload(server.client, folders[version], f"{version}-x", 60.0)
        probe = read_probe(folders[version])
        assert largest_difference(probe, KIND.score(server.client, probe.token_ids))[0] < 1e-5


def test_a_response_is_scored_as_it_was_sampled_and_carries_the_label_of_its_weights(
    server: ServerProcess, folders: tuple[Path, Path]
) -> None:
    KIND.reload(server.client, folders[1], "1-x", 60.0)
    sampling = SamplingConfig(max_new_tokens=16, temperature=1.0)
    for seed in range(8):
        served = KIND.generate(server.client, [1, 3, 4], seed, EOS, sampling, greedy=False, top_k=0, timeout_s=60.0)
        assert served.weight_labels == {"1-x"}
        ids = [1, 3, 4, *served.response.response_ids]
        scored = KIND.score(server.client, ids)[2:]
        assert max(abs(a - b) for a, b in zip(served.response.logprobs, scored, strict=True)) < 1e-5
        assert (served.response.response_ids[-1] == EOS) == (served.response.finish_reason == "stop")


def test_weights_reloaded_without_packing_them_again_fail_the_probe(
    server: ServerProcess, folders: tuple[Path, Path]
) -> None:
    """Why `vllm_worker` is there: once this fails, vLLM's own reload is right on CPU and the class can go."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folders[0])}}
    server.client.post("/pause?mode=abort", {}, 60.0)
    server.client.post("/collective_rpc", body, 60.0)
    server.client.post("/resume", {}, 60.0)
    probe = read_probe(folders[0])
    assert largest_difference(probe, KIND.score(server.client, probe.token_ids))[0] > 1e-3


@pytest.mark.skipif("not __import__('os').environ.get('MOERL_TEST_VLLM_ROUTING')", reason="needs the V2 model runner")
def test_the_experts_of_every_token_are_returned(server: ServerProcess) -> None:
    sampling = SamplingConfig(max_new_tokens=4)
    served = KIND.generate(server.client, [1, 3, 4], 1, EOS, sampling, greedy=False, top_k=2, timeout_s=60.0)
    assert served.response.expert_ids is not None
    assert served.response.expert_ids.shape == (3 + len(served.response.response_ids), 2, 2)


def test_a_stop_string_ends_a_response_at_the_token_that_completes_it(
    server: ServerProcess, folders: tuple[Path, Path]
) -> None:
    KIND.reload(server.client, folders[0], "0-x", 60.0)
    tokenizer, sampling = build_char_tokenizer("0123456789>"), SamplingConfig(max_new_tokens=32, stop=("1", "23"))
    ended = 0
    for seed in range(8):
        served = KIND.generate(server.client, [1, 3, 4], seed, EOS, sampling, greedy=False, top_k=0, timeout_s=60.0)
        response = served.response
        text = tokenizer.decode(response.response_ids, skip_special_tokens=True).replace(" ", "")
        assert len(response.logprobs) == len(response.response_ids)
        assert not any(stop in text[:-1] for stop in sampling.stop)
        ended += response.finish_reason == "stop" and text.endswith(sampling.stop)
    assert ended > 4
