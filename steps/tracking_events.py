"""What the tracking server is told: metric names as verl's (leaf-only), the step is the policy version."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from steps.adapters.spool import Artifact, Event, Metric, Params, RegisteredVersion, RunStatus, Tags
from steps.adapters.tracking import Tracker
from steps.config import RunConfig
from steps.config_loader import config_toml
from steps.entrypoint import StepContext

PHASE_NAMES = {
    "rollout": "gen",
    "reward": "reward",
    "flush": "flush",
    "train": "train",
    "publish": "save_checkpoint",
    "evaluate": "testing",
}
"""Names that verl gives to our phases, below `timing_s/`."""


def open_tracker(context: StepContext) -> Tracker:
    """The tracker of the context's run, as its configuration and environment say."""
    settings = context.config.tracking
    return Tracker(
        context.store, context.run_id, settings.experiment, settings.budget_s, context.environment.tracking_uri
    )


def run_events(report: Mapping[str, Any], config: RunConfig) -> list[Event]:
    """The run itself: its parameters, its configuration, what it runs on, and the score of policy version 0."""
    initial = report["initial"]
    tags = {"config_hash": report["config_hash"]} | {f"version.{name}": v for name, v in report["versions"].items()}
    return [
        RunStatus(state="RUNNING", timestamp_ms=_timestamp_ms(initial)),
        Params(values=flatten(report["config"])),
        Tags(values=tags),
        Artifact(name="config.toml", text=config_toml(config)),
        *_evaluation_metrics(initial, _timestamp_ms(initial)),
    ]


def iteration_events(
    row: Mapping[str, Any], train_metrics: Mapping[str, float], *, run_id: str, publication_uri: str, html: str
) -> list[Event]:
    """One iteration: metrics, report page, and the publication with its alias when it was validated."""
    timestamp_ms = _timestamp_ms(row)
    timings = {f"timing_s/{name}": row["phase_seconds"].get(phase) for phase, name in PHASE_NAMES.items()}
    values = {
        **train_metrics,
        **timings,
        "timing_s/step": row["wall_seconds"],
        "perf/rollout_tokens_per_s": row["rollout_tokens_per_s"],
        "fault/interruptions": row["interruptions"],
        "fault/retries": row["retries"],
        **_layer_metrics(row["router_layers"]),
    }
    aliases = ("candidate", "champion") if row["validated"] else ("candidate",)
    version = str(row["policy_version"])
    return [
        *(
            Metric(key=key, value=float(value), step=row["policy_version"], timestamp_ms=timestamp_ms)
            for key, value in values.items()
            if value is not None
        ),
        *_evaluation_metrics(row, timestamp_ms),
        Artifact(name=f"reports/iteration-{row['iteration']:05d}.html", text=html),
        Tags(values={"publication": publication_uri, "policy_version": version}),
        *_transport_events(row, "transport"),
        *_transport_events(row, "rollout_transport"),
        RegisteredVersion(
            name=run_id, source=publication_uri, aliases=aliases, tags={"policy_version": version, "run": run_id}
        ),
    ]


def final_events(report: Mapping[str, Any], html: str) -> list[Event]:
    """The end of a campaign: the run's page and its state."""
    rows = report["iterations"]
    return [
        Artifact(name="reports/run.html", text=html),
        RunStatus(state="FINISHED", timestamp_ms=_timestamp_ms(rows[-1] if rows else report["initial"])),
    ]


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted names, as in the configuration file."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        elif value not in ("", None):
            flat[f"{prefix}{name}"] = str(value)
    return flat


def _layer_metrics(layers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`moe_layer_03/entropy`: a group of charts for each layer, beside the worst and the sums below `moe/`."""
    return {
        f"moe_layer_{number:02d}/{name}": value for number, layer in enumerate(layers) for name, value in layer.items()
    }


def _transport_events(row: Mapping[str, Any], kind: str) -> list[Event]:
    """What carried the tokens to their experts: as tags to search runs by, and whole as an artifact."""
    transport = row.get(kind)
    if not transport:
        return []
    tags = {f"{kind}.{key}": str(transport[key]) for key in ("requested", "observed", "status", "reason")}
    tags |= {f"{kind}.version.{name}": str(version) for name, version in transport["versions"].items()}
    name = f"{kind}/iteration-{row['iteration']:05d}.json"
    return [Tags(values=tags), Artifact(name=name, text=json.dumps(transport, indent=1, sort_keys=True))]


def _evaluation_metrics(row: Mapping[str, Any], timestamp_ms: int) -> list[Event]:
    if row["reward_eval"] is None:
        return []
    values = {"val-core/reward_mean": row["reward_eval"], "val-core/validated": float(row["validated"])}
    return [
        Metric(key=key, value=value, step=row["policy_version"], timestamp_ms=timestamp_ms)
        for key, value in values.items()
    ]


def _timestamp_ms(row: Mapping[str, Any]) -> int:
    """When the row's last finished attempt ended, by the database's clock; 0 when none did."""
    return int(max((attempt["end_s"] or 0.0 for attempt in row["attempts"]), default=0.0) * 1000)
