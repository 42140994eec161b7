"""One training run in MLflow, through its client (never the fluent API: that keeps a global active run).

Importing this module loads MLflow, which takes 1 to 2 s: `steps.adapters.tracking` does so only for a live server.
"""

import logging
import os
import posixpath
import re
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import requests
from mlflow import MlflowClient
from mlflow import entities as mlflow_entities
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from steps.adapters.spool import Artifact, Event, Metric, Params, RegisteredVersion, RunStatus, Tags
from steps.adapters.store import explained_os_errors, masked
from steps.adapters.tracking import TrackingOutage

RUN_TAG = "moerl.run_id"
SOURCE_TAG = "moerl.source"

# Limits of MLflow's REST API, per request and per name.
_MAX_METRICS = 1000
_MAX_PARAMS = 100
_MAX_NAME_CHARACTERS = 250
_FORBIDDEN_IN_NAMES = re.compile(r"[^\w\-. :/]", re.ASCII)
_LIVES_BEYOND_RETRIES = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST", "REQUEST_LIMIT_EXCEEDED"}


class MlflowRun:
    """A run that exists on the server; made by `open_run`."""

    def __init__(self, client: MlflowClient, tracking_uri: str, experiment_id: str, run_id: str) -> None:
        self._client = client
        self._tracking_uri = tracking_uri
        self._experiment_id = experiment_id
        self.id = run_id

    @property
    def url(self) -> str | None:
        """Page of the run in the UI; None without a server."""
        if not self._tracking_uri.startswith("http"):
            return None
        return f"{masked(self._tracking_uri).rstrip('/')}/#/experiments/{self._experiment_id}/runs/{self.id}"

    def send(self, events: Sequence[Event]) -> list[str]:
        """Send the events of one spool object; return one line for each that the server will never take.

        Raises TrackingOutage when the server fails: send the same events again later.
        """
        metrics = [event for event in events if isinstance(event, Metric)]
        others = [event for event in events if not isinstance(event, Metric)]
        jobs: list[Callable[[], None]] = [
            lambda chunk=metrics[start : start + _MAX_METRICS]: self._send_metrics(chunk)  # type: ignore[misc]
            for start in range(0, len(metrics), _MAX_METRICS)
        ]
        jobs += [lambda event=event: self._send_one(event) for event in others]  # type: ignore[misc]
        refused = []
        with _outages(self._tracking_uri):
            for job in jobs:
                try:
                    job()
                except MlflowException as error:
                    if error.error_code not in _LIVES_BEYOND_RETRIES:
                        raise
                    refused.append(f"refused: {_one_line(error)}")
        return refused

    def _send_metrics(self, metrics: Sequence[Metric]) -> None:
        batch = [
            mlflow_entities.Metric(valid_name(metric.key), metric.value, metric.timestamp_ms, metric.step)
            for metric in metrics
        ]
        self._client.log_batch(self.id, metrics=batch, synchronous=True)

    def _send_one(self, event: Event) -> None:
        match event:
            case Params(values=values):
                params = [mlflow_entities.Param(valid_name(key), value) for key, value in values.items()]
                for start in range(0, len(params), _MAX_PARAMS):
                    self._client.log_batch(self.id, params=params[start : start + _MAX_PARAMS], synchronous=True)
            case Tags(values=values):
                tags = [mlflow_entities.RunTag(valid_name(key), value) for key, value in values.items()]
                self._client.log_batch(self.id, tags=tags, synchronous=True)
            case Artifact(name=name, text=text):
                self._client.log_text(self.id, text, name)
            case RegisteredVersion():
                self._register(event)
            case RunStatus(state=state, timestamp_ms=timestamp_ms):
                self._set_status(state, timestamp_ms)

    def _set_status(self, state: str, timestamp_ms: int) -> None:
        if state == "RUNNING":
            self._client.update_run(self.id, status=state)
        else:
            self._client.set_terminated(self.id, status=state, end_time=timestamp_ms)

    def _register(self, event: RegisteredVersion) -> None:
        versions = self._client.search_model_versions(f"name = '{event.name}'", max_results=1000)
        same = [version for version in versions if version.tags.get(SOURCE_TAG) == event.source]
        number = int(same[0].version) if same else self._create_version(event)
        held = self._client.get_registered_model(event.name).aliases
        for alias in event.aliases:
            # A replay of old events must not take an alias back from a newer version.
            if int(held.get(alias, 0)) < number:
                self._client.set_registered_model_alias(event.name, alias, str(number))

    def _create_version(self, event: RegisteredVersion) -> int:
        try:
            self._client.create_registered_model(event.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        # A server refuses another machine's directories as a source: the tag tells where the publication is.
        source = event.source if "://" in event.source and not event.source.startswith("file:") else f"runs:/{self.id}/"
        tags = {**event.tags, SOURCE_TAG: event.source}
        return int(self._client.create_model_version(event.name, source, run_id=self.id, tags=tags).version)


def open_run(tracking_uri: str, experiment: str, run_id: str, start_ms: int) -> MlflowRun:
    """Find the MLflow run of the training run `run_id`, or create it. Raises TrackingOutage."""
    with _outages(tracking_uri):
        client = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
        experiment_id = _find_or_create_experiment(client, tracking_uri, experiment)
        found = _find_run(client, experiment_id, run_id)
        if found is None:
            tags = {RUN_TAG: run_id}
            created = client.create_run(experiment_id, start_time=start_ms, tags=tags, run_name=run_id).info.run_id
            found = _find_run(client, experiment_id, run_id) or created
            if found != created:  # another step created it at the same time: all keep the same one
                client.delete_run(created)
        return MlflowRun(client, tracking_uri, experiment_id, found)


def create_sqlite_file(path: Path) -> None:
    """Create an MLflow database file with its tables, whole or not at all: a kill can't leave half a schema.

    Raises ServiceUnavailable, TrackingOutage or sqlite3.Error at once when the file can't be used: MLflow itself would
    try for minutes.
    """
    with explained_os_errors(f"MLflow's database {path}"):
        if path.exists():
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True)) as connection:
                connection.execute("PRAGMA schema_version")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            temporary.touch()
            with _quiet_migrations(), _outages(f"sqlite:///{path}"):
                MlflowClient(tracking_uri=f"sqlite:///{temporary}").search_experiments(max_results=1)
            os.link(temporary, path)
        except FileExistsError:
            return
        finally:
            temporary.unlink(missing_ok=True)


