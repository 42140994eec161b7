"""What a person sees of runs on this machine: the table of a run, its HTML page, the list of runs."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from steps.adapters.store import explained_os_errors
from steps.errors import ConfigError, DataError, StepError
from workflows.printed_commands import mlflow_command, shown_path
from workflows.run_folder import RunFolder, RunRecord, list_runs

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]
"""Two lines of header, and the cell of a row."""

SHORT_PHASES = {"evaluate": "eval"}
PHASES = ("plan", "rollout", "reward", "flush", "train", "publish", "evaluate", "report")
TABLE_WIDTH = 100
"""Characters for all columns beside each other; a narrower terminal gets the seconds as a second table."""
WIDE_TABLE_WIDTH = 115


def load_report(folder: RunFolder) -> dict[str, Any]:
    """The run's report from its database; DataError while there is none."""
    from steps.adapters.database import open_database
    from steps.reporting import build_run_report

    if not folder.database.is_file():
        raise DataError(f"run {folder.run_id} has not recorded anything yet")
    return build_run_report(open_database(folder.database_url), folder.run_id)


def write_page(folder: RunFolder, report: Mapping[str, Any]) -> Path:
    """Write `report.html` beside the run's database; ServiceUnavailable when the disk does not take it."""
    from steps.report_html import render_run_html

    partial = folder.path / ".report.html.partial"
    with explained_os_errors(f"can't write {folder.html_report}"):
        partial.write_text(render_run_html(report), encoding="utf-8")
        return partial.replace(folder.html_report)


def print_report(folder: RunFolder, *, as_json: bool) -> None:
    """Print the report to stdout, as a table or as JSON, and write the page."""
    _print_report(folder, load_report(folder), as_json)


def _print_report(folder: RunFolder, report: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        console = table_console()
        for table in run_tables(report, console.width):
            console.print(table)
        state = f"{report['state']}, {report['wall_seconds']:.1f} s, weights {_weights(report)}"
        console.print(f"state   {state}", highlight=False)
    page = write_page(folder, report)
    if not as_json:
        print_line(f"report  {shown_path(page)}")


def print_outcome(folder: RunFolder, *, as_json: bool) -> None:
    """The end of `moerl run`: as much of a report as there is, and how to open MLflow.

    Nothing when the run ended before it had a policy: why it ended is about to be said.
    """
    report = load_report(folder)
    if report["initial"]["reward_eval"] is None:
        return
    _print_report(folder, report, as_json)
    if not as_json and folder.tracking_database.exists():
        print_line(f"MLflow  {mlflow_command('ui', '--backend-store-uri', folder.tracking_uri)}")


def print_line(text: str) -> None:
    """Print to stdout as it is: no markup, no line breaks."""
    table_console().print(text, markup=False, highlight=False, soft_wrap=True)


def table_console() -> Console:
    """Full width when stdout is no terminal, so that nothing is cut in a pipe or a log."""
    return Console(width=None if sys.stdout.isatty() else 140)


def run_tables(report: Mapping[str, Any], width: int) -> list[Table]:
    """One table of the policy versions, or two where `width` characters don't hold all columns."""
    rows = (report["initial"], *report["iterations"])
    scores, seconds = _score_columns(), _seconds_columns()
    groups = [scores + seconds] if width >= TABLE_WIDTH else [scores, scores[:1] + seconds]
    tables = []
    for columns in groups:
        gap = 2 if width >= WIDE_TABLE_WIDTH or len(groups) > 1 else 1
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        for heading, _ in columns:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*(cell(row) for _, cell in columns))
        tables.append(table)
    tables[0].title, tables[0].title_justify = report["run_id"], "left"
    return tables


def _score_columns() -> list[Column]:
    verdicts = {None: "-", True: "[green]yes[/]", False: "[red]no[/]"}
    return [
        ("\nversion", lambda row: str(row["policy_version"])),
        ("sample\nreward", lambda row: _number(row["reward_mean"], 3)),
        ("held-\nout", lambda row: _number(row["reward_eval"], 3)),
        ("\nvalid", lambda row: verdicts[row["validated"]]),
        ("tokens\n/s", lambda row: _number(row["rollout_tokens_per_s"], 0)),
        ("max\nviol.", lambda row: _number(row["expert_max_violation"], 2)),
    ]


def _seconds_columns() -> list[Column]:
    """Seconds of each phase, and from the first to the last: phases overlap."""

    def column(phase: str) -> Column:
        return f"{SHORT_PHASES.get(phase, phase)}\ns", lambda row: _seconds(row["phase_seconds"].get(phase))

    return [*(column(phase) for phase in PHASES), ("total\ns", lambda row: _seconds(row["wall_seconds"]))]


def print_runs(runs_dir: Path) -> None:
    """The table of `moerl runs`, oldest first; a run that can't be read is listed as such."""
    runs = [(folder, _record(folder)) for folder in list_runs(runs_dir)]
    if not runs:
        print(f"no runs in {runs_dir}")
        return
    table = Table(header_style="bold")
    for name in ("run", "config", "iterations", "held-out", "state"):
        table.add_column(name, justify="right" if name in {"iterations", "held-out"} else "left")
    for folder, record in sorted(runs, key=lambda run: ("" if run[1] is None else run[1].created, run[0].run_id)):
        table.add_row(*_run_cells(folder, record))
    table_console().print(table)


def _record(folder: RunFolder) -> RunRecord | None:
    """None when it is damaged or somebody else's."""
    try:
        folder.is_running()  # its lock may be out of reach, too
        return folder.load_record()
    except StepError:
        return None


def _run_cells(folder: RunFolder, record: RunRecord | None) -> Sequence[str]:
    if record is None:
        return folder.run_id, "-", "-", "-", "[red]unreadable[/]"
    state = "running" if folder.is_running() else {"new": "interrupted"}.get(record.state, record.state)
    done, heldout = _progress(folder)
    return folder.run_id, escape(record.config), f"{done}/{record.iterations}", _number(heldout, 3), escape(state)


def _progress(folder: RunFolder) -> tuple[int | str, float | None]:
    """Iterations evaluated ("?" when the database can't be read), and the last held-out reward."""
    from steps.adapters import ledger
    from steps.adapters.database import open_database

    if not folder.database.is_file():
        return 0, None
    try:
        evaluations = ledger.list_evaluations(open_database(folder.database_url), folder.run_id)
    except ConfigError:
        return 0, None  # interrupted while its database was being made
    except StepError:
        return "?", None
    return sum(1 for row in evaluations if row.policy_version > 0), evaluations[-1].reward_eval if evaluations else None


def _weights(report: Mapping[str, Any]) -> str:
    return (report["final_weights_sha256"] or "none yet")[:16]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _seconds(value: float | None) -> str:
    """At most four characters below three hours."""
    if value is None:
        return "-"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
