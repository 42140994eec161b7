"""How a worker comes to an engine host: one of a fleet by its address, or the one that this machine's workers share."""

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from transformers import AutoConfig

from moe.families import experts_per_token
from moe.sampler import SamplingStopped
from steps.adapters.engines.catalog import SERVER_KINDS
from steps.adapters.engines.http_client import JsonClient, ServerRefused, ServerUnreachable, require
from steps.adapters.engines.server_engine import Served, ServerEngine
from steps.adapters.engines.server_process import last_words, require_module, server_python
from steps.config import RolloutConfig
from steps.engine_locks import STATUS_TIMEOUT_S, HostFiles, run_identity
from steps.engine_transport import ExchangeDowngraded
from steps.entrypoint import RankContext, StepContext
from steps.environment import service_deadline_s
from steps.errors import ConfigError, DataError, Interrupted, ServiceUnavailable

HOST_START_TIMEOUT_S = 120.0
"""A host answers once Python has loaded its modules; the server is started when it is asked for a version."""
_POLL_S = 0.05
_PAUSE_S = 1.0
PROJECT = str(Path(__file__).resolve().parents[1])
_ERRORS: dict[int, type[ConfigError | DataError | ServiceUnavailable]] = {
    error.exit_code: error for error in (ConfigError, DataError, ServiceUnavailable)
}


def load_server_engine(
    context: StepContext, folder: Path, version: int, *, worker: int, record_routing: bool
) -> ServerEngine:
    """The engine of `rollout.engine` vllm or sglang, once its server serves the version. `folder`: its settings.

    Raises Interrupted when asked to stop meanwhile, and what the host says.
    """
    config, kind = context.config, SERVER_KINDS[context.config.rollout.engine]
    top_k = experts_per_token(AutoConfig.from_pretrained(folder, local_files_only=True)) if record_routing else 0
    hosts = EngineHosts(context, worker)
    engine = ServerEngine(kind, hosts, config.rollout.server, folder=folder, version=version, top_k=top_k)
    try:
        engine.refresh(folder, version, lambda: context.interruption.requested)
    except SamplingStopped:
        raise Interrupted("interrupted while the inference server loads the policy; run again") from None
    except ExchangeDowngraded as downgrade:
        context.transport = downgrade.transport
        raise
    context.transport = hosts.transport
    return engine


