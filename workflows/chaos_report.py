"""`moerl chaos report`: the faults of a run as a table or JSON, and whether its weights are those of a calm run."""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from steps.adapters import ledger
from steps.adapters.database import open_database
from steps.adapters.lease_history import list_unit_leases
from steps.errors import DataError
from workflows.chaos_costs import FaultCost, History, cost_of
from workflows.chaos_log import read_log
from workflows.run_command import drive
from workflows.run_folder import RunFolder, create_run, open_run
from workflows.run_report import print_line, table_console

AUTO = "auto"
CALM_SUFFIX = "-calm"
RUN_ID_LENGTH = 40
HEADINGS = (
    "\nfault",
    "\nhit",
    "exit\ncode",
    "detected\ns",
    "restarted\ns",
    "recovered\ns",
    "samples\ncompleted",
    "\nreturned",
    "\nlost",
    "\nduplicated",
    "wasted\ntokens",
    "wasted\ns",
)


def print_chaos_report(runs_dir: Path, run: str, baseline: str, *, as_json: bool) -> None:
    """Print it to stdout. DataError: the run met no chaos, has not begun, or the baseline is of another kind."""
    folder = open_run(runs_dir, run)
    costs, missed = load_costs(folder)
    calm = find_baseline(folder, baseline) if baseline else None
    report = build_chaos_report(folder, costs, missed, calm)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    table_console().print(fault_table(folder.run_id, costs))
    for line in summary_lines(report):
        print_line(line)


def load_costs(folder: RunFolder) -> tuple[list[FaultCost], int]:
    """The faults that struck with what they cost, and the number of those that came too late."""
    if not folder.chaos_plan.is_file():
        raise DataError(f"run {folder.run_id} has no chaos plan: start a run with --chaos")
    log = read_log(folder.chaos_log)
    if not folder.database.is_file():
        raise DataError(f"run {folder.run_id} has not recorded anything yet")
    database = open_database(folder.database_url)
    history = History(
        attempts=ledger.list_attempts(database, folder.run_id), leases=list_unit_leases(database, folder.run_id)
    )
    return [cost_of(record, history) for record in log.records], len(log.missed)


def find_baseline(folder: RunFolder, baseline: str) -> RunFolder:
    """The undisturbed run to compare with, run now where `auto` finds none. DataError: another configuration."""
    if baseline != AUTO:
        calm = open_run(folder.runs_dir, baseline)
        if calm.config_text() != folder.config_text():
            raise DataError(f"run {calm.run_id} has another configuration than {folder.run_id}: choose another one")
        if calm.chaos_plan.exists():
            raise DataError(f"run {calm.run_id} met chaos itself: choose an undisturbed one, or --baseline {AUTO}")
        if calm.load_record().state != "finished":
            raise DataError(f"run {calm.run_id} is not finished: go on with {calm.resume_command}, or choose another")
        return calm
    calm_id = folder.run_id[: RUN_ID_LENGTH - len(CALM_SUFFIX)] + CALM_SUFFIX
    calm = RunFolder(runs_dir=folder.runs_dir, run_id=calm_id)
    if not calm.path.exists():
        record = replace(folder.load_record(), run_id=calm_id, state="new")
        calm = create_run(folder.runs_dir, record, folder.config_text())
    elif calm.config_text() != folder.config_text() or calm.chaos_plan.exists():
        raise DataError(f"run {calm_id} is no undisturbed run of {folder.run_id}'s configuration: remove it")
    record = calm.load_record()
    if record.state != "finished":
        drive(calm, record)
    return calm


def build_chaos_report(
    folder: RunFolder, costs: Sequence[FaultCost], missed: int, calm: RunFolder | None
) -> dict[str, Any]:
    own = weights(folder)
    other = None if calm is None else weights(calm)
    return {
        "run_id": folder.run_id,
        "state": folder.load_record().state,
        "faults": [fault_json(cost) for cost in costs],
        "missed": missed,
        "summary": summarize(costs),
        "versions": len(own),
        "final_weights_sha256": own[-1] if own else None,
        "baseline": None if calm is None else calm.run_id,
        "weights_equal": None if other is None else own == other,
        "first_different_version": None if other is None else first_difference(own, other),
    }


def fault_json(cost: FaultCost) -> dict[str, Any]:
    """Record and costs in one object."""
    costs = asdict(cost)
    return {**costs.pop("record"), "ended_the_pod": cost.record.ended_the_pod, **costs}


