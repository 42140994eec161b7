"""The local executor carries out a chaos plan on real processes, and writes down what became of it."""

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.local_cluster import Cluster, step, workflow
from workflows.chaos_log import read_log
from workflows.local import chaos_damage
from workflows.local.chaos import Chaos, Surroundings
from workflows.local.chaos_plan import Fault
from workflows.local.status import NodeStatus

RETRY = {"limit": "3", "retryPolicy": "Always"}
GRACE = "terminationGracePeriodSeconds: 20\n"
ARGUMENTS = {"parameters": [{"name": "iteration", "value": "00001"}, {"name": "run", "value": "r"}]}


class Site:
    """A run's folder with one `train` step under a plan of one fault."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "chaos.jsonl"
        self.surroundings = Surroundings(
            database=folder / "database.sqlite", store=folder / "store", cache=folder / "cache"
        )

    def run(self, fault: dict[str, Any], *words: str) -> list[NodeStatus]:
        """Its attempts: the first sleeps for a minute, or does `words`; the others end at once."""
        plan = [Fault(step="train", iteration=1, **fault)]
        first = words or ("sleep", "{{=retries == '0' ? '60' : '0'}}")
        template = step("train", *first, retryStrategy=RETRY, podSpecPatch=GRACE)
        with Cluster(self.folder, chaos=Chaos(plan, self.log, self.surroundings)) as cluster:
            status = cluster.submit(workflow("wf", [template], arguments=ARGUMENTS))
        assert status.phase == "Succeeded"
        return status.attempts_of("wf")

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.log.read_text().splitlines()]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("sigkill", "137", "main: Error (exit code 137)"),
        ("sigterm", "143", "main: Error (exit code 143)"),
        ("delete", "-1", "pod deleted"),
    ],
)
def test_a_pod_is_ended_and_its_step_retried(site: Site, kind: str, code: str, message: str) -> None:
    first, second = site.run({"kind": kind, "after_s": 0.1})
    assert (first.exit_code, first.message, second.phase) == (code, message, "Succeeded")
    assert site.events() == ["struck", "ended"]
    (record,) = read_log(site.log).records
    assert (record.kind, record.step, record.iteration, record.worker, record.attempt) == (kind, "train", 1, -1, 0)
    assert record.pod == first.pod_name
    assert record.ended_the_pod and record.ended_at_s is not None and record.ended_at_s >= record.struck_at_s


def test_a_notice_is_a_file_and_then_sigkill(site: Site) -> None:
    first, _ = site.run({"kind": "notice", "after_s": 0.0, "seconds": 0.2})
    assert first.exit_code == "137"
    notice = json.loads((Path(first.folder) / "notice").read_text())
    assert (notice["reason"], notice["kind"]) == ("chaos", "stop")
    (record,) = read_log(site.log).records
    assert record.killed_at_s is not None and notice["at"] >= record.struck_at_s + 0.2
    assert site.events() == ["struck", "killed", "ended"]


def test_a_pod_that_heeds_its_notice_is_not_killed(site: Site) -> None:
    module = (
        "import os, time, pathlib\nwhile not pathlib.Path(os.environ['MOERL_NOTICE_FILE']).exists(): time.sleep(0.01)\n"
    )
    (only,) = site.run({"kind": "notice", "after_s": 0.0, "seconds": 30.0}, "exec", module)
    assert only.phase == "Succeeded"
    assert site.events() == ["struck", "ended"]
    assert not read_log(site.log).records[0].ended_the_pod


def test_a_frozen_pod_goes_on(site: Site) -> None:
    (only,) = site.run({"kind": "freeze", "after_s": 0.05, "seconds": 0.4}, "sleep", "0.2")
    (record,) = read_log(site.log).records
    assert only.phase == "Succeeded" and not record.ended_the_pod
    assert record.released_at_s is not None and record.ended_at_s is not None
    assert record.ended_at_s >= record.released_at_s >= record.struck_at_s + 0.4


def test_a_fault_strikes_at_a_fraction_of_the_work(site: Site) -> None:
    module = (
        "import os, time\n"
        "for done in (1, 2): open(os.environ['ARGO_PROGRESS_FILE'], 'a').write(f'{done}/4\\n')\n"
        "time.sleep({{=retries == '0' ? '60' : '0'}})"
    )
    first, _ = site.run({"kind": "sigkill", "at_progress": 0.5}, "exec", module)
    assert first.exit_code == "137"


def test_a_fault_after_the_end_is_missed(site: Site) -> None:
    (only,) = site.run({"kind": "sigkill", "after_s": 600}, "sleep", "0")
    assert only.phase == "Succeeded"
    log = read_log(site.log)
    assert (log.records, log.missed) == ((), (0,))


def test_the_database_is_locked_for_a_while(site: Site) -> None:
    with closing(sqlite3.connect(site.surroundings.database)) as connection:
        connection.execute("CREATE TABLE t (x)")
    module = (
        "import sqlite3\nc = sqlite3.connect(ARGUMENT, timeout=0, isolation_level=None)\n"
        "import time\nrefused = False\n"
        "while not refused:\n"
        "    try: c.execute('INSERT INTO t VALUES (1)')\n"
        "    except sqlite3.OperationalError: refused = True\n"
    ).replace("ARGUMENT", repr(str(site.surroundings.database)))
    (only,) = site.run({"kind": "database", "after_s": 0.0, "seconds": 0.5}, "exec", module)
    assert only.phase == "Succeeded"  # it was refused; otherwise it would try for ever
    assert sorted(site.events()) == ["ended", "released", "struck"]


def test_the_cache_is_damaged_before_the_next_attempt(site: Site) -> None:
    site.surroundings.cache.mkdir()
    (site.surroundings.cache / "weights").write_bytes(b"weights")
    module = "import os, sys, pathlib, time\nif not pathlib.Path(CACHE).exists(): sys.exit(0)\ntime.sleep(60)\n"
    first, second = site.run(
        {"kind": "cache", "after_s": 0.1}, "exec", module.replace("CACHE", repr(str(site.surroundings.cache)))
    )
    assert (first.exit_code, second.phase) == ("137", "Succeeded")
    assert site.events() == ["struck", "ended", "damaged"]


def test_an_attempt_is_struck_once_over_all_submissions(site: Site) -> None:
    plan = [Fault(step="train", iteration=1, kind="sigkill", after_s=0.1)]
    for phase in ("Failed", "Succeeded"):
        template = step("train", "sleep", "0.3", retryStrategy={**RETRY, "limit": "0"})
        with Cluster(site.folder, chaos=Chaos(plan, site.log, site.surroundings)) as cluster:
            assert cluster.submit(workflow("wf", [template], arguments=ARGUMENTS)).phase == phase
    assert site.events() == ["struck", "ended"]


def test_a_flipped_byte_changes_one_byte_of_the_largest_file(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"ab")
    (tmp_path / "large").write_bytes(bytes(9))
    assert chaos_damage.damage_cache(tmp_path, "flip") == "byte 4 of large changed"
    assert (tmp_path / "large").read_bytes() == bytes([0, 0, 0, 0, 1, 0, 0, 0, 0])
    assert (tmp_path / "small").read_bytes() == b"ab"


def test_the_newest_trainer_state_is_cut(tmp_path: Path) -> None:
    folder = tmp_path / "runs/r/checkpoints/00003-partial"
    for number in (2, 4):
        (folder / f"{number:05d}").mkdir(parents=True)
        (folder / f"{number:05d}" / "state").write_bytes(bytes(10))
    chaos_damage.truncate_partial_checkpoint(tmp_path, "r", 3)
    assert [(folder / f"{number:05d}" / "state").stat().st_size for number in (2, 4)] == [10, 5]
    assert chaos_damage.truncate_partial_checkpoint(tmp_path, "r", 1) == chaos_damage.NOTHING


def test_a_log_may_end_in_the_middle_of_a_line(site: Site) -> None:
    site.run({"kind": "sigkill", "after_s": 0.1})
    with site.log.open("a") as log:
        log.write('{"fault": 3, "ev')
    assert len(read_log(site.log).records) == 1


def test_lock_database_waits_for_other_writers(tmp_path: Path) -> None:
    database = tmp_path / "x.sqlite"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE t (x)")
    started_s = time.monotonic()
    chaos_damage.lock_database(database, 0.1)
    assert time.monotonic() - started_s >= 0.1
    with closing(sqlite3.connect(database, timeout=0)) as connection:
        connection.execute("INSERT INTO t VALUES (1)")
