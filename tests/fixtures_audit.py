"""A finished run, for tests of the audit to copy and tamper with."""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from steps import paths
from steps.adapters.database import open_database
from steps.adapters.local_store import LocalStore
from steps.adapters.publications_manifest import read_manifest
from steps.audit import Audit, audit_run
from tests.fixtures_steps import RUN, StepRunner
from workflows.local.warm_client import WarmServer


@dataclass(frozen=True)
class AuditedRun:
    """A run's folder, as `moerl` lays it out: `store/`, `database.sqlite`."""

    folder: Path

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.folder / "store")

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.folder}/database.sqlite"

    def copy(self, folder: Path) -> "AuditedRun":
        shutil.copytree(self.folder, folder)
        return AuditedRun(folder)

    def audit(self, *, deep: bool = False) -> Audit:
        return audit_run(open_database(self.database_url), self.store, RUN, deep=deep)

    def sql(self, statement: str) -> None:
        """Change rows as somebody with the file would: no foreign key is enforced. Fails when nothing changed."""
        with closing(sqlite3.connect(self.folder / "database.sqlite")) as connection, connection:
            assert connection.execute(statement).rowcount > 0, statement

    def value(self, query: str) -> Any:
        with closing(sqlite3.connect(self.folder / "database.sqlite")) as connection:
            return connection.execute(query).fetchone()[0]

    def objects(self, prefix: str, name: str) -> Iterator[Path]:
        """The files of a folder of the store whose names are like `name`."""
        manifest = read_manifest(self.store, prefix)
        for entry in manifest.stored:
            if Path(entry.path).match(name):
                yield self.file(manifest.key_of(prefix, entry.path))

    def file(self, key: str) -> Path:
        return self.folder / "store" / key

    def edit_json(self, key: str, **changes: Any) -> None:
        path = self.file(key)
        path.write_text(json.dumps(json.loads(path.read_text()) | changes, sort_keys=True))


@pytest.fixture(scope="session")
def finished(warm_server: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> AuditedRun:
    """Two iterations; not to be changed."""
    folder = tmp_path_factory.mktemp("audited") / RUN
    runner = StepRunner(warm_server, folder, f"{folder}/store", f"sqlite:///{folder}/database.sqlite")
    assert runner.init().code == 0
    runner.iterate(1)
    runner.iterate(2)
    (folder / "run.json").write_text("{}")
    return AuditedRun(folder)


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def publication(version: int) -> str:
    return paths.publication_prefix(RUN, version)


def checkpoint(version: int) -> str:
    return paths.checkpoint_prefix(RUN, version)


def batch(iteration: int) -> str:
    return paths.batch_prefix(RUN, iteration)
