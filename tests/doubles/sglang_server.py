"""SGLang 0.5.23's native HTTP protocol as its source defines it (`srt/entrypoints/http_server.py`,
`srt/managers/io_struct.py`, `srt/sampling/sampling_params.py`), over a policy that is really evaluated.

The real server needs a GPU: this double has not been compared with it.
"""

import base64
from pathlib import Path
from typing import Any

from moe.config import SamplingConfig
from tests.doubles.json_server import Refused
from tests.doubles.served_policy import ServedPolicy, routing_of

REQUEST = {"input_ids", "sampling_params", "return_logprob", "logprob_start_len", "return_routed_experts"}
PARAMETERS = {
    "n", "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "sampling_seed", "stop_token_ids", "ignore_eos",
    "stop", "no_stop_trim",
}  # fmt: skip
UPDATE = {"model_path", "abort_all_requests", "flush_cache", "weight_version"}


class SglangDouble:
    """Callable as an `Answer`."""

    def __init__(self, policy: ServedPolicy, *, returns_routing: bool = False, backend: str = "none") -> None:
        self.policy = policy
        self.returns_routing = returns_routing
        self.backend = backend
        self.requests: list[dict[str, Any]] = []

    def __call__(self, method: str, path: str, body: dict[str, Any]) -> Any:
        if (method, path) == ("GET", "/health_generate"):
            return None
        if (method, path) == ("GET", "/server_info"):
            return {"version": "0.5.23", "moe_a2a_backend": self.backend}
        if (method, path) == ("POST", "/generate"):
            return self.generate(body)
        if (method, path) == ("POST", "/update_weights_from_disk"):
            return self.update(body)
        if (method, path) == ("POST", "/update_weight_version"):
            self.policy.label = str(body["new_version"])
            return {"success": True, "message": "", "new_version": self.policy.label}
        raise Refused(404, f"Not Found: {method} {path}")

    def update(self, body: dict[str, Any]) -> dict[str, Any]:
        _refuse_unknown(body, UPDATE)
        try:
            self.policy.load(Path(body["model_path"]))
        except ValueError as error:
            raise Refused(400, f"Failed to update weights: {error}.\nRolling back to original weights.") from None
        self.policy.label = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        _refuse_unknown(body, REQUEST)
        ids, parameters = body["input_ids"], body["sampling_params"]
        _refuse_unknown(parameters, PARAMETERS)
        self.requests.append(body)
        if not -(2**63) <= parameters.get("sampling_seed", 0) <= 2**63 - 1:
            raise Refused(400, "sampling_seed must be in [-2**63, 2**63 - 1]")
        if parameters.get("top_k", -1) < 1 and parameters.get("top_k", -1) != -1:
            raise Refused(400, "top_k must be -1 (disable) or at least 1")
        sampling = SamplingConfig(
            max_new_tokens=parameters["max_new_tokens"],
            temperature=parameters["temperature"] or 1.0,
            top_p=parameters.get("top_p", 1.0),
            max_prompt_tokens=len(ids),
            stop=tuple(parameters.get("stop", ())),
        )
        response = self.policy.sample(
            ids,
            parameters.get("sampling_seed", 42),
            sampling,
            parameters.get("stop_token_ids", [0])[0],
            greedy=parameters["temperature"] == 0.0,
            routing=self.returns_routing,
        )
        kind = {"type": "stop", "matched": response.response_ids[-1]}
        meta: dict[str, Any] = {
            "finish_reason": kind if response.finish_reason == "stop" else {"type": "length", "length": 1},
            "prompt_tokens": len(ids),
            "weight_version": self.policy.label,
            "weight_versions": [{"version": self.policy.label, "start": 0, "end": len(response.response_ids)}],
            "output_token_logprobs": [
                [value, token, None] for token, value in zip(response.response_ids, response.logprobs, strict=True)
            ],
        }
        if "logprob_start_len" in body:
            scored = zip(self.policy.score(ids), ids[1:], strict=True)
            meta["input_token_logprobs"] = [[None, ids[0], None], *([value, token, None] for value, token in scored)]
        if body.get("return_routed_experts") and self.returns_routing:
            ids_bytes = routing_of(response).numpy().astype("<i4").tobytes()
            meta["routed_experts"] = base64.b64encode(ids_bytes).decode()
        return {"text": "", "output_ids": response.response_ids, "meta_info": meta}


def _refuse_unknown(given: dict[str, Any], known: set[str]) -> None:
    if unknown := given.keys() - known:
        raise Refused(400, f"unknown fields {sorted(unknown)}")
