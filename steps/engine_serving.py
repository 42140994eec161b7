"""One inference server, and what it serves: started on a publication, refreshed in place, proved by the probe."""

import json
import socket
import time
from pathlib import Path
from typing import Any

from moe.config import SamplingConfig
from moe.probe import Probe, largest_difference, read_probe
from steps import paths
from steps.adapters import cache_eviction
from steps.adapters.engines.catalog import SERVER_KINDS
from steps.adapters.engines.http_client import ServerRefused, ServerUnreachable
from steps.adapters.engines.server_kind import HANG_TIMEOUT_S, Launch
from steps.adapters.engines.server_process import (
    AttachedServer,
    RunningServer,
    ServerProcess,
    bound_log,
    reserve_port,
    server_python,
)
from steps.adapters.publications_cache import fetch_folder
from steps.adapters.publications_manifest import read_manifest
from steps.engine_transport import ONE_RANK, ExchangeDowngraded, exchange_report, ranks_of
from steps.entrypoint import RankContext
from steps.errors import ConfigError, DataError, ServiceUnavailable

TOLERANCE = {"float32": 1e-4}
TOLERANCE_OF_OTHERS = 0.25
"""bfloat16 engines and a float32 probe differ by up to about 0.2 where a near tie is routed otherwise."""
GPU_DEVICE = Path("/dev/nvidiactl")


