"""What replies of all servers have in common: how a request ended, and the experts of its tokens."""

import base64
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from steps.adapters.engines.http_client import JsonClient, ServerRefused, ServerUnreachable


def finish_reason(client: JsonClient, reason: Any) -> Literal["stop", "length"]:
    """`reason` of a whole response; ServerUnreachable when the server broke the request off."""
    if reason == "stop":
        return "stop"
    if reason == "length":
        return "length"
    raise ServerUnreachable(f"{client.url}: a request ended with {reason!r}")


def routed_experts(encoded: Any) -> bytes:
    """Decode base64; ServerRefused when there are no routed experts."""
    if not isinstance(encoded, str):
        raise ServerRefused(
            502, "the answer has no routed experts; start the server with --enable-return-routed-experts"
        )
    return base64.b64decode(encoded)


def with_last_unknown(array: Any) -> Tensor:
    """int16 (tokens, layers, experts a token) from an array of all tokens but the last, whose row is -1."""
    ids_TLK = torch.full((len(array) + 1, *array.shape[1:]), -1, dtype=torch.int16)
    ids_TLK[:-1] = torch.from_numpy(array.astype(np.int16))
    return ids_TLK
