"""A disk that is full and a clock that is set, under real steps: one line, nothing half-written, and on it goes."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from steps.adapters import local_store
from steps.adapters.local_store import LocalStore
from steps.adapters.store import Store, open_store
from tests.fixtures_steps import REPOSITORY, STAGES, StepRunner, stage_argv

DISK_BYTES = 24 << 20
DAY_S = 86400.0
JUMPING_CLOCK = """
import itertools, runpy, sys, time
real, numbers = time.time, itertools.count()
# Days ahead, days behind, and ahead again, from one call to the next.
time.time = lambda: real() + (3 if next(numbers) % 2 else -3) * 86400.0
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of its own, of DISK_BYTES."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this user may not mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> Path:
    """Leave not a byte."""
    path = folder / "filler"
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return path


def files_of(store: Store) -> dict[str, str]:
    return {info.key: info.etag for info in store.list("")}


@pytest.mark.parametrize("full", ["store", "database", "cache"])
def test_a_full_disk_stops_each_step_with_one_line_and_nothing_half_written(
    steps: StepRunner, small_disk: Path, undisturbed_versions: list[str], full: str
) -> None:
    if full == "store":
        steps.env["MOERL_STORE"] = steps.store_uri = str(small_disk)
    elif full == "database":
        steps.env["MOERL_DATABASE_URL"] = steps.database_url = f"sqlite:///{small_disk}/moerl.sqlite"
    else:
        steps.env["MOERL_CACHE_DIR"] = str(small_disk)
    assert steps.init().code == 0
    stopped = set()
    for stage in STAGES:
        filler = fill(small_disk)
        before = files_of(steps.store) if full == "store" else {}
        result = steps.step(stage)
        if result.code != 0:
            stopped.add(stage)
            lines = [line for line in result.log.splitlines() if line.startswith(f"{stage}: ")]
            assert result.code == 69 and len(lines) == 1 and "free some space" in lines[0], result.log
            assert "Traceback" not in result.log
            assert full != "store" or {key: files_of(steps.store).get(key) for key in before} == before
        filler.unlink()
        if result.code != 0:
            again = steps.step(stage)
            assert again.code == 0, again.log
    expected = {
        "store": {"plan", "flush", "train", "publish"},
        "database": set(STAGES),
        "cache": {"train", "evaluate"},
    }[full]
    assert expected <= stopped
    assert steps.weights() == undisturbed_versions[:2]


def test_a_download_to_a_full_disk_leaves_nothing(small_disk: Path, store_uri: str) -> None:
    store = open_store(store_uri)
    store.put_bytes("a", b"x" * (2 << 20))
    fill(small_disk)
    with pytest.raises(Exception, match="the disk is full; free some space") as caught:
        store.download_file("a", small_disk / "copy")
    assert "\n" not in str(caught.value)
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_steps_whose_clock_is_set_by_days_do_the_same(
    steps: StepRunner, undisturbed_versions: list[str], tmp_path: Path
) -> None:
    assert steps.init().code == 0
    for stage in STAGES:
        if stage not in ("rollout", "flush"):
            result = steps.step(stage)
            assert result.code == 0, result.log
            continue
        command = [sys.executable, "-c", JUMPING_CLOCK, *stage_argv(stage)]
        environment = {**os.environ, **steps.env, "MOERL_OUTPUTS_DIR": str(tmp_path / "outputs")}
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert steps.weights() == undisturbed_versions[:2]


def test_a_clock_that_is_set_ahead_takes_no_file_from_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    real: Callable[[], float] = time.time

    def write_while_another_starts(temporary: Path, target: Path) -> None:
        (tmp_path / ".moerl" / "tmp" / "left-by-a-kill").touch()
        monkeypatch.setattr(local_store.time, "time", lambda: real() + 3 * DAY_S)
        starting = threading.Thread(target=LocalStore, args=(tmp_path,))
        starting.start()
        starting.join()
        os.replace(temporary, target)

    store._write(tmp_path / "a", b"data", write_while_another_starts)
    assert store.get_bytes("a") == b"data"
    assert list((tmp_path / ".moerl" / "tmp").iterdir()) == []
