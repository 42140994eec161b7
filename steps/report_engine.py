"""What a report says of the rollout engine: which it was, and how far its log-probabilities are off the trainer's."""

from collections.abc import Mapping
from typing import Any

from steps.report_parts import pairs_table, section

MISMATCH_ROWS = {
    "rollout_corr/logprobs_diff_max": "largest |log-probability - the trainer's|",
    "rollout_corr/k3_kl": "k3 KL(sampler || trainer)",
}
"""Metrics of `moe.update_metrics` and what they are called here."""


def engine_section(row: Mapping[str, Any]) -> str:
    """The engine of an iteration by its own report, and its mismatch; nothing before the rollouts."""
    values = dict(row.get("rollout_engine") or {})
    mismatch = row.get("rollout_mismatch") or {}
    values |= {title: f"{mismatch[key]:.2e}" for key, title in MISMATCH_ROWS.items() if key in mismatch}
    if not values:
        return ""
    hint = "Mismatch: of the samples that the trainer scored before its first step, at their own policy version."
    return section("Rollout engine", hint, pairs_table(values, ("fact", "value")))


def engine_notes(report: Mapping[str, Any]) -> list[str]:
    """One sentence: the engine that sampled last, and the worst mismatch of all iterations."""
    engines = [row["rollout_engine"] for row in report["iterations"] if row.get("rollout_engine")]
    if not engines:
        return []
    text = f"Rollout engine: {engines[-1]['engine']} {engines[-1]['engine_version']}"
    mismatches = [row["rollout_mismatch"] for row in report["iterations"] if row.get("rollout_mismatch")]
    if mismatches:
        difference, kl = (max(mismatch[key] for mismatch in mismatches) for key in MISMATCH_ROWS)
        text += f"; log-probabilities at most {difference:.1e} off the trainer's, k3 KL at most {kl:.1e}"
    return [f"{text}."]
