"""The probe: a server that serves anything but the publication is found out before a token is sampled from it."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe.config import ModelConfig, MoeConfig
from moe.model import build_model
from moe.probe import PROBE_FILE, read_probe
from moe.publication import save_publication
from moe.tokenizer import build_char_tokenizer
from steps import paths
from steps.adapters.cache_eviction import make_room
from steps.adapters.engines.catalog import SERVER_KINDS
from steps.adapters.engines.http_client import JsonClient, ServerRefused, ServerUnreachable
from steps.adapters.engines.server_process import AttachedServer
from steps.adapters.local_store import LocalStore
from steps.adapters.publications import upload_folder
from steps.config import RolloutConfig, RunConfig, ServerConfig
from steps.engine_serving import PublicationServer
from steps.engine_transport import ExchangeDowngraded
from steps.errors import ConfigError, DataError, ServiceUnavailable
from steps.interruption import Interruption
from tests.doubles.json_server import serving
from tests.doubles.served_policy import FAULTS, ServedPolicy
from tests.doubles.sglang_server import SglangDouble
from tests.doubles.vllm_server import VllmDouble

RUN = "tiny"
SHAPE = ModelConfig(hidden_size=32, num_key_value_heads=4, moe_intermediate_size=32, num_experts=4)
DOUBLES: dict[str, Any] = {"vllm": VllmDouble, "sglang": SglangDouble}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the policy versions 0 and 1: their weights differ as after a small update."""
    root = tmp_path_factory.mktemp("published")
    store, model = LocalStore(root / "store"), build_model(SHAPE, vocab_size=6, seed=0)
    for version in (0, 1):
        save_publication(model, build_char_tokenizer("abc"), root / f"v{version}")
        upload_folder(store, root / f"v{version}", paths.publication_prefix(RUN, version), {"policy_version": version})
        for parameter in model.parameters():
            parameter.data.mul_(1.001)
    return root


@pytest.fixture(params=sorted(DOUBLES))
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def policy(published: Path) -> ServedPolicy:
    return ServedPolicy(published / "v0")


@pytest.fixture
def url(engine: str, policy: ServedPolicy) -> Iterator[str]:
    with serving(DOUBLES[engine](policy)) as address:
        yield address


def make(published: Path, tmp_path: Path, engine: Any, url: str, **server: Any) -> PublicationServer:
    config = RunConfig(rollout=RolloutConfig(engine=engine, server=ServerConfig(**server)))
    return PublicationServer(context_of(published, tmp_path, config), "127.0.0.1", tmp_path, attach=url)


def context_of(published: Path, tmp_path: Path, config: RunConfig) -> Any:
    return SimpleNamespace(
        run_id=RUN,
        config=config,
        store=LocalStore(published / "store"),
        environment=SimpleNamespace(cache_dir=tmp_path / "cache"),
        interruption=Interruption(),
        say=lambda line: None,
    )


def test_a_version_is_served_once_its_probe_is_confirmed_and_then_under_its_own_label(
    published: Path, tmp_path: Path, engine: str, url: str, policy: ServedPolicy
) -> None:
    server = make(published, tmp_path, engine, url)
    first = server.serve(0, 0)
    assert first["url"] == url and first["label"].startswith("0-")
    second = server.serve(1, 0)
    assert policy.label == second["label"] != first["label"]
    assert second["start"] == first["start"]
    assert second["report"]["loaded"] == "refreshed"
    assert second["report"]["probe_difference"] < 1e-5
    transport = second["transport"]
    assert (transport["requested"], transport["observed"]) == ("the engine's default", "none: one rank")


def test_a_version_that_is_served_already_is_not_loaded_again(
    published: Path, tmp_path: Path, engine: str, url: str, policy: ServedPolicy
) -> None:
    server = make(published, tmp_path, engine, url)
    served = server.serve(1, 0)
    policy.fault = "wrong dtype"
    assert server.serve(1, 0) == served


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault])
def test_the_probe_catches(
    published: Path, tmp_path: Path, engine: str, url: str, policy: ServedPolicy, fault: str
) -> None:
    server = make(published, tmp_path, engine, url)
    server.serve(0, 0)
    policy.fault = fault
    with pytest.raises(
        DataError, match=rf"{engine} at {url} does not serve policy version 1: a log-probability of its"
    ):
        server.serve(1, 0)
    assert policy.label.startswith("unproved-1-")
    policy.fault = ""
    assert server.serve(1, 0)["label"] == policy.label


