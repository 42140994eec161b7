"""Requests and replies of both inference servers, against doubles that serve a real policy."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.config import ModelConfig, SamplingConfig
from moe.model import build_model, load_model
from moe.probe import largest_difference, read_probe
from moe.publication import save_publication
from moe.sampler import Sampler
from moe.tokenizer import build_char_tokenizer
from steps.adapters.engines.catalog import SERVER_KINDS
from steps.adapters.engines.http_client import JsonClient, ServerRefused, ServerUnreachable
from steps.adapters.engines.server_kind import Launch, ServerKind, server_environment
from steps.adapters.engines.server_process import bound_log, reserve_port
from steps.config import ServerConfig
from tests.doubles.json_server import serving
from tests.doubles.served_policy import ServedPolicy
from tests.doubles.sglang_server import SglangDouble
from tests.doubles.vllm_server import VllmDouble

DOUBLES = {"vllm": VllmDouble, "sglang": SglangDouble}
SAMPLING = SamplingConfig(max_new_tokens=6, temperature=0.7)
EOS = 2
SHAPE = ModelConfig(hidden_size=32, moe_intermediate_size=32, num_experts=4, num_layers=2, max_position_embeddings=40)


@dataclass(frozen=True)
class Case:
    kind: ServerKind
    client: JsonClient
    policy: ServedPolicy
    double: Any


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two publications of one model's shape."""
    made = [tmp_path_factory.mktemp(f"publication-{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(made):
        save_publication(build_model(SHAPE, vocab_size=6, seed=seed), build_char_tokenizer("abc"), folder)
    return made[0], made[1]


@pytest.fixture(params=sorted(DOUBLES))
def case(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Iterator[Case]:
    policy = ServedPolicy(folders[0])
    double = DOUBLES[request.param](policy, returns_routing=True)
    with serving(double) as url:
        yield Case(SERVER_KINDS[request.param], JsonClient(url), policy, double)


def generate(case: Case, prompt: list[int], seed: int, **options: Any) -> Any:
    settings = {"greedy": False, "top_k": 0, "timeout_s": 30.0} | options
    return case.kind.generate(case.client, prompt, seed, EOS, SAMPLING, **settings)


def test_a_response_has_the_tokens_log_probabilities_and_end_that_the_policy_gave(case: Case) -> None:
    for seed in (1, 2**63 - 1):
        expected = Sampler(case.policy.model, (EOS,), 0).sample([[1, 3, 4]], [seed], SAMPLING)[0]
        served = generate(case, [1, 3, 4], seed)
        assert served.response == expected
        assert served.weight_labels == {"default"}


def test_a_seed_of_64_bits_is_sent_within_the_servers_range(case: Case) -> None:
    assert generate(case, [1, 3], 2**64 - 1) == generate(case, [1, 3], 2**63 - 1)


def test_only_our_stop_token_ends_a_response_and_no_default_of_the_model_counts(case: Case) -> None:
    generate(case, [1, 3], 5)
    parameters = case.double.requests[-1]["sampling_params"]
    assert (parameters["ignore_eos"], parameters["stop_token_ids"], parameters["min_p"]) == (True, [EOS], 0.0)


def test_greedy_takes_the_most_likely_tokens(case: Case) -> None:
    expected = Sampler(case.policy.model, (EOS,), 0).sample([[1, 4]], [0], SAMPLING, greedy=True)[0]
    assert generate(case, [1, 4], 0, greedy=True).response.response_ids == expected.response_ids


def test_the_experts_of_every_token_but_the_last_are_returned(case: Case) -> None:
    sampler = Sampler(case.policy.model, (EOS,), 0, record_routing=True)
    expected = sampler.sample([[1, 3, 5]], [9], SAMPLING)[0].expert_ids
    found = generate(case, [1, 3, 5], 9, top_k=2).response.expert_ids
    assert expected is not None
    is_known = expected[:-1] >= 0
    assert torch.equal(found[:-1][is_known], expected[:-1][is_known])
    assert bool((found[-1] == -1).all())


def test_a_server_without_routed_experts_is_told_from_one_with(case: Case) -> None:
    case.double.returns_routing = False
    with pytest.raises(ServerRefused, match="routed.experts"):
        generate(case, [1, 3, 5], 9, top_k=2)


def test_the_score_is_the_one_in_the_probe(case: Case, folders: tuple[Path, Path]) -> None:
    probe = read_probe(folders[0])
    assert largest_difference(probe, case.kind.score(case.client, probe.token_ids))[0] < 1e-6


def test_a_reload_serves_the_new_weights_under_their_label(case: Case, folders: tuple[Path, Path]) -> None:
    case.kind.reload(case.client, folders[1], "unproved", 30.0)
    probe = read_probe(folders[1])
    assert largest_difference(probe, case.kind.score(case.client, probe.token_ids))[0] < 1e-6
    assert generate(case, [1], 3).weight_labels == {"unproved"}
    case.kind.label(case.client, "7-abc")
    assert generate(case, [1], 3).weight_labels == {"7-abc"}


def test_weights_that_a_server_does_not_take_are_refused_in_its_words(case: Case, tmp_path: Path) -> None:
    with pytest.raises(ServerRefused, match=r"config\.json"):
        case.kind.reload(case.client, tmp_path, "unproved", 30.0)


def test_a_server_that_is_gone_is_not_healthy_and_not_reachable(case: Case) -> None:
    assert case.kind.is_healthy(case.client)
    gone = replace(case, client=JsonClient("http://127.0.0.1:1"))
    assert not gone.kind.is_healthy(gone.client)
    with pytest.raises(ServerUnreachable):
        generate(gone, [1], 0)


def test_another_releases_reply_is_named_by_what_it_lacks(case: Case) -> None:
    def older(method: str, path: str, body: dict[str, Any]) -> Any:
        return {"choices": [{"token_ids": [3], "finish_reason": "stop"}], "output_ids": [3]}

    with serving(older) as url, pytest.raises(ServerRefused, match="the answer has no"):
        generate(replace(case, client=JsonClient(url)), [1], 0)


def test_the_version_is_the_servers_own_word(case: Case) -> None:
    assert case.kind.version(case.client) in ("0.32.0", "0.5.23")


def test_the_exchange_of_experts_is_the_servers_own_word(case: Case) -> None:
    case.double.backend = "deepep_v2"
    assert case.kind.observed_exchange(case.client) == "deepep_v2"


def launch(folder: Path, **changes: Any) -> Launch:
    server = ServerConfig(data_parallel_size=8, expert_parallel=True, all2all_backend="deepep_low_latency")
    made = Launch(
        folder=folder, dtype="bfloat16", address="10.0.0.7", port=8000, max_model_len=640, server=server, on_gpu=True,
        record_routing=True,
    )  # fmt: skip
    return replace(made, **changes)


def test_vllm_is_started_with_every_setting_and_without_the_models_sampling_defaults(tmp_path: Path) -> None:
    words = SERVER_KINDS["vllm"].arguments(launch(tmp_path))
    for pair in (
        ("--dtype", "bfloat16"),
        ("--max-model-len", "640"),
        ("--data-parallel-size", "8"),
        ("--all2all-backend", "deepep_low_latency"),
        ("--logprobs-mode", "processed_logprobs"),
        ("--generation-config", "vllm"),
    ):
        assert words[words.index(pair[0]) + 1] == pair[1]
    assert {"--enable-expert-parallel", "--enable-return-routed-experts", "--enable-scale-out"} < set(words)
    assert "--enforce-eager" not in words


def test_sglang_is_started_so_that_seeds_count(tmp_path: Path) -> None:
    words = SERVER_KINDS["sglang"].arguments(launch(tmp_path))
    assert words[words.index("--moe-a2a-backend") + 1] == "deepep_low_latency"
    assert {"--enable-deterministic-inference", "--enable-return-routed-experts"} < set(words)


def test_a_server_gets_neither_secrets_nor_another_interpreters_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("AWS_SECRET_ACCESS_KEY", "MOERL_DATABASE_URL", "MLFLOW_TRACKING_PASSWORD", "PYTHONPATH", "HF_TOKEN")
    for name in (*names, "PGPASSWORD", "VLLM_API_KEY", "DATABASE_URL"):
        monkeypatch.setenv(name, "marked")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    for kind in SERVER_KINDS.values():
        environment = server_environment(kind, launch(tmp_path, on_gpu=False))
        assert "marked" not in environment.values()
        assert (environment["NCCL_DEBUG"], environment["TOKENIZERS_PARALLELISM"]) == ("WARN", "false")


def test_the_environment_decides_over_the_defaults_for_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = SERVER_KINDS["vllm"]
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    assert server_environment(kind, launch(tmp_path, on_gpu=False))["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-31")
    assert server_environment(kind, launch(tmp_path, on_gpu=False))["VLLM_CPU_OMP_THREADS_BIND"] == "0-31"


def test_the_folder_of_a_publication_still_loads_with_its_probe(folders: tuple[Path, Path]) -> None:
    assert load_model(folders[0]).config.vocab_size == 6


def test_a_stop_string_ends_a_response_and_its_token_is_kept(case: Case) -> None:
    sampling = replace(SAMPLING, stop=("b",))
    for seed in range(8):
        sampler = Sampler(case.policy.model, (EOS,), 0, tokenizer=case.policy.tokenizer)
        expected = sampler.sample([[1, 3, 4]], [seed], sampling)[0]
        served = case.kind.generate(case.client, [1, 3, 4], seed, EOS, sampling, greedy=False, top_k=0, timeout_s=30.0)
        assert served.response == expected
    parameters = case.double.requests[-1]["sampling_params"]
    assert parameters["stop"] == ["b"]


def test_a_reserved_port_is_free_for_the_server_alone() -> None:
    with reserve_port("127.0.0.1") as reserved:
        address = reserved.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with socket.socket() as stranger, pytest.raises(OSError, match="Address already in use"):
            stranger.bind(address)
        with socket.create_server(address), socket.create_connection(address):  # as servers do, with SO_REUSEADDR
            pass


def test_a_log_is_begun_anew_before_it_fills_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steps.adapters.engines.server_process.LOG_BYTES", 10)
    log = tmp_path / "server.log"
    bound_log(log)
    with log.open("ab", buffering=0) as server:
        server.write(b"0123456789")
        bound_log(log)
        server.write(b"a")
        bound_log(log)
        server.write(b"b")
    assert (log.read_bytes(), (tmp_path / "server.log.1").read_bytes()) == (b"b", b"0123456789a")
