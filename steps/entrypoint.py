"""The frame around every step: environment, ledger entry, SIGTERM, one-line errors, exit codes, outputs, progress.

A step module parses its options (`steps.arguments`) and hands its body to `execute`, which opens the services.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from moe.dispatch.monitor import ExchangeFailed
from moe.divergence import Diverged
from steps import paths
from steps.adapters import ledger, retries
from steps.adapters.database import Database, open_database
from steps.adapters.store import Store, explained_os_errors, open_store
from steps.config import RunConfig
from steps.config_loader import config_from_json, prepare_validation
from steps.environment import StepEnvironment, package_versions, read_environment
from steps.errors import ConfigError, Interrupted, StepError
from steps.interruption import Interruption, Notice
from steps.notices import watch_notices

# Done at import, so that a step forked from a process that holds this module doesn't pay for it again.
VERSIONS = package_versions()
prepare_validation()

TERMINATION_LOG = Path("/dev/termination-log")
"""Kubernetes makes this file; what is in it becomes the container's termination message."""


@dataclass(kw_only=True)
class RankContext:
    """What every process of a step may use, also one of several ranks that run it together."""

    step: str
    run_id: str
    environment: StepEnvironment
    store: Store
    interruption: Interruption

    @cached_property
    def config(self) -> RunConfig:
        return config_from_json(self.store.get_bytes(paths.config_key(self.run_id)).decode())

    def say(self, message: str) -> None:
        """One line of log."""
        print(f"{time.strftime('%H:%M:%S')} {self.step}: {message}", flush=True)


@dataclass(kw_only=True)
class StepContext(RankContext):
    """What a step's body may use; of several ranks only the first has it. `metrics` ends up in the ledger's entry."""

    database: Database
    attempt_id: int
    """This process's entry in the ledger."""
    metrics: dict[str, Any]
    transport: dict[str, Any] = field(default_factory=dict)
    """How the tokens reached the experts (`moe.transport.report.collect`); in the ledger's entry, too."""

    @cached_property
    def config_hash(self) -> str:
        return ledger.get_run(self.database, self.run_id).config_hash

    def output(self, name: str, value: object) -> None:
        """Write one output parameter (or artifact text) where Argo's valueFrom.path points."""
        folder = self.environment.outputs_dir
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{name}.partial"
        partial.write_text(str(value))
        partial.replace(folder / name)

    def progress(self, done: int, total: int) -> None:
        """Report `done/total` to Argo; total is at least 1."""
        if self.environment.progress_file is not None:
            with self.environment.progress_file.open("a") as file:
                file.write(f"{done}/{max(total, 1)}\n")


AnyContext = TypeVar("AnyContext", bound=RankContext)


def execute(
    step: str,
    body: Callable[[StepContext], None],
    *,
    run_id: str,
    iteration: int | None = None,
    worker: int | None = None,
    prepare: Callable[[StepEnvironment], None] | None = None,
) -> NoReturn:
    """Run `body` as one attempt of `step` and exit the process with its code.

    `prepare` runs before the ledger is opened (init_run migrates the database there).
    """
    interruption = Interruption()
    interruption.install()
    retries.heed(interruption, step)
    try:
        paths.validate_run_id(run_id)
        environment = read_environment()
        if prepare is not None:
            prepare(environment)
        database = open_database(environment.database_url)
        store = open_store(environment.store_uri)
        attempt_id = ledger.begin_attempt(
            database,
            run_id=run_id,
            iteration=iteration,
            step=step,
            worker=None if worker is None else str(worker),
            pod=environment.pod,
            node=environment.node,
            capacity_type=environment.capacity_type,
            provenance_json=_provenance(environment),
        )
        context = StepContext(
            step=step,
            run_id=run_id,
            environment=environment,
            database=database,
            attempt_id=attempt_id,
            store=store,
            interruption=interruption,
            metrics={},
        )
        watch_notices(interruption, environment, context.say, partial(_record_notice, context))
        code, detail = run_body(body, context)
        _close_attempt(context, code, detail)
    except StepError as error:
        code = error.exit_code
        explain(step, error)
    raise SystemExit(code)


def explain(step: str, error: StepError, *, is_cause: bool = True) -> None:
    """One line for people: on stderr, and in a pod where Argo shows it as the node's message.

    What is not the cause (a rank that lost another one) does not replace what the other one has said there.
    """
    line = f"{step}: {error}"
    print(line, file=sys.stderr, flush=True)
    if TERMINATION_LOG.exists() and (is_cause or not TERMINATION_LOG.read_text()):
        TERMINATION_LOG.write_text(line)


def _provenance(environment: StepEnvironment) -> str:
    """What this attempt ran on, for the ledger."""
    return json.dumps(
        {"versions": VERSIONS, "workflow": environment.workflow, "retry": environment.attempt}, sort_keys=True
    )


def run_body(body: Callable[[AnyContext], None], context: AnyContext) -> tuple[int, str]:
    """Run the body; its exit code and the line that explains a failure."""
    try:
        with explained_os_errors(f"files of step {context.step}"):
            body(context)
    except StepError as error:
        explain(context.step, error)
        return error.exit_code, str(error)
    except Diverged as error:  # the user's settings led here, and the message names the one to change
        refusal = ConfigError(str(error))
        explain(context.step, refusal)
        return refusal.exit_code, str(refusal)
    except ExchangeFailed as error:  # another rank is gone: this one did nothing wrong and goes on where it was saved
        lost = Interrupted(f"{error}; run again to continue from the last saved state")
        explain(context.step, lost, is_cause=False)
        return lost.exit_code, str(lost)
    except Exception as error:  # a bug: it keeps its traceback, and the ledger learns that the attempt failed
        traceback.print_exc()
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


def _record_notice(context: StepContext, notice: Notice) -> None:
    """At once, since this process may be killed before its end, which records it again."""
    try:
        _store_notice(context, notice)
    except StepError as error:
        context.say(f"the notice isn't recorded yet: {error}")


def _store_notice(context: StepContext, notice: Notice) -> None:
    ledger.record_interruption(
        context.database,
        context.attempt_id,
        notice.reason,
        kind=notice.kind,
        age_s=notice.age_s,
        time_left_s=notice.time_left_s,
    )


def _close_attempt(context: StepContext, code: int, detail: str) -> None:
    """Write the attempt's end. A database that is away must not hide why the body failed."""
    try:
        for notice in context.interruption.notices:
            _store_notice(context, notice)
        ledger.end_attempt(
            context.database,
            context.attempt_id,
            exit_code=code,
            detail=detail,
            metrics_json=json.dumps(context.metrics, sort_keys=True),
            transport_json=json.dumps(context.transport, sort_keys=True),
        )
    except StepError:
        if code == 0:
            raise