def test_a_truncated_file_never_reaches_the_server(
    published: Path, tmp_path: Path, engine: str, url: str, policy: ServedPolicy
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(published / "store", damaged / "store")
    (weights,) = (damaged / "store").glob(f"{paths.publication_prefix(RUN, 1)}/**/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    server = make(damaged, tmp_path, engine, url)
    before = server.serve(0, 0)["label"]
    with pytest.raises(DataError, match=r"model\.safetensors"):
        server.serve(1, 0)
    assert policy.label == before


def test_a_downgraded_exchange_of_experts_is_an_error(published: Path, tmp_path: Path, policy: ServedPolicy) -> None:
    with serving(VllmDouble(policy, backend="allgather_reducescatter")) as url:
        backend = "deepep_low_latency"
        server = make(published, tmp_path, "vllm", url, data_parallel_size=2, all2all_backend=backend)
        with pytest.raises(ExchangeDowngraded, match=f'"{backend}": vllm uses allgather_reducescatter') as downgrade:
            server.serve(0, 0)
    evidence = downgrade.value.transport
    assert (evidence["requested"], evidence["observed"]) == (backend, "allgather_reducescatter")
    assert evidence["status"] == "downgrade"


def test_a_downgrade_that_is_allowed_is_reported(published: Path, tmp_path: Path, policy: ServedPolicy) -> None:
    server_config = ServerConfig(data_parallel_size=2, all2all_backend="deepep_v2")
    rollout = RolloutConfig(engine="vllm", server=server_config)
    config = RunConfig(rollout=rollout, moe=MoeConfig(on_downgrade="warn"))
    with serving(VllmDouble(policy, backend="allgather_reducescatter")) as url:
        server = PublicationServer(context_of(published, tmp_path, config), "127.0.0.1", tmp_path, attach=url)
        transport = server.serve(0, 0)["transport"]
    assert (transport["requested"], transport["observed"]) == ("deepep_v2", "allgather_reducescatter")
    assert (transport["status"], transport["ranks"], transport["versions"]) == ("downgrade", 2, {"vllm": "0.32.0"})


@dataclass
class Starts:
    """In place of processes: every start gives the same server, which is healthy or not as `sick` says."""

    url: str
    count: int = 0
    sick: bool = False

    def __call__(self, *_: Any) -> Any:
        self.count += 1
        self.sick = False
        started = AttachedServer(self.url)
        started.wait_until_healthy = lambda *_: None  # type: ignore[method-assign]
        return started


@pytest.fixture
def starts(engine: str, url: str, monkeypatch: pytest.MonkeyPatch) -> Starts:
    made, kind = Starts(url), SERVER_KINDS[engine]
    healthy = kind.is_healthy
    monkeypatch.setattr("steps.engine_serving.ServerProcess", made)
    monkeypatch.setattr(type(kind), "is_healthy", lambda self, client, *_: not made.sick and healthy(client))
    return made


def test_a_hung_server_is_started_again_once_for_all_who_saw_it_fail(
    published: Path, tmp_path: Path, engine: str, starts: Starts
) -> None:
    server = make(published, tmp_path, engine, "")
    assert server.serve(0, 0)["start"] == 1
    starts.sick = True
    assert server.serve(0, 1)["start"] == 2
    starts.sick = True
    assert server.serve(0, 1)["start"] == 2  # a second worker that saw the first start fail
    assert starts.count == 2


def test_a_healthy_server_is_not_started_again_because_a_request_failed(
    published: Path, tmp_path: Path, engine: str, starts: Starts
) -> None:
    server = make(published, tmp_path, engine, "")
    server.serve(0, 0)
    assert server.serve(0, 1)["start"] == starts.count == 1


def test_weights_that_are_not_taken_in_place_are_loaded_by_a_new_start_and_proved(
    published: Path, tmp_path: Path, engine: str, starts: Starts, policy: ServedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make(published, tmp_path, engine, "")
    server.serve(0, 0)
    policy.load(published / "v1")  # what a new start would do

    def refuse(*_: Any) -> None:
        raise ServerRefused(500, "out of memory")

    monkeypatch.setattr(type(SERVER_KINDS[engine]), "reload", refuse)
    served = server.serve(1, 0)
    assert (served["start"], served["report"]["loaded"]) == (2, "restarted")


def test_a_server_that_is_killed_before_its_weights_are_proved_is_started_again(
    published: Path, tmp_path: Path, engine: str, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, kind = make(published, tmp_path, engine, ""), type(SERVER_KINDS[engine])
    killed, score = [ServerUnreachable("connection refused")], kind.score

    def score_or_fail(self: Any, *arguments: Any) -> list[float]:
        if killed:
            raise killed.pop()
        return score(self, *arguments)

    monkeypatch.setattr(kind, "score", score_or_fail)
    served = server.serve(0, 0)
    assert (served["start"], served["report"]["loaded"]) == (2, "restarted")


def test_a_server_of_somebody_else_that_takes_no_weights_is_a_failure_and_no_bug(
    published: Path, tmp_path: Path, engine: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ServerRefused(404, "no such path")

    monkeypatch.setattr(type(SERVER_KINDS[engine]), "reload", refuse)
    with pytest.raises(ServiceUnavailable, match=f"{engine}: no such path"):
        make(published, tmp_path, engine, url).serve(0, 0)


def test_a_worker_of_an_iteration_that_is_over_does_not_take_the_server_from_the_others(
    published: Path, tmp_path: Path, engine: str, url: str, policy: ServedPolicy
) -> None:
    server = make(published, tmp_path, engine, url)
    late = server.serve(0, 0)
    label = server.serve(1, 0)["label"]
    with pytest.raises(ServiceUnavailable, match="policy version 1 is served by now, not 0"):
        server.serve(0, late["start"])
    assert policy.label == label
    assert server.serve(0, 0)["label"] == late["label"], "who begins with an older version may have it"


def test_a_server_whose_weights_somebody_else_replaced_gets_ours_again(
    published: Path, tmp_path: Path, engine: str, url: str, policy: ServedPolicy
) -> None:
    server = make(published, tmp_path, engine, url)
    served = server.serve(1, 0)
    policy.load(published / "v0")
    policy.label = "default"  # as after a restart by whoever keeps it
    assert server.serve(1, served["start"])["label"] == policy.label == served["label"]
    probe = read_probe(published / "v1")
    assert policy.score(list(probe.token_ids)) == pytest.approx(probe.logprobs, abs=1e-4)


def test_a_host_lets_go_of_the_publications_that_it_served_before(
    published: Path, tmp_path: Path, engine: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, cache = make(published, tmp_path, engine, url), tmp_path / "cache"
    server.serve(0, 0)
    server.serve(1, 0)
    assert len(list(cache.glob("*/model.safetensors"))) == 2
    monkeypatch.setenv("MOERL_CACHE_BYTES", "1")
    make_room(cache, 0)
    (kept,) = cache.glob("*/model.safetensors")
    assert read_probe(kept.parent) == read_probe(published / "v1")


def test_routing_of_the_sampler_needs_a_gpu_for_a_server_that_we_start(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steps.engine_serving.GPU_DEVICE", tmp_path / "no-device")
    config = RunConfig(rollout=RolloutConfig(engine="vllm"), moe=MoeConfig(routing_replay="sampler"))
    context = context_of(published, tmp_path, config)
    with pytest.raises(
        ConfigError, match=r'moe\.routing_replay = "sampler": vllm returns the experts .* on a GPU only'
    ):
        PublicationServer(context, "127.0.0.1", tmp_path)
    PublicationServer(context, "127.0.0.1", tmp_path, attach="http://127.0.0.1:1")


@pytest.mark.parametrize("content", [None, "", "{}", '{"token_ids": [1, 2], "logprobs": [NaN]}', '{"token_ids": [1]}'])
def test_a_probe_that_is_missing_or_malformed_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / PROBE_FILE).write_text(content)
    with pytest.raises(ValueError, match=r"^[^\n]*probe\.json: [^\n]+$"):
        read_probe(tmp_path)


def test_the_kinds_are_those_of_the_configuration() -> None:
    assert sorted(SERVER_KINDS) == ["sglang", "vllm"]
    assert not SERVER_KINDS["vllm"].is_healthy(JsonClient("http://127.0.0.1:1"))