class EngineHosts:
    """The host of one worker. Open while the worker lives: an idle host on this machine ends when nobody is open."""

    def __init__(self, context: RankContext, worker: int) -> None:
        """ConfigError when MOERL_ENGINE_URL or `rollout.server.url` names no host."""
        self._context, self._identity = context, run_identity(context)
        urls = [url.strip() for url in fleet_urls(context.config.rollout.server.url).split(",") if url.strip()]
        self._fleet_url = urls[worker % len(urls)] if urls else ""
        self._files = HostFiles(context.environment.cache_dir.absolute() / "engines" / self._identity)
        self._mark: IO[str] | None = None
        self.transport: dict[str, Any] = {}
        """How the server's experts exchange tokens, as the host reported last."""
        if not urls:
            self._files.folder.mkdir(parents=True, exist_ok=True)
            self._mark = self._files.use()

    def serve(self, version: int, failed_start: int, stop: Callable[[], bool]) -> Served:
        """Have the host serve a version; SamplingStopped when `stop` says so meanwhile.

        Raises what the host says: ConfigError, DataError or ServiceUnavailable; the last one also when there is none.
        """
        results: SimpleQueue[Served | Exception] = SimpleQueue()

        def ask() -> None:
            try:
                results.put(self._serve(version, failed_start))
            except Exception as error:  # raised again by the thread that waits
                results.put(error)

        threading.Thread(target=ask, name="ask-engine-host", daemon=True).start()
        while True:
            try:
                result = results.get(timeout=_POLL_S)
            except Empty:
                if stop():
                    raise SamplingStopped("sampling stopped while the engine host was asked") from None
                continue
            if isinstance(result, Exception):
                raise result
            return result

    def close(self) -> None:
        if self._mark is not None:
            self._mark.close()

    def _serve(self, version: int, failed_start: int) -> Served:
        server = self._context.config.rollout.server
        # Two starts at most, one before and one after weights that were not taken, and what other workers asked for.
        timeout_s = 4 * server.start_timeout_s
        body = {"run": self._identity, "version": version, "failed_start": failed_start}
        away_since_s = math.inf
        while True:
            url = self._fleet_url or self._local_host()
            try:
                answer = JsonClient(url).post("/serve", body, timeout_s)
                self.transport = require(answer, "transport")
                return Served(*(require(answer, key) for key in ("url", "label", "start", "report")))
            except ServerRefused as refusal:
                raise _host_error(refusal, url) from None
            except ServerUnreachable as error:  # killed, or ended while we asked: there is another one soon
                away_since_s = min(away_since_s, time.monotonic())
                if time.monotonic() - away_since_s >= service_deadline_s():
                    raise ServiceUnavailable(f"engine host at {url} does not answer ({error}); run again") from None
                time.sleep(_PAUSE_S)

    def _local_host(self) -> str:
        """URL of this machine's host for this run, started if there is none."""
        with self._files.starting():
            url = self._files.announced()
            if url and _is_there(url, self._identity):
                return url
            process, log_begin = self._start()
            deadline_s = time.monotonic() + HOST_START_TIMEOUT_S
            while time.monotonic() < deadline_s and process.poll() is None:
                started = self._files.announced()
                if started != url and _is_there(started, self._identity):
                    return started
                time.sleep(_POLL_S)
            process.kill()
        refused = _ERRORS.get(process.wait(), ServiceUnavailable)
        raise refused(f"the engine host could not be started: {last_words(self._files.log, log_begin)}")

    def _start(self) -> tuple["subprocess.Popen[bytes]", int]:
        """In a session of its own: it outlives this step, and the iteration. Also returns where its log begins."""
        self._context.say(f"engine host started; its log is {self._files.log}")
        command = [sys.executable, "-m", "steps.engine_host", "--run", self._context.run_id]
        with self._files.log.open("ab") as log:
            begin = log.tell()
            process = subprocess.Popen(
                [*command, "--files", str(self._files.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (PROJECT, os.environ.get("PYTHONPATH"))))},
            )
        return process, begin


def check_server_package(rollout: RolloutConfig) -> None:
    """ConfigError when this machine would have to start a server of `rollout.engine` and has no package for it."""
    if rollout.engine in SERVER_KINDS and not fleet_urls(rollout.server.url):
        require_module(SERVER_KINDS[rollout.engine], server_python())


def fleet_urls(configured: str) -> str:
    """MOERL_ENGINE_URL goes before `rollout.server.url`: who deploys the fleet knows its address."""
    urls = os.environ.get("MOERL_ENGINE_URL") or configured
    for url in filter(None, (part.strip() for part in urls.split(","))):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"rollout.server.url = {urls!r}: {url!r} is not http://HOST:PORT; correct it")
    return urls


def _is_there(url: str, identity: str) -> bool:
    try:
        answer: Any = JsonClient(url).get("/status", STATUS_TIMEOUT_S)
    except (ServerUnreachable, ServerRefused):
        return False
    return isinstance(answer, dict) and answer.get("run") == identity


def _host_error(refusal: ServerRefused, url: str) -> Exception:
    """What the host could not do, in its words and with its exit code."""
    try:
        said = json.loads(refusal.data)
        if "transport" in said:
            return ExchangeDowngraded(str(said["error"]), said["transport"])
        return _ERRORS[said["exit_code"]](str(said["error"]))
    except (ValueError, KeyError, TypeError):
        return ServiceUnavailable(f"engine host at {url}: {refusal}; see its log")
