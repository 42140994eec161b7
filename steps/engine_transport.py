"""How the experts of a rollout engine exchange tokens: the engine's own word against what was asked for.

The dictionaries have keys of `moe.transport.report.collect`, so that a rollout's are shown as an update's are.
"""

from typing import Any

from steps.config import ServerConfig
from steps.errors import ConfigError

DEFAULT = "the engine's default"
ONE_RANK = "none: one rank"


class ExchangeDowngraded(ConfigError):
    """The engine uses another exchange than `rollout.server.all2all_backend`; `transport` is the evidence."""

    def __init__(self, line: str, transport: dict[str, Any]) -> None:
        super().__init__(line)
        self.transport = transport


def ranks_of(server: ServerConfig) -> int:
    return server.tensor_parallel_size * server.data_parallel_size


def exchange_report(server: ServerConfig, observed: str, engine: str, engine_version: str) -> dict[str, Any]:
    """`observed`: the engine's word for its exchange of tokens, or ONE_RANK where there is none."""
    requested = server.all2all_backend
    status, reason = "ok", f"{engine} says so"
    if not requested:
        reason = "no exchange was asked for"
    elif observed != requested:
        status, reason = "downgrade", f"{requested} was requested, {engine} uses {observed}"
    return {
        "requested": requested or DEFAULT,
        "observed": observed,
        "status": status,
        "reason": reason,
        "ranks": ranks_of(server),
        "details": {"engine": engine},
        "versions": {engine: engine_version},
    }
