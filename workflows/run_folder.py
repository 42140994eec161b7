"""A run on this machine is a folder: `RUNS_DIR/RUN` holds its store, database, executor state and configuration.

    store/  database.sqlite  argo/  cache/  config.toml  run.json  report.html  lock  [chaos-plan.toml  chaos.jsonl]

MLflow's database is shared by the runs of a folder: `RUNS_DIR/mlflow.db`. The lock is held by the process that drives
the run, so that a run is never driven twice at once, and a killed one is told from a running one.
"""

import fcntl
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO

from steps.adapters.store import explained_os_errors
from steps.errors import DataError, ServiceUnavailable, StepError, UsageError
from steps.paths import RUN_ID_PATTERN, validate_run_id
from workflows.printed_commands import moerl_command, shown_path

RECORD = "run.json"
LOCK_WAIT_S = 1.0
"""`is_running` of another process may hold the lock for a moment."""
LOCK_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What `resume` needs besides the configuration. `state`: new, finished, failed or interrupted.

    `working_dir` is where `moerl run` was called, `python_path` the PYTHONPATH that it had (entries made absolute).
    """

    run_id: str
    config: str
    created: str
    iterations: int
    rollout_workers: int
    reward_workers: int
    working_dir: str
    python_path: str = ""
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
    def chaos_plan(self) -> Path:
        return self.path / "chaos-plan.toml"

    @property
    def chaos_log(self) -> Path:
        return self.path / "chaos.jsonl"

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
        """Raise DataError when the file is missing, ServiceUnavailable when it can't be read."""
        return _read(self.config_file)

    def load_record(self) -> RunRecord:
        """Raise DataError when the file is missing or not ours, ServiceUnavailable when it can't be read."""
        path = self.path / RECORD
        try:
            return _parse_record(_read(path))
        except ValueError as error:
            raise DataError(f"{path} can't be understood ({error}): start the run again") from None

    def save_record(self, record: RunRecord) -> None:
        """Raise ServiceUnavailable when the disk does not take it; the last one that was saved stays whole."""
        partial = self.path / f".{RECORD}.partial"
        with explained_os_errors(f"can't write {self.path / RECORD}"):
            partial.write_text(json.dumps(asdict(record), indent=2) + "\n")
            partial.replace(self.path / RECORD)

    @property
    def resume_command(self) -> str:
        return moerl_command("resume", self.run_id, "--runs-dir", shown_path(self.runs_dir))

    def is_running(self) -> bool:
        """Whether a process drives the run. Raise ServiceUnavailable when that can't be seen."""
        with explained_os_errors(f"run {self.run_id}"):
            try:
                with self._lock_file.open() as file:
                    return not _try_lock(file, fcntl.LOCK_SH)
            except FileNotFoundError:
                return False

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run's lock; ServiceUnavailable when another process does. The system frees it when we die."""
        with explained_os_errors(f"can't write {self._lock_file}"):
            file = self._lock_file.open("a")
        with file:
            deadline_s = time.monotonic() + LOCK_WAIT_S
            while not _try_lock(file, fcntl.LOCK_EX):
                if time.monotonic() > deadline_s:
                    raise ServiceUnavailable(
                        f"run {self.run_id} is being driven by another process: wait for it, or stop it first"
                    )
                time.sleep(LOCK_POLL_S)
            yield

    @property
    def _lock_file(self) -> Path:
        return self.path / "lock"


def _try_lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path) -> str:
    with explained_os_errors(f"can't read {path}"):
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise DataError(f"{path} is missing: start the run again") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not text ({error}): start the run again") from None


