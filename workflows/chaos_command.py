"""`moerl chaos report`: what the faults of a run cost, and whether they changed its outcome."""

from typing import Annotated

import typer

from workflows.shared_options import RUNS_DIR, Json, Run, RunsDir, examples

chaos_app = typer.Typer(help="What the faults of `moerl run --chaos` did to a run.", no_args_is_help=True)

ChaosPlan = Annotated[
    str | None,
    typer.Option("--chaos", metavar="PLAN", help="Disturb it: a TOML file of faults, or random:SEED:RATE."),
]


@chaos_app.callback()
def chaos() -> None:
    """What the faults of `moerl run --chaos` did to a run."""


@chaos_app.command(epilog=examples("moerl chaos report RUN", "moerl chaos report RUN --baseline auto --json"))
def report(
    run_id: Run,
    runs_dir: RunsDir = RUNS_DIR,
    baseline: Annotated[
        str, typer.Option(metavar="RUN", help="Undisturbed run to compare with; `auto`: run it now, once.")
    ] = "",
    as_json: Json = False,
) -> None:
    """For each fault: what was hit, when that was noticed and made good, and what it cost."""
    from workflows.chaos_report import print_chaos_report

    print_chaos_report(runs_dir, run_id, baseline, as_json=as_json)
