"""Hosts and servers as real processes: shared, refreshed, restarted, and never left behind."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from moe.config import ModelConfig, MoeConfig, SamplingConfig
from moe.model import build_model
from moe.publication import save_publication
from moe.tokenizer import build_char_tokenizer
from steps import paths
from steps.adapters.engines.catalog import SERVER_KINDS
from steps.adapters.engines.http_client import JsonClient, ServerRefused
from steps.adapters.engines.server_engine import Served, ServerEngine
from steps.adapters.local_store import LocalStore
from steps.adapters.publications import upload_folder
from steps.config import RolloutConfig, RunConfig, ServerConfig
from steps.config_loader import config_json
from steps.engine_fleet import EngineHosts, check_server_package, fleet_urls, load_server_engine
from steps.engine_host import ControlServer, run_host
from steps.engine_locks import HostFiles, run_identity, stop_hosts
from steps.engine_transport import ExchangeDowngraded, exchange_report
from steps.errors import ConfigError, ServiceUnavailable
from steps.interruption import Interruption

REPOSITORY = Path(__file__).resolve().parent.parent
RUN = "tiny"
SAMPLING = SamplingConfig(max_new_tokens=4)
WAIT_S = 120.0


@dataclass(frozen=True)
class Place:
    """A run's services, and an interpreter whose package vllm is the double."""

    root: Path
    config: RunConfig
    environment: dict[str, str]
    opened: list[EngineHosts] = field(default_factory=list)

    def worker(self, number: int = 0) -> EngineHosts:
        context: Any = SimpleNamespace(
            run_id=RUN,
            config=self.config,
            store=LocalStore(self.root / "store"),
            environment=SimpleNamespace(cache_dir=self.root / "cache"),
            say=lambda line: None,
        )
        self.opened.append(EngineHosts(context, number))
        return self.opened[-1]

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Starts of the server, in their order."""
        path = self.root / "starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    package = tmp_path / "package" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text("from tests.doubles.vllm_server import main\n\nmain()\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/package:{REPOSITORY} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    server = ServerConfig(start_timeout_s=WAIT_S, request_timeout_s=30.0, idle_s=1.0)
    config = RunConfig(rollout=RolloutConfig(engine="vllm", server=server, sampling=SAMPLING))
    store = LocalStore(tmp_path / "store")
    store.put_bytes(paths.config_key(RUN), config_json(config).encode())
    shape = ModelConfig(hidden_size=32, moe_intermediate_size=32, num_experts=4)
    for version in (0, 1):
        folder = tmp_path / f"v{version}"
        save_publication(build_model(shape, vocab_size=6, seed=version), build_char_tokenizer("abc"), folder)
        upload_folder(store, folder, paths.publication_prefix(RUN, version), {"policy_version": version})
    variables = {
        "MOERL_STORE": str(tmp_path / "store"),
        "MOERL_DATABASE_URL": "sqlite:////never/opened.db",
        "MOERL_CACHE_DIR": str(tmp_path / "cache"),
        "MOERL_ENGINE_PYTHON": str(python),
        "DOUBLE_STATE": str(tmp_path),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made = Place(tmp_path, config, variables)
    yield made
    for worker in made.opened:
        worker.close()
    stop_hosts(tmp_path / "cache")
    wait_until(lambda: not any(is_alive(start[pid]) for start in made.starts for pid in ("pid", "engine_pid")))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def never() -> bool:
    return False


def engine_of(place: Place, hosts: EngineHosts, version: int) -> ServerEngine:
    server = place.config.rollout.server
    return ServerEngine(SERVER_KINDS["vllm"], hosts, server, folder=place.root / f"v{version}", version=version)


def test_workers_share_a_host_over_iterations_and_a_dead_server_is_started_again(place: Place) -> None:
    hosts = place.worker(0)
    first = hosts.serve(0, 0, never)
    hosts.close()
    engine = engine_of(place, place.worker(1), 1)
    engine.refresh(place.root / "v1", 1)
    assert engine.report()["loaded"] == "refreshed"
    assert len(place.starts) == 1
    assert first == Served(first.url, first.label, 1, first.report)
    (place.root / "die").touch()
    heard: list[int] = []
    responses = engine.sample([[1, 3]] * 8, range(8), SAMPLING, on_response=lambda row, _: heard.append(row))
    assert len(responses) == 8
    assert sorted(heard) == list(range(8))
    assert len(place.starts) == 2
    assert (engine.report()["policy_version"], engine.report()["recoveries"]) == (1, 1)
    known = {name for name in place.starts[0]["environment"] if name.startswith(("MOERL_", "AWS_", "MLFLOW_"))}
    assert known == set()


def test_a_killed_host_takes_its_server_along_and_is_replaced_and_an_idle_one_ends(place: Place) -> None:
    hosts = place.worker()
    hosts.serve(0, 0, never)
    (server,) = place.starts
    os.kill(parent_of(parent_of(server["pid"])), signal.SIGKILL)
    wait_until(lambda: not is_alive(server["pid"]) and not is_alive(server["engine_pid"]))
    assert hosts.serve(0, 0, never).start == 1
    second = place.starts[1]["pid"]
    assert is_alive(second)
    hosts.close()
    wait_until(lambda: not is_alive(second))


def test_a_host_that_is_killed_while_it_is_asked_is_replaced(place: Place) -> None:
    hosts, served = place.worker(), SimpleQueue[Served]()
    threading.Thread(target=lambda: served.put(hosts.serve(0, 0, never)), daemon=True).start()
    wait_until(lambda: bool(place.starts))
    os.kill(parent_of(parent_of(place.starts[0]["pid"])), signal.SIGKILL)
    assert served.get(timeout=WAIT_S).start == 1
    assert len(place.starts) == 2


def test_what_a_host_refuses_at_its_start_is_told_as_it_is(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(place.config, moe=MoeConfig(routing_replay="sampler"))
    LocalStore(place.root / "store").put_bytes(paths.config_key(RUN), config_json(config).encode())
    with pytest.raises(ConfigError, match=r'could not be started: .*moe\.routing_replay = "sampler"'):
        place.worker().serve(0, 0, never)


def test_a_host_refuses_workers_of_another_run_store_or_configuration(place: Place) -> None:
    context: Any = SimpleNamespace(run_id=RUN, config=place.config, store=LocalStore(place.root / "store"))
    ours = run_identity(context)
    others = [
        SimpleNamespace(**vars(context) | {"store": LocalStore(place.root / "other")}),
        SimpleNamespace(**vars(context) | {"config": replace(place.config, seed=99)}),
        SimpleNamespace(**vars(context) | {"run_id": "another"}),
    ]
    control = ControlServer("127.0.0.1", 0, ours)
    threading.Thread(target=control.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    client = JsonClient(control.url)
    for other in map(run_identity, others):
        with pytest.raises(ServerRefused, match=rf"serves run {ours}, not {other}") as refusal:
            client.post("/serve", {"run": other, "version": 0, "failed_start": 0}, WAIT_S)
        assert json.loads(refusal.value.data)["exit_code"] == ConfigError.exit_code
    with pytest.raises(ServerRefused, match="not a request"):
        client.post("/serve", {"run": "x" * 10**5}, WAIT_S)
    control.shutdown()


def test_a_downgrade_reaches_the_attempts_evidence_of_the_worker(place: Place) -> None:
    transport = exchange_report(ServerConfig(all2all_backend="deepep_v2"), "naive", "vllm", "0.32.0")

    class Serving:
        def serve(self, *_: Any) -> Any:
            raise ExchangeDowngraded("rollout.server.all2all_backend: vllm uses naive", transport)

        def bound_log(self) -> None: ...

        def stop(self) -> None: ...

    store = LocalStore(place.root / "store")
    context: Any = SimpleNamespace(
        run_id=RUN,
        config=place.config,
        store=store,
        environment=SimpleNamespace(cache_dir=place.root / "cache"),
        say=lambda line: None,
        interruption=Interruption(),
        transport={},
        metrics={},
    )
    control = ControlServer("127.0.0.1", 0, run_identity(context))
    serving: Any = Serving()
    host = threading.Thread(target=run_host, args=(context, control, serving, None), daemon=True)
    host.start()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MOERL_ENGINE_URL", control.url)
        with pytest.raises(ConfigError, match="vllm uses naive"):
            load_server_engine(context, place.root / "v0", 0, worker=0, record_routing=False)
    assert context.transport == transport
    control.stop_asked.set()
    host.join(WAIT_S)


def test_an_interpreter_without_the_package_is_a_configuration_error(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOERL_ENGINE_PYTHON", sys.executable)
    with pytest.raises(ConfigError, match=r'rollout\.engine = "vllm": .* has no package vllm; pip install vllm'):
        place.worker().serve(0, 0, never)


def test_a_missing_package_is_found_before_a_run_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOERL_ENGINE_PYTHON", raising=False)
    check_server_package(RolloutConfig())
    with pytest.raises(ConfigError, match=r'rollout\.engine = "sglang": .* has no package sglang; pip install sglang'):
        check_server_package(RolloutConfig(engine="sglang"))
    monkeypatch.setenv("MOERL_ENGINE_URL", "http://10.0.0.7:8700")
    check_server_package(RolloutConfig(engine="sglang"))


def test_a_fleet_is_named_by_the_environment_before_the_configuration(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fleet_urls("http://a:1") == "http://a:1"
    monkeypatch.setenv("MOERL_ENGINE_URL", "http://127.0.0.1:1, http://127.0.0.1:2")
    monkeypatch.setenv("MOERL_SERVICE_DEADLINE_S", "0")
    for worker, port in ((0, 1), (1, 2), (2, 1)):
        with pytest.raises(ServiceUnavailable, match=rf"engine host at http://127\.0\.0\.1:{port} does not answer"):
            place.worker(worker).serve(0, 0, never)
    assert not (place.root / "cache" / "engines").exists()


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.server\.url = 'engines:8700': 'engines:8700' is not http://"):
        fleet_urls("engines:8700")


def test_a_host_is_in_use_while_a_worker_holds_its_mark(tmp_path: Path) -> None:
    files = HostFiles(tmp_path)
    assert not files.in_use()
    with files.use(), files.use():
        assert files.in_use()
    assert not files.in_use()
    assert not HostFiles(tmp_path / "gone").in_use()
