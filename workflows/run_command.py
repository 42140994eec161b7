"""Run or resume a campaign on this machine: the rendered manifests, submitted to the local executor."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from steps.adapters.store import explained_os_errors
from steps.config import RunConfig
from steps.engine_locks import ENGINE_VARIABLES, stop_hosts
from steps.environment import OPTIONAL_SETTINGS
from steps.errors import ConfigError, Interrupted, ServiceUnavailable, StepError, UsageError
from steps.paths import validate_run_id
from workflows.local.chaos import Chaos, Surroundings
from workflows.local.chaos_plan import Fault, plan_toml, read_plan
from workflows.local.events import Event
from workflows.local.executor import LocalCluster
from workflows.local.progress import ProgressView
from workflows.local.status import WorkflowStatus
from workflows.printed_commands import moerl_command, shown_path
from workflows.run_failure import RunFailed, explain_failure
from workflows.run_folder import RunFolder, RunRecord

REPOSITORY = Path(__file__).resolve().parents[1]
TEMPLATES = REPOSITORY / "templates"
NAME_LENGTH = 20


def new_run_id(config_name: str, now: datetime | None = None) -> str:
    """`name-YYYYmmdd-HHMMSS` in UTC; a long name is cut: an id has 40 characters, and `-2` may follow."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
    return f"{config_name[:NAME_LENGTH].rstrip('-')}-{stamp}"


def new_record(run_id: str | None, config_name: str, config: RunConfig) -> RunRecord:
    """What `run.json` holds; `config_name` is what the user called the configuration."""
    inherited = os.environ.get("PYTHONPATH", "")
    return RunRecord(
        run_id=validate_run_id(run_id) if run_id else new_run_id(config.name),
        config=config_name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        iterations=config.iterations,
        rollout_workers=config.rollout.workers,
        reward_workers=config.reward.workers,
        working_dir=str(Path.cwd()),
        python_path=os.pathsep.join(os.path.abspath(entry) for entry in inherited.split(os.pathsep) if entry),
    )


def build_campaign(record: RunRecord, config_text: str) -> dict[str, Any]:
    """The Workflow that is submitted: a reference to the template and its parameters, as `argo submit` makes it."""
    parameters = {
        "run": record.run_id,
        "config": config_text,
        "iterations": str(record.iterations),
        "rollout-workers": str(record.rollout_workers),
        "reward-workers": str(record.reward_workers),
        # The workers of one machine share a server that the first of them starts, beside the workflows.
        "engine-pods": "0",
    }
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": record.run_id},
        "spec": {
            "workflowTemplateRef": {"name": "policy-campaign"},
            "arguments": {"parameters": [{"name": name, "value": value} for name, value in parameters.items()]},
        },
    }


def load_templates(folder: Path = TEMPLATES) -> list[dict[str, Any]]:
    """The committed WorkflowTemplates: what runs here is what is applied to a cluster."""
    documents = []
    for path in sorted(folder.glob("policy-*.yaml")):
        documents += [document for document in yaml.safe_load_all(path.read_text()) if document]
    if not documents:
        raise ConfigError(f"no manifests in {folder}: render them with `{moerl_command('render')}`")
    return [document for document in documents if document["kind"] == "WorkflowTemplate"]


CREATE_TRACKING = (
    "import pathlib, sys; from steps.adapters.mlflow_run import create_sqlite_file; "
    "create_sqlite_file(pathlib.Path(sys.argv[1]))"
)


def create_tracking_database(path: Path) -> None:
    """Create MLflow's tables in the background: that takes seconds, which the first report would wait for otherwise.

    It fails without consequence: the reports create what is missing.
    """
    if not path.exists():
        command = [sys.executable, "-c", CREATE_TRACKING, str(path)]
        subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def read_faults(option: str, record: RunRecord) -> tuple[Fault, ...]:
    """The faults of `--chaos OPTION` for this run; ConfigError names what is wrong with the plan."""
    return read_plan(
        option,
        iterations=record.iterations,
        rollout_workers=record.rollout_workers,
        reward_workers=record.reward_workers,
    )


