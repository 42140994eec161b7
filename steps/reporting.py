"""A run as one JSON document, from the database alone: what `moerl report --json`, the page and MLflow show.

    {run_id, state, wall_seconds, config_hash, final_weights_sha256, versions{...}, config{...},
     initial{...}, iterations[{...}, ...]}

`initial` is the policy before the first update (version 0); it has the same keys as an iteration, but no `accounting`.
Unknown values are None. Times are seconds; `start_s` and `end_s` are UTC seconds since the epoch by the database's
clock.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from steps.adapters import ledger
from steps.adapters.accounting import list_accounts
from steps.adapters.database import Database
from steps.records import Evaluation, Publication
from steps.report_attempts import Attempt, covered_seconds, label_attempts, span_seconds
from steps.report_engine import MISMATCH_ROWS

INITIAL_STEP = "init_run"


def build_run_report(database: Database, run_id: str) -> dict[str, Any]:
    """DataError when the database has no such run."""
    run = ledger.get_run(database, run_id)
    config = json.loads(run.config_json)
    attempts = label_attempts(
        ledger.list_attempts(database, run_id),
        {interruption.attempt_id for interruption in ledger.list_interruptions(database, run_id)},
    )
    evaluations = {row.policy_version: row for row in ledger.list_evaluations(database, run_id)}
    publications = {row.policy_version: row for row in ledger.list_publications(database, run_id)}
    accounts = list_accounts(database, run_id)
    by_iteration: dict[int, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        if attempt.iteration is not None or attempt.step == INITIAL_STEP:
            by_iteration[attempt.iteration or 0].append(attempt)
    rows = []
    for row in ledger.list_iterations(database, run_id):
        metrics = ledger.get_iteration_metrics(database, run_id, row.iteration)
        entry = _entry(row.iteration, by_iteration[row.iteration], metrics, evaluations, publications)
        reasons = Counter(draw.drop_reason for draw in ledger.list_draws(database, run_id, row.iteration))
        reasons.pop(None, None)
        account = {"accounting": asdict(accounts[row.iteration])}
        rows.append(entry | {"sampled_from": row.policy_version, "dropped": dict(reasons)} | account)
    last_version = max(publications, default=None)
    return {
        "run_id": run_id,
        "state": _state(evaluations, config["iterations"]),
        "wall_seconds": span_seconds(attempts),
        "config_hash": run.config_hash,
        "final_weights_sha256": None if last_version is None else publications[last_version].weights_sha256,
        "versions": _versions(attempts),
        "config": config,
        "initial": _entry(0, by_iteration[0], {}, evaluations, publications) | {"sampled_from": None, "dropped": {}},
        "iterations": rows,
    }


def _state(evaluations: dict[int, Evaluation], iterations: int) -> str:
    done = sum(1 for version in evaluations if version > 0)
    return "finished" if done >= iterations else f"{done} of {iterations} iterations done"


def _versions(attempts: Sequence[Attempt]) -> dict[str, str]:
    """Of the latest attempt that recorded them."""
    recorded = (attempt.provenance["versions"] for attempt in reversed(attempts) if "versions" in attempt.provenance)
    return dict(next(recorded, {}))


def _entry(
    version: int,
    attempts: Sequence[Attempt],
    metrics: dict[str, dict[str, Any]],
    evaluations: dict[int, Evaluation],
    publications: dict[int, Publication],
) -> dict[str, Any]:
    evaluation = evaluations.get(version)
    publication = publications.get(version)
    training = metrics.get("train", {})
    return {
        "iteration": version,
        "policy_version": version,
        "reward_mean": metrics.get("flush", {}).get("reward_mean"),
        "reward_eval": None if evaluation is None else evaluation.reward_eval,
        "validated": None if evaluation is None else evaluation.validated,
        "validation_reason": "" if evaluation is None else evaluation.reason,
        "phase_seconds": _phase_seconds(attempts),
        "wall_seconds": span_seconds(attempts),
        **_rollout(attempts, metrics.get("flush", {})),
        "train_samples_per_s": training.get("samples_per_s"),
        "expert_max_violation": training.get("expert_max_violation"),
        "expert_load": training.get("expert_load"),
        "router_layers": mean_layers(training.get("router_steps", [])),
        "transport": training.get("transport") or _last_transport(attempts, "train"),
        "rollout_transport": _last_transport(attempts, "rollout"),
        "rollout_engine": next((a.metrics["engine"] for a in reversed(attempts) if _sampled(a)), None),
        "rollout_mismatch": {key: value for key, value in training.get("metrics", {}).items() if key in MISMATCH_ROWS},
        "interruptions": sum(1 for attempt in attempts if attempt.interrupted),
        "retries": sum(1 for attempt in attempts if attempt.is_retry),
        "states_passed_over": [entry["problem"] for entry in metrics.get("train_restore", {}).get("passed_over", [])],
        "weights_sha256": None if publication is None else publication.weights_sha256,
        "attempts": [attempt.to_json() for attempt in attempts],
    }


def mean_layers(router_steps: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """The metrics of each layer, as means over the optimizer steps of an update.

    An update that continued after an interruption has no times of the steps before it.
    """
    layers = list(zip(*(step["layers"] for step in router_steps), strict=True))
    return [{name: _mean_known(steps, name) for name in steps[-1]} for steps in layers]


def _mean_known(rows: Sequence[Mapping[str, float]], name: str) -> float:
    known = [row[name] for row in rows if name in row]
    return sum(known) / len(known)


def _last_transport(attempts: Sequence[Attempt], step: str) -> dict[str, Any] | None:
    """What the step's attempts had observed, a downgrade before all else: it may be why one did not end well."""
    seen = [attempt.transport for attempt in reversed(attempts) if attempt.step == step and attempt.transport]
    return next((transport for transport in seen if transport["status"] == "downgrade"), seen[0] if seen else None)


def _sampled(attempt: Attempt) -> bool:
    return attempt.step == "rollout" and "engine" in attempt.metrics


def _phase_seconds(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Seconds in which at least one attempt of the phase ran, in the order in which the phases began."""
    by_step: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_step[attempt.step].append(attempt)
    return {step: covered_seconds(rows) for step, rows in by_step.items()}


def _rollout(attempts: Sequence[Attempt], batch: dict[str, Any]) -> dict[str, float | int | None]:
    """Committed samples and tokens, and tokens per second of the workers together (loading the policy excluded).

    A killed worker's own count is lost with it; what it committed is then known from the batch.
    """
    rows = [attempt for attempt in attempts if attempt.step == "rollout" and "tokens" in attempt.metrics]
    if not rows:
        return {"samples": batch.get("samples"), "tokens": batch.get("tokens"), "rollout_tokens_per_s": None}
    seconds_by_worker: dict[str | None, float] = defaultdict(float)
    for attempt in rows:
        seconds_by_worker[attempt.worker] += attempt.metrics["seconds"]
    tokens = sum(attempt.metrics["tokens"] for attempt in rows)
    longest_s = max(seconds_by_worker.values())
    return {
        "samples": max(sum(attempt.metrics["samples"] for attempt in rows), batch.get("samples", 0)),
        "tokens": max(tokens, batch.get("tokens", 0)),
        "rollout_tokens_per_s": tokens / longest_s if longest_s > 0 else None,
    }
