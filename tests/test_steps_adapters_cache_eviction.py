"""Which copies stay in a node's cache, whoever is killed."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from steps.adapters import cache_eviction
from steps.adapters.publications import upload_folder
from steps.adapters.publications_cache import fetch_folder
from steps.adapters.publications_manifest import MANIFEST_NAME, read_manifest
from steps.adapters.store import Store, open_store
from steps.errors import ConfigError
from tests import forked

SIZE_BYTES = 100_000
TWO_COPIES = str(2 * SIZE_BYTES + 5000)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """With folders "0" to "4" of one size."""
    store = open_store(str(tmp_path / "store"))
    for number in range(5):
        folder = tmp_path / f"source-{number}"
        folder.mkdir()
        (folder / "weights").write_bytes(bytes([number]) * SIZE_BYTES)
        upload_folder(store, folder, str(number), {})
    return store


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOERL_CACHE_BYTES", TWO_COPIES)
    return tmp_path / "cache"


def fetch(store: Store, cache: Path, *numbers: int) -> None:
    """In processes that end, one after the other: each checks what it has got."""
    for number in numbers:

        def main(number: int = number) -> None:
            folder = fetch_folder(store, str(number), cache)
            assert (folder / "weights").read_bytes() == bytes([number]) * SIZE_BYTES

        code, output = forked.start(main).finish()
        assert code == 0, output


def cached(store: Store, cache: Path) -> set[int]:
    return {number for number in range(5) if (cache / read_manifest(store, str(number)).sha256).exists()}


@contextmanager
def user(store: Store, cache: Path, number: int) -> Iterator[forked.Program]:
    """A process that uses a copy until it is killed."""
    ready_fd, writing_fd = os.pipe()

    def main() -> None:
        folder = fetch_folder(store, str(number), cache)
        os.write(writing_fd, b"r")
        while (folder / "weights").exists():
            time.sleep(0.05)

    program = forked.start(main)
    os.close(writing_fd)
    assert os.read(ready_fd, 1) == b"r"
    yield program
    os.kill(program.pid, signal.SIGKILL)
    program.finish()
    os.close(ready_fd)


def test_the_longest_unused_copy_goes_first(store: Store, cache: Path) -> None:
    fetch(store, cache, 0, 1, 0, 2)
    assert cached(store, cache) == {0, 2}
    fetch(store, cache, 3)
    assert cached(store, cache) == {2, 3}
    fetch(store, cache, 0, 1, 2)


def test_a_copy_in_use_stays_until_its_user_is_gone(store: Store, cache: Path) -> None:
    with user(store, cache, 0):
        fetch(store, cache, 1, 2, 3)
        assert cached(store, cache) == {0, 3}
    fetch(store, cache, 4)
    assert cached(store, cache) == {3, 4}


def test_copies_in_use_may_exceed_the_limit(store: Store, cache: Path) -> None:
    with user(store, cache, 0), user(store, cache, 1), user(store, cache, 2):
        assert cached(store, cache) == {0, 1, 2}


def test_a_process_keeps_all_that_it_uses(store: Store, cache: Path) -> None:
    def main() -> None:
        folders = [fetch_folder(store, str(number), cache) for number in range(5)]
        assert all((folder / "weights").exists() for folder in folders)

    code, output = forked.start(main).finish()
    assert code == 0, output


@pytest.mark.parametrize("name", ["unlink", "rename"])
def test_an_eviction_that_was_killed_leaves_nothing_that_counts(
    store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fetch(store, cache, 0, 1)
    original: Callable[..., object] = getattr(Path, name)

    def fatal(path: Path, *arguments: object, **options: object) -> object:
        original(path, *arguments, **options)
        if path.is_relative_to(cache):
            os.kill(os.getpid(), signal.SIGKILL)
        return None

    def main() -> None:
        monkeypatch.setattr(Path, name, fatal)
        fetch_folder(store, "2", cache)

    assert forked.start(main).finish()[0] == -signal.SIGKILL
    fetch(store, cache, 0, 1, 2)
    assert cached(store, cache) == {1, 2}
    assert [entry.name for entry in cache.iterdir() if entry.name.startswith(".")] == []


def test_what_a_killed_download_left_is_deleted(store: Store, cache: Path) -> None:
    fetch(store, cache, 0)
    remains = cache / f".partial-{'a' * 64}"
    remains.mkdir()
    (remains / "weights").write_bytes(b"half")
    with cache_eviction.locked(cache / ("a" * 64)):
        fetch(store, cache, 1)
        assert remains.exists()  # somebody is downloading it
    fetch(store, cache, 2)
    assert not remains.exists()


def test_processes_that_need_more_than_there_is_room_for_all_get_it(
    store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOERL_CACHE_BYTES", str(SIZE_BYTES))

    def using(number: int) -> Callable[[], None]:
        def main() -> None:
            folder = fetch_folder(store, str(number), cache)
            assert (folder / "weights").read_bytes() == bytes([number]) * SIZE_BYTES
            assert (folder / MANIFEST_NAME).exists()

        return main

    programs = [forked.start(using(number)) for _ in range(6) for number in range(5)]
    for program in programs:
        code, output = program.finish()
        assert code == 0, output


def test_a_cache_that_somebody_has_emptied_is_filled_again(store: Store, cache: Path) -> None:
    def main() -> None:
        for _ in range(2):
            folder = fetch_folder(store, "0", cache)
            fetch(store, cache, 1, 2, 3)
            assert (folder / "weights").read_bytes() == bytes(SIZE_BYTES)
            shutil.rmtree(cache)

    code, output = forked.start(main).finish()
    assert code == 0, output


def test_without_a_limit_most_of_the_disk_is_used(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOERL_CACHE_BYTES", raising=False)
    fetch(store, tmp_path / "cache", 0, 1, 2, 3, 4)
    assert cached(store, tmp_path / "cache") == {0, 1, 2, 3, 4}


def test_a_limit_that_is_no_number_is_refused(store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOERL_CACHE_BYTES", "10GB")
    with pytest.raises(ConfigError, match="MOERL_CACHE_BYTES = '10GB'"):
        fetch_folder(store, "0", cache)
