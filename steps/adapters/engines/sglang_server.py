"""SGLang's server (0.5.23): requests, replies and weight updates as its source defines them.

It has no build for CPUs: tested against a double of its protocol (`tests/doubles/sglang_server.py`), not yet run on the
real server.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from moe.config import SamplingConfig
from moe.sampler import SampledResponse
from steps.adapters.engines.http_client import JsonClient, ServerRefused, ServerUnreachable, require
from steps.adapters.engines.replies import finish_reason, routed_experts, with_last_unknown
from steps.adapters.engines.server_kind import (
    HEALTH_TIMEOUT_S,
    MODEL_NAME,
    PROBE_TIMEOUT_S,
    SEED_BITS,
    Launch,
    ServedResponse,
)


class SglangServer:
    """`python -m sglang.launch_server`, its native API."""

    name: ClassVar[str] = "sglang"
    can_record_routing: ClassVar[bool] = True
    module: ClassVar[str] = "sglang"
    install: ClassVar[str] = "pip install sglang"

    def arguments(self, launch: Launch) -> list[str]:
        server = launch.server
        options: dict[str, object] = {
            "--model-path": launch.folder,
            "--served-model-name": MODEL_NAME,
            "--host": launch.address,
            "--port": launch.port,
            "--dtype": launch.dtype,
            "--context-length": launch.max_model_len,
            "--max-running-requests": server.max_running_requests,
            "--mem-fraction-static": server.gpu_memory_fraction,
            "--tp-size": server.tensor_parallel_size,
            "--dp-size": server.data_parallel_size,
            "--sampling-defaults": "openai",  # those of the model would bring its own top_k and penalties
            "--log-level-http": "warning",  # not a line for each response
        }
        if server.expert_parallel:
            options["--ep-size"] = server.tensor_parallel_size
        if server.all2all_backend:
            options["--moe-a2a-backend"] = server.all2all_backend
        flags = ["--enable-deterministic-inference"]  # without it the seeds of requests are ignored
        flags += ["--enable-return-routed-experts"] * launch.record_routing
        return ["-m", "sglang.launch_server", *(str(word) for option in options.items() for word in option), *flags]

    def environment(self, launch: Launch) -> dict[str, str]:
        return {"HF_HUB_OFFLINE": "1"}

    def is_healthy(self, client: JsonClient, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        try:
            client.get("/health_generate", timeout_s)
        except (ServerUnreachable, ServerRefused):
            return False
        return True

    def version(self, client: JsonClient) -> str:
        return str(require(client.get("/server_info", HEALTH_TIMEOUT_S), "version"))

    def generate(
        self,
        client: JsonClient,
        prompt: Sequence[int],
        seed: int,
        stop_id: int,
        sampling: SamplingConfig,
        *,
        greedy: bool,
        top_k: int,
        timeout_s: float,
    ) -> ServedResponse:
        parameters: dict[str, Any] = {
            "n": 1,
            "temperature": 0.0 if greedy else sampling.temperature,
            "top_p": 1.0 if greedy else sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "max_new_tokens": sampling.max_new_tokens,
            "sampling_seed": seed % 2**SEED_BITS,
            "stop_token_ids": [stop_id],
            "ignore_eos": True,
        }
        if sampling.stop:
            parameters |= {"stop": list(sampling.stop), "no_stop_trim": True}
        body = {"input_ids": list(prompt), "sampling_params": parameters, "return_logprob": True}
        answer = client.post("/generate", body | {"return_routed_experts": top_k > 0}, timeout_s)
        token_ids, meta = list(require(answer, "output_ids")), require(answer, "meta_info")
        reason = finish_reason(client, require(meta, "finish_reason", "type"))
        entries = require(meta, "output_token_logprobs")
        if [require(entry, 1) for entry in entries] != token_ids:
            raise ServerRefused(502, "output_token_logprobs are not those of output_ids")
        routing = _expert_ids(require(meta, "routed_experts"), len(prompt) + len(token_ids), top_k) if top_k else None
        response = SampledResponse(token_ids, [float(require(entry, 0)) for entry in entries], reason, routing)
        return ServedResponse(response, _weight_labels(meta))

    def score(self, client: JsonClient, token_ids: Sequence[int]) -> list[float]:
        parameters = {"max_new_tokens": 1, "temperature": 1.0}
        body = {"input_ids": list(token_ids), "sampling_params": parameters, "return_logprob": True}
        answer = client.post("/generate", body | {"logprob_start_len": 0}, PROBE_TIMEOUT_S)
        entries = require(answer, "meta_info", "input_token_logprobs")[1:]  # nothing comes before the first token
        if [require(entry, 1) for entry in entries] != list(token_ids[1:]):
            raise ServerRefused(502, "input_token_logprobs are not those of input_ids")
        return [float(require(entry, 0)) for entry in entries]

    def reload(self, client: JsonClient, folder: Path, label: str, timeout_s: float) -> None:
        body = {"model_path": str(folder), "abort_all_requests": True, "flush_cache": True, "weight_version": label}
        answer = client.post("/update_weights_from_disk", body, timeout_s)
        if not require(answer, "success"):
            raise ServerRefused(400, f"/update_weights_from_disk: {require(answer, 'message')}")

    def label(self, client: JsonClient, label: str) -> None:
        client.post("/update_weight_version", {"new_version": label, "abort_all_requests": False}, HEALTH_TIMEOUT_S)

    def observed_exchange(self, client: JsonClient) -> str:
        return str(require(client.get("/server_info", PROBE_TIMEOUT_S), "moe_a2a_backend"))


def _weight_labels(meta: Any) -> frozenset[str]:
    """A request that a weight update overtook has several spans; others may have the one label only."""
    if "weight_versions" in meta:
        return frozenset(require(span, "version") for span in meta["weight_versions"])
    return frozenset([require(meta, "weight_version")])


def _expert_ids(encoded: Any, num_tokens: int, top_k: int) -> Tensor:
    """int16 (tokens, layers, experts a token) from base64 of int32 without the last token, whose row is -1."""
    ids = np.frombuffer(routed_experts(encoded), dtype="<i4")
    if num_tokens < 2 or ids.size == 0 or ids.size % ((num_tokens - 1) * top_k):
        raise ServerRefused(502, f"{ids.size} routed experts for {num_tokens} tokens of {top_k} experts each")
    return with_last_unknown(ids.reshape(num_tokens - 1, -1, top_k))
