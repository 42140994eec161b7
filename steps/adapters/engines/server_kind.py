"""What differs between the inference servers: command line, environment, requests and replies, reload of weights."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from moe.config import SamplingConfig
from moe.sampler import SampledResponse
from steps.adapters.engines.http_client import JsonClient
from steps.config import ServerConfig

MODEL_NAME = "policy"
HEALTH_TIMEOUT_S = 10.0
HANG_TIMEOUT_S = 60.0
"""A server in use has not generated a token by then: it may have a queue, where a new one has none."""
PROBE_TIMEOUT_S = 120.0
SEED_BITS = 63
"""Seeds of a server are signed 64-bit: of ours, the lower bits."""
_NOT_INHERITED = ("AWS_", "MOERL_", "MLFLOW_", "PYTHONPATH")
"""Secrets, and modules of another interpreter."""
_SECRET = re.compile(r"PASSW|SECRET|CREDENTIAL|DATABASE_URL|(^|_)(TOKEN|API_?KEY)(_|$)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A server that shall be started on one publication."""

    folder: Path
    dtype: str
    """Of the publication's weights; a server may choose another one by itself."""
    address: str
    port: int
    max_model_len: int
    """Tokens of a prompt and its response together."""
    server: ServerConfig
    on_gpu: bool
    record_routing: bool


@dataclass(frozen=True, slots=True)
class ServedResponse:
    """A response, and the labels of the weights that its tokens were sampled from."""

    response: SampledResponse
    weight_labels: frozenset[str]


class ServerKind(Protocol):
    """One kind of server; without state, so that a worker and a host each have their own."""

    name: ClassVar[str]
    can_record_routing: ClassVar[bool]
    module: ClassVar[str]
    """Of the interpreter that runs the server; `install` is how to get it."""
    install: ClassVar[str]

    def arguments(self, launch: Launch) -> list[str]:
        """What follows the interpreter."""
        ...

    def environment(self, launch: Launch) -> dict[str, str]:
        """Variables that the server needs and the environment does not set already."""
        ...

    def is_healthy(self, client: JsonClient, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        """Whether the server generates, not only listens."""
        ...

    def version(self, client: JsonClient) -> str: ...

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
        """Sample one response, with its experts unless `top_k` (experts a token) is 0.

        ServerUnreachable or ServerRefused when there is none.
        """
        ...

    def score(self, client: JsonClient, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities at temperature 1 of `token_ids` from the second on, each given those before it."""
        ...

    def reload(self, client: JsonClient, folder: Path, label: str, timeout_s: float) -> None:
        """Load the weights of `folder` in place, forget what was cached under the old ones, and label what follows."""
        ...

    def label(self, client: JsonClient, label: str) -> None:
        """Label the weights that are served now."""
        ...

    def observed_exchange(self, client: JsonClient) -> str:
        """The server's own word for how experts exchange tokens."""
        ...


def server_environment(kind: ServerKind, launch: Launch) -> dict[str, str]:
    """This process's environment without its secrets and module paths; the server's own variables where unset."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_NOT_INHERITED) and not _SECRET.search(name)
    }
    return kind.environment(launch) | inherited
