"""What the numbers of a report mean and do not mean: sentences derived from the report itself."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from steps.report_engine import engine_notes


def run_notes(report: Mapping[str, Any]) -> list[str]:
    """One sentence a line, for the owner of the run."""
    iterations: Sequence[Mapping[str, Any]] = report["iterations"]
    notes = [_transport(report), *_rollout_transport(report), *engine_notes(report)]
    notes += [*_bottleneck(iterations), *_capacity(report), *_sandboxes(report)]
    dropped: Counter[str] = sum((Counter(row["dropped"]) for row in iterations), Counter())
    notes += [f"Prompts left out of training: {number}, {reason}." for reason, number in sorted(dropped.items())]
    rejected = [str(row["policy_version"]) for row in iterations if row["validated"] is False]
    if rejected:
        notes.append(f"Rejected by the gate: version {', '.join(rejected)}.")
    for row in iterations:
        for problem in row.get("states_passed_over", []):
            notes.append(f"Iteration {row['iteration']} passed over a damaged trainer state: {problem}.")
    notes.append("Throughput is wall-clock on the machine that ran the step, other work on it included.")
    return notes


def _transport(report: Mapping[str, Any]) -> str:
    seen = [row["transport"] for row in report["iterations"] if row.get("transport")]
    if not seen:
        return f"Experts: dispatcher {report['config']['moe']['dispatcher']} requested, not trained yet."
    return f"Experts: dispatcher {_requested_and_observed(seen)}."


def _rollout_transport(report: Mapping[str, Any]) -> list[str]:
    """Of a rollout engine that is a server; one inside the worker has no exchange."""
    seen = [row["rollout_transport"] for row in report["iterations"] if row.get("rollout_transport")]
    return [f"Experts of the rollout engine: exchange {_requested_and_observed(seen)}."] if seen else []


def _requested_and_observed(seen: Sequence[Mapping[str, Any]]) -> str:
    # One that was downgraded in the middle of a run matters more than how the run ended.
    by_status = {transport["status"]: transport for transport in seen}
    told = by_status.get("downgrade") or by_status.get("unverifiable") or seen[-1]
    return f"{told['requested']} requested, {told['observed']} observed ({told['status']}: {told['reason']})"


def _sandboxes(report: Mapping[str, Any]) -> list[str]:
    """What verifiers were held to: one sentence for each way it was."""
    nodes: dict[str, set[str]] = defaultdict(set)
    for row in (report["initial"], *report["iterations"]):
        for attempt in row["attempts"]:
            if effective := attempt.get("sandbox", {}).get("effective"):
                told = (f"{name}{'' if value is True else f' {value}'}" for name, value in effective.items())
                nodes[f"{attempt['sandbox']['requested']} requested; {', '.join(told)}"].add(attempt["node"])
            elif attempt.get("sandbox", {}).get("requested") == "off":
                nodes["off"].add(attempt["node"])
    return [f"Verifier's sandbox on {', '.join(sorted(nodes[told]))}: {told}." for told in sorted(nodes)]


def _bottleneck(iterations: Sequence[Mapping[str, Any]]) -> list[str]:
    totals: dict[str, float] = defaultdict(float)
    for row in iterations:
        for phase, seconds in row["phase_seconds"].items():
            totals[phase] += seconds
    if not any(totals.values()):
        return []
    phase = max(totals, key=lambda name: totals[name])
    share = totals[phase] / sum(totals.values())
    notes = [f"Bottleneck: {phase}, {share:.0%} of the phases' time ({totals[phase]:.1f} s)."]
    workers = max((len(_workers(row, "rollout")) for row in iterations), default=0)
    if workers and totals["train"] and totals["rollout"]:
        even = workers * totals["rollout"] / totals["train"]
        notes.append(
            f"Rollout took {totals['rollout']:.1f} s with {workers} workers and training {totals['train']:.1f} s: "
            f"about {even:.1f} workers would make them equal, if rollout scales with workers."
        )
    return notes


def _workers(row: Mapping[str, Any], step: str) -> set[Any]:
    return {attempt["worker"] for attempt in row["attempts"] if attempt["step"] == step}


def _capacity(report: Mapping[str, Any]) -> list[str]:
    seconds: dict[str, float] = defaultdict(float)
    wasted = 0.0
    for row in (report["initial"], *report["iterations"]):
        for attempt in row["attempts"]:
            spent = max(0.0, (attempt["end_s"] or attempt["start_s"]) - attempt["start_s"])
            seconds[attempt["capacity_type"] or "unknown"] += spent
            wasted += spent if attempt["state"] in {"interrupted", "failed"} else 0.0
    if not seconds:
        return []
    spent_by = ", ".join(f"{name} {value:.1f} s" for name, value in sorted(seconds.items()))
    share = wasted / max(sum(seconds.values()), 1e-9)
    return [f"Step time by capacity: {spent_by}; {share:.1%} of it in attempts that were interrupted or failed."]