def _parse_record(text: str) -> RunRecord:
    """Unknown keys, those of a newer version, are passed over; ValueError for what is missing or of another type."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    known = {field.name: values.get(field.name, field.default) for field in fields(RunRecord)}
    for field in fields(RunRecord):
        assert isinstance(field.type, type)
        if not isinstance(known[field.name], field.type):
            raise ValueError(f"{field.name} is missing or not of type {field.type.__name__}")
    return RunRecord(**known)


def create_run(runs_dir: Path, record: RunRecord, config_text: str, *, renumber: bool = False) -> RunFolder:
    """Make the run's folder and fill it; `run.json` is written last: a folder without it is no run.

    Of several processes that ask for the same id, one gets it. `renumber`: the others get it with -2, -3, ...;
    otherwise UsageError. ServiceUnavailable when the folder can't be written.
    """
    root = resolve_runs_dir(runs_dir)
    run_id = validate_run_id(record.run_id)
    with explained_os_errors(f"--runs-dir {root}"):
        root.mkdir(parents=True, exist_ok=True)
        folder = _claim(root, [run_id])
        if folder is None and renumber:
            folder = _claim(root, (validate_run_id(f"{run_id}-{number}") for number in itertools.count(2)))
        if folder is None:
            raise _taken(RunFolder(runs_dir=root, run_id=run_id))
        try:
            folder.store.mkdir()
            folder.config_file.write_text(config_text, encoding="utf-8")
            folder.save_record(replace(record, run_id=folder.run_id))
        except (OSError, StepError):
            shutil.rmtree(folder.path, ignore_errors=True)  # the same command is to work once there is space
            raise
    return folder


def _claim(root: Path, run_ids: Iterable[str]) -> RunFolder | None:
    """Make the first folder that nobody else has made."""
    for run_id in run_ids:
        folder = RunFolder(runs_dir=root, run_id=run_id)
        try:
            folder.path.mkdir()
        except FileExistsError:
            continue
        return folder
    return None


def _taken(folder: RunFolder) -> UsageError:
    if (folder.path / RECORD).exists():
        way_on = f"continue it with `{folder.resume_command}`"
        return UsageError(f"run {folder.run_id} exists in {folder.runs_dir}: {way_on}, or choose another --run-id")
    return UsageError(f"{folder.path} exists and is no run: remove it, or choose another --run-id")


def resolve_runs_dir(runs_dir: Path) -> Path:
    """The absolute folder; UsageError for one that an SQLite address, as SQLAlchemy and MLflow read it, can't name."""
    try:
        root = runs_dir.resolve()
    except (OSError, RuntimeError) as error:
        raise UsageError(f"--runs-dir {runs_dir}: {error}; choose another folder") from None
    if wrong := sorted(set(str(root)) & set("?%\n\r")):
        characters = " or ".join(map(repr, wrong))
        raise UsageError(f"--runs-dir {str(root)!r}: its path can't hold {characters}; choose another folder")
    return root


def open_run(runs_dir: Path, run: str) -> RunFolder:
    """The run of this id in `runs_dir`, or the one whose folder `run` is the path of: that has a separator.

    DataError when there is no such run, ServiceUnavailable when the folder can't be looked into.
    """
    path = Path(run) if os.sep in run else runs_dir / run
    folder = RunFolder(runs_dir=resolve_runs_dir(path.parent), run_id=path.name)
    with explained_os_errors(f"can't read {path}"):
        if not RUN_ID_PATTERN.fullmatch(path.name) or not (folder.path / RECORD).is_file():
            listing = moerl_command("runs", "--runs-dir", shown_path(path.parent))
            raise DataError(f"no run {path.name!r} in {path.parent}: `{listing}` lists those there are")
    return folder


def list_runs(runs_dir: Path) -> list[RunFolder]:
    """Every run of the folder by its id, those that can't be looked into as well; none while there is no folder."""
    root = resolve_runs_dir(runs_dir)
    with explained_os_errors(f"can't read {root}"):
        names = sorted(os.listdir(root)) if root.exists() else []
        folders = [RunFolder(runs_dir=root, run_id=name) for name in names if RUN_ID_PATTERN.fullmatch(name)]
        return [folder for folder in folders if _holds_a_run(folder)]


def _holds_a_run(folder: RunFolder) -> bool:
    try:
        return (folder.path / RECORD).is_file()
    except PermissionError:  # somebody else's: a run as far as we can tell
        return True