def valid_name(name: str) -> str:
    """Return a metric, parameter or tag name that MLflow takes: other characters become `_`, paths are normalised."""
    cleaned = _FORBIDDEN_IN_NAMES.sub("_", name)[:_MAX_NAME_CHARACTERS]
    cleaned = posixpath.normpath(cleaned).lstrip("/")
    return "_" if cleaned in ("", ".") or cleaned.startswith("..") else cleaned


def _find_run(client: MlflowClient, experiment_id: str, run_id: str) -> str | None:
    runs = client.search_runs(
        [experiment_id],
        f"tags.`{RUN_TAG}` = '{run_id}'",
        max_results=1,
        order_by=["attributes.start_time ASC", "attributes.run_id ASC"],
    )
    return str(runs[0].info.run_id) if runs else None


def _find_or_create_experiment(client: MlflowClient, tracking_uri: str, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        if found.lifecycle_stage != "active":
            raise TrackingOutage(f"{masked(tracking_uri)}: experiment {name!r} was deleted; restore it")
        return str(found.experiment_id)
    artifacts = None
    if tracking_uri.startswith("sqlite:///"):
        # MLflow's default is ./mlruns of whichever process comes first.
        artifacts = (Path(tracking_uri.removeprefix("sqlite:///")).parent / "mlartifacts").as_uri()
    try:
        return str(client.create_experiment(name, artifact_location=artifacts))
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        return str(client.get_experiment_by_name(name).experiment_id)


@contextmanager
def _outages(tracking_uri: str) -> Iterator[None]:
    try:
        yield
    except (MlflowException, requests.RequestException, SQLAlchemyError, OSError) as error:
        raise TrackingOutage(f"{masked(tracking_uri)}: {_one_line(error)}; sent later") from error


@contextmanager
def _quiet_migrations() -> Iterator[None]:
    loggers = [logging.getLogger("alembic"), logging.getLogger("mlflow.store.db.utils")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _one_line(error: Exception) -> str:
    return masked(" ".join(str(error).split()))[:300]
