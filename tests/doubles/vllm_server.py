"""vLLM 0.32's HTTP protocol as its source and its CPU build define it, over a policy that is really evaluated.

Stricter than the real one where that hides mistakes: unknown parameters are refused, and weights are only taken while
generation is paused.
"""

import argparse
import base64
import io
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np

from moe.config import SamplingConfig
from tests.doubles.json_server import Refused, make_server
from tests.doubles.served_policy import ServedPolicy, routing_of

PARAMETERS = {
    "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop_token_ids", "ignore_eos", "logprobs",
    "prompt_logprobs", "detokenize", "stop", "include_stop_str_in_output",
}  # fmt: skip


class VllmDouble:
    """Callable as an `Answer`."""

    def __init__(self, policy: ServedPolicy, *, returns_routing: bool = False, backend: str = "") -> None:
        self.policy = policy
        self.returns_routing = returns_routing
        self.backend = backend
        self.requests: list[dict[str, Any]] = []
        self.running = threading.Event()
        self.running.set()

    def __call__(self, method: str, path: str, body: dict[str, Any]) -> Any:
        if (method, path) == ("GET", "/health"):
            return None
        if (method, path) == ("GET", "/version"):
            return {"version": "0.32.0"}
        if method == "GET" and path.startswith("/server_info?config_format=json"):
            return {"vllm_config": {"parallel_config": {"all2all_backend": self.backend}}}
        if (method, path) == ("POST", "/inference/v1/generate"):
            return self.generate(body)
        if method == "POST" and path in ("/pause?mode=abort", "/pause?mode=wait"):
            self.running.clear()
            return {"status": "paused"}
        if (method, path) == ("POST", "/resume"):
            self.running.set()
            return {"status": "resumed"}
        if (method, path) == ("POST", "/reset_prefix_cache"):
            return {"success": not self.running.is_set()}
        if (method, path) == ("POST", "/update_weight_version"):
            self.policy.label = str(body["new_version"])
            return {"success": True, "new_version": self.policy.label}
        if (method, path) == ("POST", "/collective_rpc"):
            return self.collective_rpc(body)
        raise Refused(404, f"Not Found: {method} {path}")

    def collective_rpc(self, body: dict[str, Any]) -> Any:
        if body["method"] != "reload_publication" or self.running.is_set():
            raise Refused(500, f"Call to collective_rpc method failed: {body['method']} while not paused")
        try:
            self.policy.load(Path(body["args"][0]))
        except ValueError as error:
            raise Refused(500, f"Call to collective_rpc method failed: {error}") from None
        return {"results": ["3"]}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        self.running.wait()
        ids, parameters = body["token_ids"], body["sampling_params"]
        self.requests.append(body)
        if unknown := parameters.keys() - PARAMETERS:
            raise Refused(400, f"unknown sampling parameters {sorted(unknown)}")
        if not -(2**63) <= parameters.get("seed", 0) < 2**63:
            raise Refused(400, "seed is no signed 64-bit integer")
        if bad := [token for token in ids if not 0 <= token < self.policy.vocab_size]:
            raise Refused(400, f"Token id {bad[0]} is out of vocabulary")
        if parameters.get("stop") and not parameters.get("detokenize", True):
            raise Refused(400, "stop strings are only supported when detokenize is True.")
        label = self.policy.label
        greedy = parameters["temperature"] == 0.0 if "temperature" in parameters else False
        sampling = SamplingConfig(
            max_new_tokens=parameters["max_tokens"],
            temperature=parameters.get("temperature", 1.0) or 1.0,
            top_p=parameters.get("top_p", 1.0),
            max_prompt_tokens=len(ids),
            stop=tuple(parameters.get("stop", ())),
        )
        stop_id = parameters.get("stop_token_ids", [-1])[0]
        response = self.policy.sample(
            ids, parameters.get("seed", 0), sampling, max(stop_id, 0), greedy=greedy, routing=self.returns_routing
        )
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": response.finish_reason,
            "stop_reason": None,
            "token_ids": response.response_ids,
            "routed_experts": None,
            "weight_versions": [{"version": label, "start": 0, "end": len(response.response_ids)}],
            "logprobs": None,
        }
        if self.policy.label != label:
            choice["weight_versions"] = [
                {"version": label, "start": 0, "end": 1},
                {"version": self.policy.label, "start": 1, "end": len(response.response_ids)},
            ]
        if "logprobs" in parameters:
            pairs = zip(response.response_ids, response.logprobs, strict=True)
            choice["logprobs"] = {"content": [{"token_id": token, "logprob": value} for token, value in pairs]}
        if self.returns_routing:
            file = io.BytesIO()
            np.save(file, routing_of(response).numpy().astype(np.uint8))
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        prompt_logprobs = None
        if "prompt_logprobs" in parameters:
            scored = zip(ids[1:], self.policy.score(ids), strict=True)
            prompt_logprobs = [None, *({str(token): {"logprob": value, "rank": 1}} for token, value in scored)]
        return {"request_id": "r", "choices": [choice], "prompt_logprobs": prompt_logprobs}


def main() -> None:
    """The command of the real server; MOERL is not in its environment, so `DOUBLE_DIES_AFTER` tells when it dies."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments, _ = parser.parse_known_args()
    double = VllmDouble(ServedPolicy(Path(arguments.model)))
    state = Path(os.environ["DOUBLE_STATE"])
    with (state / "starts").open("a") as starts:
        engine = subprocess.Popen(["sleep", "600"])  # as the real one's processes, it outlives a server that is killed
        facts = {"pid": os.getpid(), "engine_pid": engine.pid, "environment": sorted(os.environ)}
        starts.write(json.dumps(facts) + "\n")

    def answer(method: str, path: str, body: dict[str, Any]) -> Any:
        if (state / "die").exists() and path == "/inference/v1/generate" and "logprobs" in body["sampling_params"]:
            (state / "die").unlink()
            os._exit(9)
        return double(method, path, body)

    make_server(answer, arguments.host, arguments.port).serve_forever()


if __name__ == "__main__":
    main()
