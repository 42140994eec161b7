"""The folder of a run on this machine: claimed once, found again, locked, and read whatever became of it."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from steps.config import RunConfig
from steps.config_loader import config_toml
from steps.errors import DataError, ServiceUnavailable, UsageError
from tests.experience import in_processes
from workflows import run_command, run_report
from workflows.cli import run_command_line
from workflows.run_folder import RunFolder, create_run, list_runs, open_run

NOBODY = 65534


def make_run(runs_dir: Path, run_id: str = "tiny-1", *, renumber: bool = False) -> RunFolder:
    record = run_command.new_record(run_id, "tiny.toml", RunConfig())
    return create_run(runs_dir, record, config_toml(RunConfig()), renumber=renumber)


def test_a_run_id_can_be_used_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with pytest.raises(UsageError, match="resume tiny-1 --runs-dir"):
        make_run(tmp_path)
    assert folder.load_record().run_id == "tiny-1"


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tiny-1").mkdir()
    with pytest.raises(UsageError, match="is no run"):
        make_run(tmp_path)
    assert list((tmp_path / "tiny-1").iterdir()) == []


def test_processes_that_claim_one_id_at_once_get_a_folder_each(tmp_path: Path) -> None:
    record = run_command.new_record(None, "tiny.toml", RunConfig())
    claim = partial(create_run, renumber=True)
    folders = in_processes(claim, [(tmp_path, record, "text")] * 4)
    expected = {record.run_id} | {f"{record.run_id}-{number}" for number in (2, 3, 4)}
    assert {folder.run_id for folder in folders} == expected
    assert {folder.load_record().run_id for folder in list_runs(tmp_path)} == expected


def test_runs_are_found_by_their_folder(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs")
    (tmp_path / "runs" / "something-else").mkdir()
    assert [run.run_id for run in list_runs(tmp_path / "runs")] == ["tiny-1"]
    assert open_run(tmp_path / "runs", "tiny-1") == folder
    with pytest.raises(DataError, match="no run 'something-else'"):
        open_run(tmp_path / "runs", "something-else")


def test_a_path_tells_the_folder_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    for path in (str(folder.path), "runs/tiny-1", "./runs/tiny-1/"):
        assert open_run(Path("elsewhere"), path) == folder
    monkeypatch.chdir(tmp_path / "runs")
    assert open_run(Path("elsewhere"), "./tiny-1") == folder


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"run_id": 1}', "\\xff"])
def test_a_damaged_record_is_named_and_the_other_runs_are_listed(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path, "damaged-1")
    make_run(tmp_path, "whole-1")
    (folder.path / "run.json").write_bytes(text.encode("latin-1").replace(b"\\xff", b"\xff"))
    with pytest.raises(DataError, match=r"run\.json"):
        folder.load_record()
    assert run_command_line(["runs", "--runs-dir", str(tmp_path)]) == 0
    states = {line.split()[1]: line.split()[-2] for line in capsys.readouterr().out.splitlines() if "-1" in line}
    assert states == {"damaged-1": "unreadable", "whole-1": "interrupted"}


def test_a_record_of_another_version_is_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    path = folder.path / "run.json"
    values: dict[str, Any] = json.loads(path.read_text())
    del values["python_path"]
    path.write_text(json.dumps(values | {"from_the_future": [1]}))
    assert folder.load_record().iterations == RunConfig().iterations


def test_a_runs_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServiceUnavailable, match="--runs-dir"):
        make_run(tmp_path / "file")


def test_a_full_disk_leaves_the_last_record(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder.path / ".run.json.partial").symlink_to("/dev/full")
    with pytest.raises(ServiceUnavailable, match=r"run\.json: the disk is full"):
        folder.save_record(folder.load_record())
    assert folder.load_record().state == "new"


@pytest.mark.parametrize("name", ["q?x", "p%20x"])
def test_a_folder_that_no_database_address_can_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't hold"):
        make_run(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_driven_by_one_process_at_a_time(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    assert not folder.is_running()
    with folder.lock():
        assert folder.is_running()
        with pytest.raises(ServiceUnavailable, match="another process"), folder.lock():
            pass
    assert not folder.is_running()


def test_ctrl_c_before_the_run_is_driven_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path)
    with folder.lock():  # `resume` waits for it for a moment
        monkeypatch.setattr("workflows.run_folder.time.sleep", lambda seconds: os.kill(os.getpid(), signal.SIGINT))
        assert run_command_line(["resume", str(folder.path)]) == 75
    assert capsys.readouterr().err == "moerl: stopped\n"


def look_many_times(runs_dir: Path) -> None:
    folder = open_run(runs_dir, "tiny-1")
    for _ in range(2000):
        folder.is_running()


def lock_many_times(runs_dir: Path) -> None:
    folder = open_run(runs_dir, "tiny-1")
    for _ in range(200):
        with folder.lock():
            pass


def look_or_lock(runs_dir: Path, locks: bool) -> None:
    (lock_many_times if locks else look_many_times)(runs_dir)


def test_looking_whether_a_run_is_driven_does_not_hinder_driving_it(tmp_path: Path) -> None:
    make_run(tmp_path)
    in_processes(look_or_lock, [(tmp_path, True), (tmp_path, False), (tmp_path, False)])


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything; an ordinary user is denied by modes alone."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def shared_runs() -> Iterator[Path]:
    """A folder that every user can read, with `mine-1`, and `theirs-1` that is closed to us."""
    with tempfile.TemporaryDirectory() as name:
        runs_dir = Path(name).resolve()
        runs_dir.chmod(0o755)
        make_run(runs_dir, "mine-1")
        theirs = make_run(runs_dir, "theirs-1")
        theirs.path.chmod(0)
        yield runs_dir
        theirs.path.chmod(0o755)


def test_another_users_run_is_listed_as_unreadable(shared_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with as_nobody():
        run_report.print_runs(shared_runs)
    states = {line.split()[1]: line.split()[-2] for line in capsys.readouterr().out.splitlines() if "-1" in line}
    assert states == {"theirs-1": "unreadable", "mine-1": "interrupted"}


@pytest.mark.parametrize(("run", "words"), [("theirs-1", "permission denied"), ("mine-1", "permission denied")])
def test_another_users_run_cannot_be_resumed(
    run: str, words: str, shared_runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shared_runs / "mine-1").chmod(0o555)
    with as_nobody():
        assert run_command_line(["resume", run, "--runs-dir", str(shared_runs)]) == 69
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error and run in error
