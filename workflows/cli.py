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
from workflows.audit_command import audit_app
from workflows.chaos_command import ChaosPlan, chaos_app
from workflows.cluster_commands import cluster_app, resume_on_cluster
from workflows.lint_command import lint_app
from workflows.plan_command import plan_app
from workflows.printed_commands import moerl_command, shown_path
from workflows.shared_options import (
    DEFAULT_CONFIG,
    REPOSITORY,
    RUNS_DIR,
    Config,
    Context,
    Json,
    Namespace,
    Overrides,
    Parameters,
    Run,
    RunsDir,
    examples,
    read_config,
)
from workflows.transport_command import transport_app

if TYPE_CHECKING:
    from workflows.local.chaos_plan import Fault
    from workflows.run_folder import RunFolder

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
app.add_typer(transport_app, name="transport")
app.add_typer(chaos_app, name="chaos")
app.add_typer(audit_app)
app.add_typer(cluster_app)
app.add_typer(lint_app)
app.add_typer(plan_app)

TYPER_INTERRUPTED = 130
"""Typer returns this after a Ctrl-C that no handler of ours took: before the run's start, or after its end."""
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


@app.command(
    epilog=examples(
        "moerl run",
        "moerl run sort-digits --set seed=1 --set iterations=10",
        "moerl run my.toml",
        "moerl run --chaos random:7:0.1",
    )
)
def run(
    config: Config = DEFAULT_CONFIG,
    overrides: Overrides = None,
    runs_dir: RunsDir = RUNS_DIR,
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="ID", help="Default: name and time.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; write nothing.")] = False,
    chaos: ChaosPlan = None,
    as_json: Json = False,
) -> None:
    """Run a campaign on this machine: the rendered Argo manifests in the local executor."""
    from steps.config_loader import config_toml
    from workflows import run_command
    from workflows.run_folder import create_run

    resolved = read_config(config, overrides)
    record = run_command.new_record(run_id, config, resolved)
    faults = None if chaos is None else run_command.read_faults(chaos, record)
    if dry_run:
        import yaml

        typer.echo(yaml.safe_dump(run_command.build_campaign(record, config_toml(resolved)), sort_keys=False), nl=False)
        return
    folder = create_run(runs_dir, record, config_toml(resolved), renumber=run_id is None)
    typer.echo(f"run     {folder.run_id} in {shown_path(folder.path)}", err=True)
    typer.echo(f"Ctrl-C  stops it cleanly; go on later with: {folder.resume_command}", err=True)
    drive_and_report(folder, as_json, faults)


@app.command(
    epilog=examples(
        "moerl resume reverse-digits-20260101-101500",
        "moerl resume my-run -n moerl -p image=registry.example.com/moerl:2",
    )
)
def resume(
    run_id: Run,
    runs_dir: RunsDir = RUNS_DIR,
    parameters: Parameters = None,
    context: Context = "",
    namespace: Namespace = "",
    chaos: ChaosPlan = None,
    as_json: Json = False,
) -> None:
    """Go on with a run that was stopped or failed; what was finished is not repeated.

    A run in the folder of runs goes on here; any other, or one of a named context or namespace, on the cluster.
    """
    from workflows.run_command import read_faults
    from workflows.run_folder import open_run

    elsewhere = bool(context or namespace or parameters)
    try:
        folder = None if elsewhere and os.sep not in run_id else open_run(runs_dir, run_id)
    except DataError as not_here:
        if os.sep in run_id or chaos is not None:
            raise
        if not resume_on_cluster(run_id, parameters, as_json=as_json, unless=not_here):
            raise
        return
    if folder is not None:
        faults = None if chaos is None else read_faults(chaos, folder.load_record())
        drive_and_report(folder, as_json, faults)
    elif chaos is not None:
        raise UsageError("--chaos disturbs runs on this machine only")
    else:
        resume_on_cluster(run_id, parameters, context=context, namespace=namespace, as_json=as_json)


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


@app.command(epilog=examples("moerl render", "moerl render --check", "moerl render --profile p6-b200 --out my/overlay"))
def render(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a committed file differs.")] = False,
    profile: Annotated[str | None, typer.Option("--profile", metavar="NAME", help="Platform to render for.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder to write to.")] = None,
) -> None:
    """Write the manifests from the code: those of templates/, or with --profile those of one platform."""
    from steps.adapters.store import explained_os_errors
    from workflows import catalog
    from workflows.platform import load_profile

    if (profile is None) != (out is None):
        raise UsageError("--profile and --out go together: the folder gets the manifests of that platform")
    folder = REPOSITORY / "templates" if out is None else out
    rendered = catalog.render_committed() if profile is None else catalog.render_all(load_profile(profile))
    with explained_os_errors(f"can't write {folder}"):
        if not check:
            written = catalog.write(folder, rendered)
            typer.echo(f"written to {folder}: {', '.join(written) or 'nothing, all manifests were up to date'}")
        elif stale := catalog.check(folder, rendered):
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


def drive_and_report(folder: "RunFolder", as_json: bool, faults: "Sequence[Fault] | None" = None) -> None:
    """Drive a run to its end; its page and table are shown even when it did not get there."""
    from workflows.run_command import drive
    from workflows.run_report import print_outcome

    record = folder.load_record()
    try:
        drive(folder, record, faults)
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