class PublicationServer:
    """Owned by one thread: servers end with the thread that started them."""

    def __init__(self, context: RankContext, address: str, folder: Path, *, attach: str = "") -> None:
        """`folder` takes the server's log; `attach`: URL of a server that runs already. ConfigError: no GPU."""
        self._context, self._address, self._attach = context, address, attach
        self._config = context.config
        self._kind = SERVER_KINDS[self._config.rollout.engine]
        self._on_gpu = GPU_DEVICE.exists()
        self._record_routing = self._config.moe.routing_replay == "sampler"
        if self._record_routing and not self._on_gpu and not attach:
            raise ConfigError(
                f'moe.routing_replay = "sampler": {self._kind.name} returns the experts of a token on a GPU only, and '
                "there is none; use trainer or none, or rollout.engine = torch"
            )
        self._log = folder / "server.log"
        self._port: socket.socket | None = None
        self._copies: set[Path] = set()
        """Of publications, held in the node's cache: a host outlives many."""
        self._server: RunningServer | None = None
        self._starts = 0
        self._served_label, self._served_version = "", -1
        self._report: dict[str, Any] = {}
        self._transport: dict[str, Any] = {}

    def serve(self, version: int, failed_start: int) -> dict[str, Any]:
        """Serve a policy version, starting, refreshing or restarting the server as needed; how to reach it.

        Raises DataError when the publication is damaged or the server does not serve it, ServiceUnavailable when there
        is no working server, or when a worker whose server failed is late: others are sampling from a later version.
        """
        if failed_start and version < self._served_version:
            raise ServiceUnavailable(
                f"policy version {self._served_version} is served by now, not {version}: that iteration is over"
            )
        prefix = paths.publication_prefix(self._context.run_id, version)
        label = f"{version}-{read_manifest(self._context.store, prefix).sha256[:16]}"
        if failed_start == self._starts and self._server is not None:
            self._look_at(self._server)
        if self._server is None or not self._server.is_running or label != self._served_label:
            folder = fetch_folder(self._context.store, prefix, self._context.environment.cache_dir)
            self._copies.add(folder)
            self._put(folder, label, version)
            for copy in self._copies - {folder}:
                cache_eviction.release(copy)
            self._copies = {folder}
        assert self._server is not None
        where = {"url": self._server.client.url, "label": label, "start": self._starts}
        return where | {"report": self._report, "transport": self._transport}

    def _look_at(self, server: RunningServer) -> None:
        """End a server that is dead or hung; one whose weights somebody else has replaced is to get ours again."""
        one_token = SamplingConfig(max_new_tokens=1)
        options: dict[str, Any] = {"greedy": True, "top_k": 0, "timeout_s": HANG_TIMEOUT_S}
        try:
            if not self._kind.is_healthy(server.client, HANG_TIMEOUT_S):
                raise ServerUnreachable("it generates nothing")
            labels = self._kind.generate(server.client, [0], 0, 0, one_token, **options).weight_labels
        except (ServerUnreachable, ServerRefused) as error:
            self._context.say(f"start {self._starts} of the server is dead or hung ({error}): it is started again")
            self.stop()
            return
        if labels != {self._served_label}:
            self._context.say(f"the server has other weights by now ({', '.join(sorted(labels))})")
            self._served_label = ""

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None
        self._served_label = ""

    def bound_log(self) -> None:
        bound_log(self._log)

    def _put(self, folder: Path, label: str, version: int) -> None:
        """Get the weights of `folder` into the server, and let nobody use them before they are proved."""
        self._served_label = ""
        started_s = time.perf_counter()
        try:
            probe = read_probe(folder)
        except ValueError as error:
            raise DataError(str(error)) from None
        try:
            how = self._load_and_prove(folder, label, version, probe)
        except (ServerUnreachable, ServerRefused) as error:  # it may have been killed: once more, on a new one
            self._context.say(f"the server failed before the weights were proved: {error}; it is started again")
            self.stop()
            try:
                how = self._load_and_prove(folder, label, version, probe)
            except (ServerUnreachable, ServerRefused) as again:
                self.stop()
                raise ServiceUnavailable(f"{self._kind.name}: {again}") from None
        loaded_s = time.perf_counter() - started_s
        self._report |= {"engine": self._kind.name, "policy_version": version, "loaded": how, "load_seconds": loaded_s}
        self._served_label, self._served_version = label, version
        self._context.say(
            f"policy version {version} {how} in {loaded_s:.2f} s, probe off by {self._report['probe_difference']:.1e}"
        )

    def _load_and_prove(self, folder: Path, label: str, version: int, probe: Probe) -> str:
        how = self._load(folder, f"unproved-{label}", probe)
        assert self._server is not None
        self._prove(folder, probe, version)
        self._report["engine_version"] = self._kind.version(self._server.client)
        self._transport = self._check_exchange(self._report["engine_version"])
        self._kind.label(self._server.client, label)
        return how

    def _load(self, folder: Path, label: str, probe: Probe) -> str:
        """ "started", "refreshed" or, where the server would not take the weights in place, "restarted"."""
        if self._server is not None and self._server.is_running:
            try:
                timeout_s = self._config.rollout.server.start_timeout_s
                self._kind.reload(self._server.client, folder, label, timeout_s)
                return "refreshed"
            except (ServerUnreachable, ServerRefused) as error:
                self._context.say(f"the server did not take the weights: {error}; it is started again")
        self.stop()
        self._start(folder, probe)
        assert self._server is not None
        if self._attach:
            self._kind.reload(self._server.client, folder, label, self._config.rollout.server.start_timeout_s)
        return "started" if self._starts == 1 else "restarted"

    def _start(self, folder: Path, probe: Probe) -> None:
        server = self._config.rollout.server
        self._starts += 1
        if self._attach:
            self._server = AttachedServer(self._attach)
        else:
            self._server = ServerProcess(self._kind, self._launch(folder, probe), server_python(), self._log)
        try:
            self._server.wait_until_healthy(
                self._kind, server.start_timeout_s, lambda: self._context.interruption.requested
            )
        except ServiceUnavailable:
            self.stop()
            raise

    def _launch(self, folder: Path, probe: Probe) -> Launch:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        sampling = self._config.rollout.sampling
        self._port = self._port or reserve_port(self._address)
        return Launch(
            folder=folder,
            dtype=str(settings.get("torch_dtype") or "float32"),
            address=self._address,
            port=int(self._port.getsockname()[1]),
            max_model_len=max(sampling.max_prompt_tokens + sampling.max_new_tokens, len(probe.token_ids) + 1),
            server=self._config.rollout.server,
            on_gpu=self._on_gpu,
            record_routing=self._record_routing,
        )

    def _prove(self, folder: Path, probe: Probe, version: int) -> None:
        assert self._server is not None
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tolerance = self._config.rollout.server.probe_tolerance or TOLERANCE.get(
            str(settings.get("torch_dtype")), TOLERANCE_OF_OTHERS
        )
        difference, token = largest_difference(probe, self._kind.score(self._server.client, probe.token_ids))
        self._report = {"probe_difference": difference, "probe_tolerance": tolerance}
        if not difference <= tolerance:
            raise DataError(
                f"{self._kind.name} at {self._server.client.url} does not serve policy version {version}: a "
                f"log-probability of its probe is off by {difference:.3g} (token {token}), more than {tolerance:g}; "
                "it serves old or damaged weights, nothing is sampled from it"
            )

    def _check_exchange(self, engine_version: str) -> dict[str, Any]:
        """How experts exchange tokens, requested and observed; a downgrade fails as `moe.on_downgrade` says."""
        server, name = self._config.rollout.server, self._kind.name
        assert self._server is not None
        observed = self._kind.observed_exchange(self._server.client) if ranks_of(server) > 1 else ONE_RANK
        transport = exchange_report(server, observed, name, engine_version)
        if transport["status"] == "downgrade":
            line = f'rollout.server.all2all_backend = "{server.all2all_backend}": {name} uses {observed}'
            if self._config.moe.on_downgrade == "fail":
                raise ExchangeDowngraded(f'{line}; set it to that, or moe.on_downgrade = "warn"', transport)
            self._context.say(line)
        return transport
