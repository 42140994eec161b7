"""Runs steps that are killed at their durable writes (tests/commit_recorder.py), and compares what comes of them."""

import hashlib
import json
import re
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steps.adapters.database import open_database
from steps.adapters.publications_manifest import MANIFEST_NAME, parse_manifest
from steps.adapters.store import Store
from steps.audit import audit_run
from tests.fixtures_steps import RUN, StepRunner

COMPARED = {
    "runs": "run_id, config_hash, config_json",
    "iterations": "iteration, policy_version, cursor_start, cursor_end, num_prompts, num_units",
    "prompt_draws": "iteration, prompt_uid, position, unit, status, drop_reason, consumed_by, prompt_ids",
    "work_units": "iteration, kind, unit, state, prompt_uids_json",
    "samples": "iteration, prompt_uid, sample_index, unit, min_version, num_tokens, seed, temperature, top_p, "
    "finish_reason, response_text, versions, response_ids, logprobs, routing",
    "rewards": "iteration, prompt_uid, sample_index, status, value, detail",
    "batches": "iteration, policy_version, num_groups, num_samples, num_tokens, num_dropped, uri, manifest_sha256",
    "publications": "policy_version, parent_version, uri, manifest_sha256, weights_sha256, size_bytes",
    "evaluations": "policy_version, reward_eval, num_prompts, validated, reason",
    "iteration_metrics": "iteration, phase, metrics_json",
}
"""What is to be the same however often a step was killed: all but times and who did it."""
WITH_TIMES = re.compile(r"/(reports|tracking)/")
MEASURED = re.compile(r"seconds|_s$|per_s|perf/|timing_s/|exchange|transport|duration")


@dataclass(frozen=True)
class Write:
    """A durable write of a step: its number within its rank, and its name."""

    rank: int
    number: int
    name: str


@dataclass(frozen=True)
class Site:
    """A run that steps are tried on: put back to where it was before each trial."""

    runner: StepRunner
    folder: Path
    """Its store and its database; the node's cache lies there, too, and is empty when a trial begins."""
    saved: Path

    def save(self) -> None:
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        shutil.rmtree(self.saved, ignore_errors=True)
        shutil.copytree(self.folder, self.saved)

    def put_back(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.saved, self.folder)

    def record(self, argv: Sequence[str]) -> list[Write]:
        """Run the step to its end; its writes in order, rank by rank."""
        code, log = self._run(argv, COMMITS_FILE=str(self._file))
        assert code == 0, log
        return sorted(self._take_writes(), key=lambda write: write.rank)

    def kill_at(self, argv: Sequence[str], write: Write, side: str) -> None:
        """Run the step until it is killed; AssertionError when it did not come to this write."""
        moment = f"{write.rank} {write.number} {side}"
        code, log = self._run(argv, COMMITS_FILE=str(self._file), COMMITS_KILL=moment)
        assert code == 137, f"{write}: {log}"
        done = [other for other in self._take_writes() if other.rank == write.rank]
        assert (write in done[-1:]) == (side == "after"), (write, side, done)

    def finish(self, argv: Sequence[str]) -> None:
        code, log = self._run(argv)
        assert code == 0, log

    def outcome(self) -> dict[str, Any]:
        """All that a later step may depend on; fails unless the audit finds every sum right."""
        database = open_database(self.runner.database_url)
        try:
            audit = audit_run(database, self.runner.store, RUN)
        finally:
            database.close()
        assert audit.clean, [str(failed) for failed in audit.findings.failed]
        return {"objects": _objects(self.runner.store), **_rows(self.folder / "moerl.sqlite")}

    @property
    def _file(self) -> Path:
        return self.folder / "commits"

    def _take_writes(self) -> list[Write]:
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self._file.unlink(missing_ok=True)
        words = [line.split(" ", 2) for line in lines]
        return [Write(int(rank), int(number), name) for rank, number, name in words]

    def _run(self, argv: Sequence[str], **variables: str) -> tuple[int, str]:
        self.runner.env = {name: value for name, value in self.runner.env.items() if "COMMITS" not in name} | variables
        result = self.runner.run(argv)
        return result.code, result.log


def _rows(path: Path) -> dict[str, Any]:
    with closing(sqlite3.connect(path)) as connection:
        tables = {
            table: sorted(connection.execute(f"SELECT {columns} FROM {table}"), key=repr)
            for table, columns in COMPARED.items()
        }
    metrics = [(*key, _without_times(json.loads(text))) for *key, text in tables.pop("iteration_metrics")]
    return {**tables, "iteration_metrics": metrics}


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if not MEASURED.search(key)}
    return [_without_times(item) for item in value] if isinstance(value, list) else value


def _objects(store: Store) -> list[tuple[str, str]]:
    """(key without upload ids, what is in it) of every object; a file that a killed attempt left behind shows."""
    found = []
    for info in store.list(""):
        key = re.sub(r"/[0-9a-f]{16}/", "/*/", info.key)
        if key.endswith(f"/{MANIFEST_NAME}"):
            manifest = parse_manifest(store.get_bytes(info.key), key)
            content = f"{manifest.sha256} {manifest.depth}"
        elif WITH_TIMES.search(key):
            content = ""
        else:
            content = hashlib.sha256(store.get_bytes(info.key)).hexdigest()
        found.append((key, content))
    return sorted(found)
