"""`moerl submit | status | logs | stop | watch | doctor`: a run on a cluster, and the cluster itself.

They speak to the API of the current kubeconfig; no Argo Server is needed. Results go to stdout, remarks to stderr.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steps.errors import ConfigError, DataError, Interrupted, StepError, UsageError
from workflows.printed_commands import moerl_command
from workflows.shared_options import Context, Json, Namespace, Overrides, Parameters, examples, read_parameters

if TYPE_CHECKING:
    from workflows.cluster.client import Cluster
    from workflows.cluster.findings import Finding
    from workflows.cluster.status import RunView

cluster_app = typer.Typer()
Run = Annotated[str, typer.Argument(metavar="RUN", help="Run id.")]
WATCHED_ITERATIONS = 8
"""On the terminal at a time; `moerl status` shows all."""
STATE_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


@cluster_app.command(
    epilog=examples(
        "moerl submit sort-digits --dry-run",
        "moerl submit my.toml --set seed=1 -p rollout-workers=16 -p rollout-capacity=spot-then-on-demand --watch",
        "moerl submit --run-id my-run -p iterations=5",
    )
)
def submit(
    config: Annotated[
        str, typer.Argument(metavar="[CONFIG]", help="TOML file, name of one in configs/, or s3:// URI of one.")
    ] = "",
    overrides: Overrides = None,
    run_id: Annotated[str, typer.Option("--run-id", metavar="ID", help="Default: name and time.")] = "",
    parameters: Parameters = None,
    context: Context = "",
    namespace: Namespace = "",
    watch_it: Annotated[bool, typer.Option("--watch", help="Follow the run to its end.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; ask no cluster.")] = False,
    as_json: Json = False,
) -> None:
    """Start a campaign on the cluster, or add iterations to a run that has finished.

    The same as `argo submit --from workflowtemplate/policy-campaign`: parameters are those of that template.
    """
    from workflows.cluster.submit import campaign_workflow
    from workflows.cluster.submit import submit as create

    values = _config_parameter(config, overrides) | read_parameters(parameters)
    run = _run_id(run_id, config, values)
    if dry_run:
        import yaml

        typer.echo(yaml.safe_dump(campaign_workflow(run, run, values), sort_keys=False), nl=False)
        return
    cluster = _connect(context, namespace)
    _tell_created(cluster, run, create(cluster, run, values), as_json=as_json)
    if watch_it:
        _watch(cluster, run, as_json=as_json)


def resume_on_cluster(
    run_id: str,
    parameters: Sequence[str] | None,
    *,
    context: str = "",
    namespace: str = "",
    as_json: bool = False,
    unless: DataError | None = None,
) -> bool:
    """Resume the run on the cluster.

    `unless` is why it can't be resumed here: False when no cluster is configured either, so that it is the answer.
    """
    from workflows.cluster.sign_in import NoCluster
    from workflows.cluster.submit import resume

    try:
        cluster = _connect(context, namespace)
        workflow = resume(cluster, run_id, read_parameters(parameters))
    except StepError as error:
        if isinstance(error, NoCluster) and unless is not None:
            return False
        raise error if unless is None else type(error)(f"{unless}; {error}") from None
    _tell_created(cluster, run_id, workflow, as_json=as_json)
    return True


@cluster_app.command(epilog=examples("moerl status my-run", "moerl status my-run --json | jq '.iterations[-1]'"))
def status(run_id: Run, context: Context = "", namespace: Namespace = "", as_json: Json = False) -> None:
    """Show a run on the cluster: its iterations with reward and phase, what runs and what failed."""
    from workflows.cluster.status import load_view
    from workflows.cluster.tree import run_tree
    from workflows.run_report import table_console

    view = load_view(_connect(context, namespace), run_id)
    if as_json:
        typer.echo(json.dumps(view.to_json(), indent=2))
    else:
        table_console().print(run_tree(view), highlight=False)


@cluster_app.command(epilog=examples("moerl watch my-run", "moerl watch my-run --json"))
def watch(run_id: Run, context: Context = "", namespace: Namespace = "", as_json: Json = False) -> None:
    """Follow a run on the cluster to its end; the exit code is that of the step that ended it.

    With --json: one document a line, after each change. Ctrl-C ends the watching, not the run.
    """
    _watch(_connect(context, namespace), run_id, as_json=as_json)


@cluster_app.command(
    epilog=examples("moerl logs my-run --iteration 3 --step train", "moerl logs my-run --step rollout --follow")
)
def logs(
    run_id: Run,
    iteration: Annotated[int, typer.Option("--iteration", "-i", min=0, help="Of this iteration only; 0: all.")] = 0,
    step: Annotated[str, typer.Option("--step", "-s", help="Of this step only: rollout, train, init, ...")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", min=0, help="Last lines of each pod; default: all.")] = None,
    context: Context = "",
    namespace: Namespace = "",
    as_json: Json = False,
) -> None:
    """Print what the pods of a run wrote, each line with the iteration and step that it comes from."""
    from dataclasses import asdict

    from workflows.cluster.logs import LogFilter, follow_logs, read_logs

    cluster = _connect(context, namespace)
    read = follow_logs if follow else read_logs
    for line in read(cluster, run_id, LogFilter(iteration=iteration, step=step), tail=tail):
        typer.echo(json.dumps(asdict(line)) if as_json else f"{line.source}: {line.text}")
        sys.stdout.flush()


@cluster_app.command(epilog=examples("moerl stop my-run"))
def stop(run_id: Run, context: Context = "", namespace: Namespace = "", as_json: Json = False) -> None:
    """Stop a run on the cluster: steps save what they have; `moerl resume` goes on with it.

    Like `argo stop`, it lets exit handlers run, which delete a training gang. Returns before the pods have ended.
    """
    from workflows.cluster.stop import stop_run

    names = stop_run(_connect(context, namespace), run_id)
    if as_json:
        typer.echo(json.dumps({"run_id": run_id, "stopping": names}))
    else:
        typer.echo(f"stopping {', '.join(names)}; go on later with: {moerl_command('resume', run_id)}")


@cluster_app.command(epilog=examples("moerl doctor", "moerl doctor --profile p5en -n moerl --json"))
def doctor(
    profile: Annotated[str, typer.Option("--profile", metavar="NAME", help="Platform profile that must fit.")] = "cpu",
    context: Context = "",
    namespace: Namespace = "",
    as_json: Json = False,
) -> None:
    """Check a cluster: Argo, rights, accounts, secrets, services, image, nodes; and say how to mend what is wrong.

    Nothing is changed, and no value of a Secret is shown. Exit code 78 when a check fails.
    """
    from dataclasses import asdict

    from workflows.cluster.doctor import examine
    from workflows.platform import load_profile

    sizes = load_profile(profile)
    findings = []
    for finding in examine(_connect(context, namespace), sizes):
        findings.append(finding)
        if not as_json:
            _print_finding(finding)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    failed = sum(finding.state == "fail" for finding in findings)
    if failed:
        raise ConfigError(f"{failed} of {len(findings)} checks failed: mend them in the order shown")


def _connect(context: str, namespace: str) -> "Cluster":
    from workflows.cluster.client import connect

    return connect(context=context, namespace=namespace)


def _config_parameter(config: str, overrides: Sequence[str] | None) -> dict[str, str]:
    """The parameter `config`: the resolved TOML text of a file here, or a URI as it is; none without CONFIG."""
    from steps.config_loader import config_toml
    from workflows.shared_options import read_config

    if not config or config.startswith("s3://"):
        if overrides:
            raise UsageError(
                "--set changes a configuration that is read here: name one, as in moerl submit sort-digits"
            )
        return {"config": config} if config else {}
    return {"config": config_toml(read_config(config, overrides))}


def _run_id(run_id: str, config: str, values: dict[str, str]) -> str:
    """The id given, as an option or as the template's parameter; else the configuration's name and the time."""
    from steps.paths import validate_run_id
    from workflows.run_command import new_run_id

    given = run_id or values.get("run", "")
    if given:
        return validate_run_id(given)
    stem = PurePosixPath(config).stem.lower() or "campaign"
    name = "".join(character if character.isascii() and character.isalnum() else "-" for character in stem).strip("-")
    return validate_run_id(new_run_id(name or "campaign", datetime.now(UTC)))


def _tell_created(cluster: "Cluster", run_id: str, workflow: dict[str, Any], *, as_json: bool) -> None:
    name = workflow["metadata"]["name"]
    if as_json:
        place = {"namespace": cluster.namespace, "context": cluster.context}
        typer.echo(json.dumps({"run_id": run_id, "workflow": name} | place))
    else:
        typer.echo(f"run     {run_id}: workflow {name} in namespace {cluster.namespace} of {cluster.context}")
        typer.echo(f"follow  {moerl_command('watch', run_id)}", err=True)


def _watch(cluster: "Cluster", run_id: str, *, as_json: bool) -> None:
    """Show the run until it has ended; RunFailed with the failing step's exit code when it did not succeed."""
    from workflows.cluster.watch import watch_run
    from workflows.run_failure import RunFailed

    last = None
    try:
        for view in _shown(watch_run(cluster, run_id), as_json=as_json):
            last = view
    except KeyboardInterrupt:
        again = moerl_command("watch", run_id)
        raise Interrupted(f"no longer watching; run {run_id} goes on: `{again}`") from None
    if last is not None and last.phase != "Succeeded":
        raise RunFailed(f"run {run_id}: {last.failure}", exit_code=last.exit_code)


def _shown(views: "Iterator[RunView]", *, as_json: bool) -> "Iterator[RunView]":
    """Each view as it is shown: as JSON, as a live tree on a terminal, or else as a line for each change."""
    from rich.live import Live

    from workflows.cluster.tree import changes, run_tree
    from workflows.run_report import table_console

    if not as_json and sys.stdout.isatty():
        with Live(console=table_console(), auto_refresh=False) as live:
            for view in views:
                live.update(run_tree(view, most=WATCHED_ITERATIONS), refresh=True)
                yield view
        return
    before = None
    for view in views:
        for line in [json.dumps(view.to_json())] if as_json else changes(before, view):
            typer.echo(line)
        sys.stdout.flush()
        before = view
        yield view


def _print_finding(finding: "Finding") -> None:
    from rich.markup import escape

    from workflows.run_report import table_console

    console = table_console()
    state = f"[{STATE_COLOURS[finding.state]}]{finding.state:<4}[/]"
    console.print(f"{state}  {escape(finding.check)}: {escape(finding.detail)}", highlight=False, soft_wrap=True)
    if finding.mend:
        console.print(f"      [dim]mend:[/] {escape(finding.mend)}", highlight=False, soft_wrap=True)