def weights(folder: RunFolder) -> list[str]:
    """SHA-256 of each publication's weights, from version 0 on."""
    rows = ledger.list_publications(open_database(folder.database_url), folder.run_id)
    return [row.weights_sha256 for row in rows]


def first_difference(own: Sequence[str], other: Sequence[str]) -> int | None:
    """The first policy version that is not the same, or is missing, in one of two runs."""
    if list(own) == list(other):
        return None
    pairs = zip(own, other, strict=False)
    return next((version for version, (one, two) in enumerate(pairs) if one != two), min(len(own), len(other)))


def summarize(costs: Sequence[FaultCost]) -> dict[str, Any]:
    """Sums and medians. `units_wasted_per_kill` counts kills of rollout workers only."""
    ended = [cost for cost in costs if cost.record.ended_the_pod]
    samplers = [cost for cost in ended if cost.record.step == "rollout"]
    return {
        "struck": len(costs),
        "ended_a_pod": len(ended),
        "by_kind": dict(sorted(Counter(cost.record.kind for cost in costs).items())),
        "by_step": dict(sorted(Counter(cost.record.step for cost in costs).items())),
        "recovery_s": spread(cost.recovered_s for cost in ended),
        "rollout_recovery_s": spread(cost.recovered_s for cost in samplers),
        "units_wasted": sum(cost.units_wasted for cost in costs),
        "units_wasted_per_kill_max": max((cost.units_wasted for cost in samplers), default=0),
        "samples_lost": sum(cost.samples_lost for cost in costs),
        "samples_returned": sum(cost.samples_returned for cost in costs),
        "samples_duplicated": sum(cost.samples_duplicated for cost in costs),
        "wasted_tokens": sum(cost.wasted_tokens for cost in costs),
        "wasted_s": sum(cost.wasted_s for cost in costs),
    }


def spread(values: Any) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {"median": statistics.median(known) if known else None, "max": max(known, default=None)}


def fault_table(run_id: str, costs: Sequence[FaultCost]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", title=run_id)
    table.title_justify = "left"
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in HEADINGS[:2] else "right", no_wrap=True)
    for cost in costs:
        table.add_row(*_cells(cost))
    return table


def _cells(cost: FaultCost) -> tuple[str, ...]:
    record = cost.record
    place = record.step + (f"-{record.iteration}" if record.iteration else "")
    place += f".{record.worker}" if record.worker >= 0 else ""
    counts = (cost.samples_completed, cost.samples_returned, cost.samples_lost, cost.samples_duplicated)
    return (
        record.kind,
        f"{place} attempt {record.attempt}",
        "-" if record.exit_code is None else str(record.exit_code),
        *(_seconds(value) for value in (cost.detected_s, cost.restarted_s, cost.recovered_s)),
        *(f"{count:,}" if record.step in ("rollout", "reward") else "-" for count in counts),
        f"{'<= ' if cost.tokens_are_bound else ''}{cost.wasted_tokens:,}",
        _seconds(cost.wasted_s),
    )


def summary_lines(report: dict[str, Any]) -> list[str]:
    summary = report["summary"]
    recovery = summary["rollout_recovery_s"]
    lines = [
        f"faults  {summary['struck']} struck, {summary['ended_a_pod']} of them ended a pod, "
        f"{report['missed']} came too late",
        f"wasted  {summary['units_wasted']} units, at most {summary['units_wasted_per_kill_max']} a kill of a rollout "
        f"worker; {summary['wasted_tokens']:,} tokens; {summary['wasted_s']:.1f} s",
    ]
    if recovery["median"] is not None:
        lines.append(
            f"again   a rollout worker's replacement committed after {_seconds(recovery['median'])} s (median), "
            f"{_seconds(recovery['max'])} s at most"
        )
    if report["baseline"] is not None:
        lines.append(f"weights {_verdict(report)}")
    return lines


def _verdict(report: dict[str, Any]) -> str:
    calm, first = f"the undisturbed run {report['baseline']}", report["first_different_version"]
    if first is None:
        return f"the same as {calm}"
    if report["state"] != "finished" and first == report["versions"]:
        return f"so far the same as {calm}: {first} versions; this run is {report['state']}"
    return f"NOT those of {calm}: version {first} differs"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