def begin_chaos(folder: RunFolder, faults: Sequence[Fault]) -> Chaos:
    """Write the plan into the run's folder. UsageError when another one is there: one run, one plan to replay."""
    text = plan_toml(faults)
    with explained_os_errors(f"can't write {folder.chaos_plan}"):
        if not folder.chaos_plan.exists():
            partial = folder.path / f".{folder.chaos_plan.name}.partial"
            partial.write_text(text, encoding="utf-8")
            partial.replace(folder.chaos_plan)
        elif folder.chaos_plan.read_text(encoding="utf-8") != text:
            shown = shown_path(folder.chaos_plan)
            raise UsageError(f"run {folder.run_id} has another chaos plan: use --chaos {shown}, or none")
    surroundings = Surroundings(database=folder.database, store=folder.store, cache=folder.cache)
    return Chaos(faults, folder.chaos_log, surroundings)


def drive(folder: RunFolder, record: RunRecord, faults: Sequence[Fault] | None = None) -> None:
    """Run the campaign to its end, from wherever it stands; `faults` strike it on the way.

    Raises UsageError for another chaos plan than the run's, Interrupted after Ctrl-C or SIGTERM, RunFailed with the
    failing step's exit code and last lines, and DataError or ServiceUnavailable when the run's folder can't be read or
    written.
    """
    campaign = build_campaign(record, folder.config_text())
    with folder.lock(), ProgressView() as view:
        chaos = None if faults is None else begin_chaos(folder, faults)
        with open_cluster(folder, record, view.on_event, chaos) as cluster:
            create_tracking_database(folder.tracking_database)
            try:
                with stopped_by_signals(cluster) as stopped:
                    status = cluster.submit(campaign)
            finally:
                stop_hosts(folder.cache)  # the servers of rollout engines outlive the steps that started them
    if status.phase == "Succeeded":
        folder.save_record(replace(record, state="finished"))
        return
    ending: StepError = Interrupted(f"stopped; resume with: {folder.resume_command}")
    if not stopped.is_set():
        ending = _failure(folder, status)
    # On a disk that is full the reason for the end is worth more than its record.
    with suppress(ServiceUnavailable):
        folder.save_record(replace(record, state="interrupted" if stopped.is_set() else "failed"))
    raise ending


def open_cluster(
    folder: RunFolder, record: RunRecord, on_event: Callable[[Event], None], chaos: Chaos | None = None
) -> LocalCluster:
    """The executor with this run's services in place of a cluster's ConfigMap and Secret.

    Steps also find the modules of the folder in which `moerl run` was called, where a user's verifier lies, and of the
    PYTHONPATH that it had. ServiceUnavailable when the executor's folder can't be written.
    """
    templates = load_templates()
    services = {"store": str(folder.store), "mlflow-tracking-uri": folder.tracking_uri}
    services |= {key: os.environ[name] for name, key in OPTIONAL_SETTINGS.items() if name in os.environ}
    with explained_os_errors(f"can't write {folder.executor_root}"):
        return LocalCluster(
            folder.executor_root,
            config_maps={"moerl-environment": services},
            secrets={"moerl-credentials": {"database-url": folder.database_url}},
            templates=templates,
            on_event=on_event,
            working_dir=REPOSITORY,
            chaos=chaos,
            extra_env={
                "MOERL_CACHE_DIR": str(folder.cache),
                "MOERL_CAPACITY_TYPE": "local",
                "PYTHONPATH": os.pathsep.join(filter(None, (record.working_dir, record.python_path))),
                **{name: os.environ[name] for name in ENGINE_VARIABLES if name in os.environ},
            },
        )


def _failure(folder: RunFolder, status: WorkflowStatus) -> RunFailed:
    """The error, after the log's last lines (of a bug) and the way on were printed to stderr."""
    failure = explain_failure(folder.executor_root, status)
    if failure.tail:
        print(failure.tail, file=sys.stderr)
    if failure.log is not None:
        print(f"log     {failure.log}", file=sys.stderr)
    print(f"resume  {folder.resume_command}", file=sys.stderr)
    return RunFailed(f"{failure.what}: {failure.why}", exit_code=failure.exit_code)


@contextmanager
def stopped_by_signals(cluster: LocalCluster) -> Iterator[threading.Event]:
    """Turn SIGINT and SIGTERM into `cluster.stop()`; the event tells whether one came."""
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()
        cluster.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
