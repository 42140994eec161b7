"""What a person sees of runs on this machine: the table of a run, its HTML page, the list of runs."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from steps.errors import DataError, StepError
from workflows.run_folder import RunFolder, list_runs

MAIN_PHASES = ("rollout", "reward", "train")


def load_report(folder: RunFolder) -> dict[str, Any]:
    """The run's report from its database; DataError while there is none."""
    from steps.adapters.database import open_database
    from steps.reporting import build_run_report

    if not folder.database.is_file():
        raise DataError(f"run {folder.run_id} has not recorded anything yet")
    return build_run_report(open_database(folder.database_url), folder.run_id)


def write_page(folder: RunFolder, report: Mapping[str, Any]) -> Path:
    """Write `report.html` beside the run's database."""
    from steps.report_html import render_run_html

    partial = folder.path / ".report.html.partial"
    partial.write_text(render_run_html(report), encoding="utf-8")
    return partial.replace(folder.html_report)


def print_report(folder: RunFolder, *, as_json: bool) -> None:
    """Print the report to stdout, as a table or as JSON, and write the page."""
    _print_report(folder, load_report(folder), as_json)


def _print_report(folder: RunFolder, report: Mapping[str, Any], as_json: bool) -> None:
    page = write_page(folder, report)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = table_console()
    console.print(run_table(report))
    console.print(
        f"state   {report['state']}, {report['wall_seconds']:.1f} s, weights {_weights(report)}", highlight=False
    )
    console.print(f"report  {page}", highlight=False, soft_wrap=True)


def print_outcome(folder: RunFolder, *, as_json: bool) -> None:
    """The end of `moerl run`: as much of a report as there is, and how to open MLflow.

    Nothing when the run ended before it had a policy: why it ended is about to be said.
    """
    try:
        report = load_report(folder)
    except StepError:
        return
    if report["initial"]["reward_eval"] is None:
        return
    _print_report(folder, report, as_json)
    if not as_json and folder.tracking_database.exists():
        command = f"{Path(sys.executable).parent / 'mlflow'} ui --backend-store-uri {folder.tracking_uri}"
        table_console().print(f"MLflow  {command}", highlight=False, soft_wrap=True)


def table_console() -> Console:
    """Full width when stdout is no terminal, so that nothing is cut in a pipe or a log."""
    return Console(width=None if sys.stdout.isatty() else 140)


def run_table(report: Mapping[str, Any]) -> Table:
    table = Table(title=report["run_id"], title_justify="left", header_style="bold")
    for name in ("version", "reward", "held-out"):
        table.add_column(name, justify="right")
    table.add_column("validated")
    for name in ("tokens/s", *(f"{phase} s" for phase in MAIN_PHASES), "other s", "total s", "max violation"):
        table.add_column(name, justify="right")
    for row in (report["initial"], *report["iterations"]):
        table.add_row(*_cells(row))
    return table


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    phases = row["phase_seconds"]
    other = sum(seconds for phase, seconds in phases.items() if phase not in MAIN_PHASES)
    verdict = {None: "-", True: "[green]yes[/]", False: "[red]rejected[/]"}[row["validated"]]
    return (
        str(row["policy_version"]),
        _number(row["reward_mean"], 3),
        _number(row["reward_eval"], 3),
        verdict,
        _number(row["rollout_tokens_per_s"], 0),
        *(_number(phases.get(phase), 2) for phase in MAIN_PHASES),
        _number(other, 2),
        _number(row["wall_seconds"], 2),
        _number(row["expert_max_violation"], 2),
    )


def print_runs(runs_dir: Path) -> None:
    """The table of `moerl runs`."""
    folders = list_runs(runs_dir)
    if not folders:
        print(f"no runs in {runs_dir}")
        return
    table = Table(header_style="bold")
    for name in ("run", "config", "iterations", "held-out", "state"):
        table.add_column(name, justify="right" if name in {"iterations", "held-out"} else "left")
    for folder in folders:
        table.add_row(*_run_cells(folder))
    table_console().print(table)


def _run_cells(folder: RunFolder) -> Sequence[str]:
    record = folder.load_record()
    state = "running" if folder.is_running() else {"new": "interrupted"}.get(record.state, record.state)
    done, heldout = _progress(folder)
    return folder.run_id, record.config, f"{done}/{record.iterations}", _number(heldout, 3), state


def _progress(folder: RunFolder) -> tuple[int, float | None]:
    """Iterations evaluated, and the last held-out reward."""
    from steps.adapters import ledger
    from steps.adapters.database import open_database

    if not folder.database.is_file():
        return 0, None
    try:
        evaluations = ledger.list_evaluations(open_database(folder.database_url), folder.run_id)
    except StepError:
        return 0, None  # interrupted while its database was being made
    return sum(1 for row in evaluations if row.policy_version > 0), evaluations[-1].reward_eval if evaluations else None


def _weights(report: Mapping[str, Any]) -> str:
    return (report["final_weights_sha256"] or "none yet")[:16]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
