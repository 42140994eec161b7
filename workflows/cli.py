"""`moerl ...`, or `python -m workflows ...`: run campaigns on this machine, look at them, render the manifests.

Exit codes are those of `steps.errors`. A user's mistake is one line on stderr. Results go to stdout, progress does not.
Commands import what they need when they run: `moerl --help` loads neither torch nor MLflow.
"""

import errno
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from steps.errors import DataError, Interrupted, ServiceUnavailable, StepError, UsageError
from workflows.printed_commands import moerl_command, shown_path

if TYPE_CHECKING:
    from steps.config import RunConfig
    from workflows.run_folder import RunFolder

DEFAULT_CONFIG = "configs/reverse-digits.toml"
REPOSITORY = Path(__file__).resolve().parents[1]

app = typer.Typer(
    name="moerl",
    help="Reinforcement-learning post-training of Mixture-of-Experts models as Argo Workflows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show a resolved configuration, or its schema.", no_args_is_help=True)
app.add_typer(config_app, name="config")

Config = Annotated[
    str, typer.Argument(metavar="[CONFIG]", help="TOML file, or the name of one in configs/ (sort-digits).")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=value", help="Change one field; may be repeated."),
]
RunsDir = Annotated[Path, typer.Option("--runs-dir", metavar="DIR", help="Folder that holds the runs.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Run id, or the path of its folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
RUNS_DIR = Path("runs")
TYPER_INTERRUPTED = 130
"""Typer returns this after a Ctrl-C that no handler of ours took: before the run's start, or after its end."""
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


def examples(*lines: str) -> str:
    """Epilog of a command's help."""
    return "**Examples**\n\n" + "\n\n".join(f"`{line}`" for line in lines)


@app.command(
    epilog=examples("moerl run", "moerl run sort-digits --set seed=1 --set iterations=10", "moerl run my.toml")
)
def run(
    config: Config = DEFAULT_CONFIG,
    overrides: Overrides = None,
    runs_dir: RunsDir = RUNS_DIR,
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="ID", help="Default: name and time.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Run a campaign on this machine: the rendered Argo manifests in the local executor."""
    from steps.config_loader import config_toml
    from workflows import run_command
    from workflows.run_folder import create_run

    resolved = read_config(config, overrides)
    record = run_command.new_record(run_id, config, resolved)
    if dry_run:
        import yaml

        typer.echo(yaml.safe_dump(run_command.build_campaign(record, config_toml(resolved)), sort_keys=False), nl=False)
        return
    folder = create_run(runs_dir, record, config_toml(resolved), renumber=run_id is None)
    typer.echo(f"run     {folder.run_id} in {shown_path(folder.path)}", err=True)
    typer.echo(f"Ctrl-C  stops it cleanly; go on later with: {folder.resume_command}", err=True)
    drive_and_report(folder, as_json)


@app.command(epilog=examples("moerl resume reverse-digits-20260101-101500"))
def resume(run_id: Run, runs_dir: RunsDir = RUNS_DIR, as_json: Json = False) -> None:
    """Go on with a run that was stopped or failed; what was finished is not repeated."""
    from workflows.run_folder import open_run

    drive_and_report(open_run(runs_dir, run_id), as_json)


@app.command(epilog=examples("moerl runs", "moerl runs --runs-dir /data/runs"))
def runs(runs_dir: RunsDir = RUNS_DIR) -> None:
    """List the runs of a folder."""
    from workflows.run_report import print_runs

    print_runs(runs_dir)


@app.command(epilog=examples("moerl report RUN", "moerl report RUN --json | jq '.iterations[-1].reward_eval'"))
def report(
    run_id: Run,
    runs_dir: RunsDir = RUNS_DIR,
    as_json: Json = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open the HTML page in a browser.")] = False,
) -> None:
    """Show a run's table, and write its HTML page."""
    from workflows.run_folder import open_run
    from workflows.run_report import print_report

    folder = open_run(runs_dir, run_id)
    print_report(folder, as_json=as_json)
    if open_page and typer.launch(folder.html_report.as_uri()) != 0:
        raise ServiceUnavailable(f"no browser could be started here: open {folder.html_report} yourself")


@app.command(epilog=examples("moerl render", "moerl render --check"))
def render(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a committed file differs.")] = False,
) -> None:
    """Write the manifests under templates/ from the code."""
    from workflows import catalog

    folder = REPOSITORY / "templates"
    if not check:
        written = catalog.write(folder)
        typer.echo(f"written to {folder}: {', '.join(written) or 'nothing, all manifests were up to date'}")
    elif stale := catalog.check(folder):
        raise DataError(f"{', '.join(stale)} in {folder}: not what the code renders; run `make render`")
    else:
        typer.echo(f"the manifests in {folder} are what the code renders")


@config_app.command(epilog=examples("moerl config show", "moerl config show sort-digits --set seed=3"))
def show(config: Config = DEFAULT_CONFIG, overrides: Overrides = None) -> None:
    """Print the resolved configuration as TOML: every field, defaults included."""
    from steps.config_loader import config_toml

    typer.echo(config_toml(read_config(config, overrides)), nl=False)


@config_app.command(epilog=examples("moerl config schema > schema.json"))
def schema() -> None:
    """Print the JSON schema of a configuration."""
    from steps.config_loader import config_schema

    typer.echo(json.dumps(config_schema(), indent=2))


def read_config(name: str, overrides: Sequence[str] | None) -> "RunConfig":
    """Load a TOML file by its path, or a ready-made one by its path or name in the repository."""
    from steps.config_loader import load_config

    choices = (Path(name), REPOSITORY / name, REPOSITORY / "configs" / f"{name}.toml")
    try:
        path = next((choice for choice in choices if choice.is_file()), None)
    except OSError as error:
        shown = name if len(name) < 100 else f"{name[:100]}..."
        raise UsageError(f"configuration {shown!r}: {error.strerror}; give the path of a TOML file") from None
    if path is None:
        ready = ", ".join(sorted(file.stem for file in (REPOSITORY / "configs").glob("*.toml")))
        raise UsageError(f"no configuration {name!r}: give the path of a TOML file, or one of {ready}")
    return load_config(str(path), list(overrides or ()))


def drive_and_report(folder: "RunFolder", as_json: bool) -> None:
    """Drive a run to its end; its page and table are shown even when it did not get there."""
    from workflows.run_command import drive
    from workflows.run_report import print_outcome

    record = folder.load_record()
    try:
        drive(folder, record)
    except BaseException:
        # What ended the run is told, not that its report can't be shown either, as on a disk that is full.
        with suppress(StepError, OSError):
            print_outcome(folder, as_json=as_json)
        raise
    print_outcome(folder, as_json=as_json)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Console script `moerl`."""
    sys.exit(run_command_line(list(sys.argv[1:] if arguments is None else arguments)))


def run_command_line(arguments: list[str]) -> int:
    """The exit code; a user's mistake is printed as one line."""
    try:
        code = app(arguments, prog_name="moerl", standalone_mode=False)
        if code == TYPER_INTERRUPTED:
            raise KeyboardInterrupt
        sys.stdout.flush()
    except StepError as error:
        typer.echo(f"moerl: {error}", err=True)
        return error.exit_code
    except TyperException as error:
        if error.format_message():  # without arguments the help was printed instead
            typer.echo(f"moerl: {error.format_message().rstrip('.')}; see {moerl_command('--help')}", err=True)
        return UsageError.exit_code
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        # Wherever it was met, stdout included: what waits there for space must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        typer.echo(
            f"moerl: {error.filename or 'the output'}: {error.strerror}; free some space and run again", err=True
        )
        return ServiceUnavailable.exit_code
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("moerl: stopped", err=True)
        return Interrupted.exit_code
    return code if isinstance(code, int) else 0
