"""retryStrategy: does a failed attempt run again, and after which wait.

Argo's order (operator.go, processNodeRetries): the wait comes first and only where `limit` is set, then the policy,
the limit, the expression. The policy is OnFailure by default, Always where there is an expression; both must agree.
"""

import re
from dataclasses import dataclass

from steps.errors import ConfigError
from workflows.local.expression_values import Value
from workflows.local.expressions import evaluate_bool
from workflows.local.model import Backoff, RetryStrategy
from workflows.local.status import NodeStatus

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`wait_s` is the wait as the manifest asks for it, unscaled; `message` replaces the attempt's when not empty."""

    again: bool
    wait_s: float = 0.0
    message: str = ""


def duration_s(text: str) -> float:
    """Seconds of "15s", "1m30s" or "20"; ConfigError for anything else."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ConfigError(f"{text!r} is not a duration; write seconds or e.g. 90s, 5m, 1h30m")
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def backoff_s(backoff: Backoff | None, attempts: int) -> float:
    """duration * factor ** (attempts - 1), at most cap; `attempts` counts those that have ended. Factor 0 is none."""
    if backoff is None:
        return 0.0
    factor = _whole("backoff.factor", backoff.factor) or 1
    wait_s = duration_s(backoff.duration) * float(factor) ** (attempts - 1)
    return min(wait_s, duration_s(backoff.cap)) if backoff.cap else wait_s


FIRST_ATTEMPT = {
    "retries": "0",
    "lastRetry.exitCode": "0",
    "lastRetry.status": "",
    "lastRetry.duration": "0",
    "lastRetry.message": "",
}
"""What a template's fields see in its first attempt."""


def retry_scope(last: NodeStatus, retries: int, *, unknown_code: str = "-1") -> dict[str, str]:
    """`retries` and `lastRetry.*`, strings all, as Argo has them.

    unknown_code: of an attempt without an exit code; Argo says "-1" to the retry expression and "0" to the fields.
    """
    return {
        "retries": str(retries),
        "lastRetry.exitCode": unknown_code if last.exit_code in ("", "-1") else last.exit_code,
        "lastRetry.status": last.phase,
        "lastRetry.duration": f"{last.finished_s - last.started_s:.6g}",
        "lastRetry.message": last.message,
    }


def decide(strategy: RetryStrategy, last: NodeStatus, attempts: int) -> Verdict:
    """After `attempts` attempts of this submission, the last of which failed. Raises ExpressionError, ConfigError."""
    policy = strategy.policy or ("Always" if strategy.expression else "OnFailure")
    wanted = {"Always": ("Failed", "Error"), "OnFailure": ("Failed",), "OnError": ("Error",)}[policy]
    limit = None if strategy.limit is None else _whole("limit", strategy.limit)
    wait_s = backoff_s(strategy.backoff, attempts) if limit is not None and attempts <= limit else 0.0
    if last.phase not in wanted:
        return Verdict(again=False, wait_s=wait_s)
    if limit is not None and attempts > limit:
        return Verdict(again=False, message="No more retries left")
    if strategy.expression and not evaluate_bool(strategy.expression, _expression_scope(last)):
        return Verdict(again=False, wait_s=wait_s)
    return Verdict(again=True, wait_s=wait_s)


def _expression_scope(last: NodeStatus) -> dict[str, Value]:
    flat = retry_scope(last, last.attempt)
    last_retry: dict[str, Value] = {
        name.removeprefix("lastRetry."): value for name, value in flat.items() if name.startswith("lastRetry.")
    }
    return {"retries": flat["retries"], "lastRetry": last_retry}


def _whole(name: str, text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise ConfigError(f"retryStrategy.{name} {text!r} is not a whole number")
    return int(text)
