"""A run on this machine is a folder: `RUNS_DIR/RUN` holds its store, database, executor state and configuration.

    store/  database.sqlite  argo/  cache/  config.toml  run.json  report.html  lock

MLflow's database is shared by the runs of a folder: `RUNS_DIR/mlflow.db`. The lock is held by the process that drives
the run, so that a run is never driven twice at once, and a killed one is told from a running one.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from steps.errors import DataError, ServiceUnavailable, UsageError
from steps.paths import RUN_ID_PATTERN, validate_run_id

RECORD = "run.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What `resume` needs besides the configuration. `state`: new, finished, failed or interrupted."""

    run_id: str
    config: str
    created: str
    iterations: int
    rollout_workers: int
    reward_workers: int
    working_dir: str
    state: str = "new"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """Paths and addresses of one run."""

    runs_dir: Path
    run_id: str

    @property
    def path(self) -> Path:
        return self.runs_dir / self.run_id

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def executor_root(self) -> Path:
        return self.path / "argo"

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def html_report(self) -> Path:
        return self.path / "report.html"

    @property
    def database(self) -> Path:
        return self.path / "database.sqlite"

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.database}"

    @property
    def tracking_database(self) -> Path:
        return self.runs_dir / "mlflow.db"

    @property
    def tracking_uri(self) -> str:
        return f"sqlite:///{self.tracking_database}"

    def config_text(self) -> str:
        return self.config_file.read_text()

    def load_record(self) -> RunRecord:
        """Raise DataError when the file is missing or not ours."""
        try:
            return RunRecord(**json.loads((self.path / RECORD).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{self.path / RECORD} can't be read ({error}): start the run again") from None

    def save_record(self, record: RunRecord) -> None:
        partial = self.path / f".{RECORD}.partial"
        partial.write_text(json.dumps(asdict(record), indent=2) + "\n")
        partial.replace(self.path / RECORD)

    def is_running(self) -> bool:
        try:
            with self.lock():
                return False
        except ServiceUnavailable:
            return True

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run's lock; ServiceUnavailable when another process does. The system frees it when we die."""
        with (self.path / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ServiceUnavailable(
                    f"run {self.run_id} is being driven by another process: wait for it, or stop it first"
                ) from None
            yield


def create_run(runs_dir: Path, record: RunRecord, config_text: str) -> RunFolder:
    """Make the folder; UsageError when the run exists. `run.json` is written last: a folder without it is no run."""
    folder = RunFolder(runs_dir=runs_dir.resolve(), run_id=validate_run_id(record.run_id))
    if (folder.path / RECORD).exists():
        raise UsageError(
            f"run {folder.run_id} exists in {runs_dir}: continue it with `moerl resume {folder.run_id} "
            f"--runs-dir {runs_dir}`, or choose another --run-id"
        )
    try:
        folder.store.mkdir(parents=True, exist_ok=True)
        folder.config_file.write_text(config_text)
        folder.save_record(record)
    except OSError as error:
        raise ServiceUnavailable(f"can't write {folder.path}: {error.strerror}; choose another --runs-dir") from None
    return folder


def open_run(runs_dir: Path, run_id: str) -> RunFolder:
    """DataError when there is no such run; a path to the folder is accepted for its name."""
    name = Path(run_id).name
    folder = RunFolder(runs_dir=runs_dir.resolve(), run_id=name)
    if not RUN_ID_PATTERN.fullmatch(name) or not (folder.path / RECORD).is_file():
        raise DataError(f"no run {run_id!r} in {runs_dir}: `moerl runs --runs-dir {runs_dir}` lists those there are")
    return folder


def list_runs(runs_dir: Path) -> list[RunFolder]:
    """Every run of the folder, oldest first."""
    names = (path.parent.name for path in runs_dir.resolve().glob(f"*/{RECORD}"))
    folders = [RunFolder(runs_dir=runs_dir.resolve(), run_id=name) for name in names]
    return sorted(folders, key=lambda folder: (folder.load_record().created, folder.run_id))
