import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from steps.adapters.publications import (
    finish_folder,
    move_pointer,
    new_upload_id,
    read_pointer,
    upload_files,
    upload_folder,
)
from steps.adapters.publications_cache import fetch_files, fetch_folder
from steps.adapters.publications_manifest import MANIFEST_NAME, Manifest, read_manifest
from steps.adapters.store import NotFound, Store, open_store, sha256_of_file
from steps.errors import DataError, ServiceUnavailable

PREFIX = "runs/r/publications/00001"
LARGE_BYTES = 80 << 20

UPLOAD_PROGRAM = """
import sys
from pathlib import Path
from steps.adapters.publications import upload_folder
from steps.adapters.store import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
upload_folder(store, Path(sys.argv[2]), sys.argv[3], {})
"""

FETCH_PROGRAM = """
import sys
from pathlib import Path
from steps.adapters.publications_cache import fetch_folder
from steps.adapters.store import open_store
print(fetch_folder(open_store(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
"""

MEMORY_PROGRAM = """
import resource, sys
from pathlib import Path
from steps.adapters.publications import upload_folder
from steps.adapters.publications_cache import fetch_folder
from steps.adapters.store import open_store
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
store = open_store(sys.argv[1])
for name in ("small", "large"):
    upload_folder(store, Path(sys.argv[2]) / name, name, {})
    fetch_folder(store, name, Path(sys.argv[3]))
    print(peak())
"""


def run_program(program: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )


@pytest.fixture
def store(store_uri: str) -> Store:
    return open_store(store_uri)


@pytest.fixture
def local_store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    (path / "nested").mkdir(parents=True)
    (path / "config.json").write_text('{"a": 1}')
    (path / "model.safetensors").write_bytes(os.urandom(300_000))
    (path / "nested" / "empty.txt").write_bytes(b"")
    return path


def manifest_text(**changes: object) -> str:
    return json.dumps({"format": 2, "upload_id": "0" * 16, "files": [], "extra": {}, "delta": None} | changes)


def contents(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file() and file.name != MANIFEST_NAME)
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def test_a_folder_comes_back_with_its_manifest(store: Store, folder: Path, tmp_path: Path) -> None:
    manifest = upload_folder(store, folder, PREFIX, {"policy_version": 1, "parent": None})
    assert read_manifest(store, PREFIX) == manifest
    assert manifest.extra == {"policy_version": 1, "parent": None}
    assert [entry.path for entry in manifest.files] == ["config.json", "model.safetensors", "nested/empty.txt"]
    assert manifest.size_bytes == 300_008
    fetched = fetch_folder(store, PREFIX, tmp_path / "cache")
    assert fetched.name == manifest.sha256 and contents(fetched) == contents(folder)
    assert (fetched / MANIFEST_NAME).read_bytes() == store.get_bytes(f"{PREFIX}/{MANIFEST_NAME}")


def test_publishing_again_is_harmless(store: Store, folder: Path) -> None:
    first = upload_folder(store, folder, PREFIX, {"v": 1})
    before = store.list(PREFIX)
    assert upload_folder(store, folder, PREFIX, {"v": 1}) == first
    assert store.list(PREFIX) == before


@pytest.mark.parametrize("change", ["content", "extra", "file"])
def test_another_content_is_refused_and_writes_nothing(store: Store, folder: Path, change: str) -> None:
    upload_folder(store, folder, PREFIX, {"v": 1})
    before = store.list(PREFIX)
    if change == "content":
        (folder / "config.json").write_text('{"a": 2}')
    if change == "file":
        (folder / "new.json").write_text("{}")
    with pytest.raises(DataError, match="holds another content already"):
        upload_folder(store, folder, PREFIX, {"v": 2 if change == "extra" else 1})
    assert store.list(PREFIX) == before


def test_steps_that_publish_the_same_at_once_all_succeed(store: Store, folder: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        manifests = list(pool.map(lambda _: upload_folder(store, folder, PREFIX, {"v": 1}), range(4)))
    assert {manifest.sha256 for manifest in manifests} == {read_manifest(store, PREFIX).sha256}
    assert contents(fetch_folder(store, PREFIX, tmp_path / "cache")) == contents(folder)


def test_writers_of_different_contents_never_mix(store: Store, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "model.safetensors").write_bytes(b"of the other attempt")
    ours, theirs = new_upload_id(), new_upload_id()
    entries = upload_files(store, folder, PREFIX, ours)
    other_entries = upload_files(store, other, PREFIX, theirs)
    finish_folder(store, PREFIX, ours, entries, {})
    with pytest.raises(DataError, match="holds another content already"):
        finish_folder(store, PREFIX, theirs, other_entries, {})
    assert contents(fetch_folder(store, PREFIX, tmp_path / "cache")) == contents(folder)


def test_the_first_manifest_stands_and_files_of_other_attempts_go(store: Store, folder: Path, tmp_path: Path) -> None:
    abandoned, first, second = new_upload_id(), new_upload_id(), new_upload_id()
    upload_files(store, folder, PREFIX, abandoned)
    entries = {upload_id: upload_files(store, folder, PREFIX, upload_id) for upload_id in (first, second)}
    manifest = finish_folder(store, PREFIX, first, entries[first], {"v": 1})
    assert finish_folder(store, PREFIX, second, entries[second], {"v": 1}) == manifest
    keys = {info.key for info in store.list(PREFIX)}
    assert keys == {f"{PREFIX}/{MANIFEST_NAME}", *(manifest.key_of(PREFIX, entry.path) for entry in manifest.files)}
    assert contents(fetch_folder(store, PREFIX, tmp_path / "cache")) == contents(folder)


def test_nothing_is_published_without_a_manifest(store: Store, folder: Path, tmp_path: Path) -> None:
    upload_folder(store, folder, PREFIX, {})
    store.delete([f"{PREFIX}/{MANIFEST_NAME}"])
    with pytest.raises(NotFound, match="00001/manifest.json"):
        fetch_folder(store, PREFIX, tmp_path / "cache")


def test_a_killed_publish_is_invisible_and_can_be_repeated(store: Store, store_uri: str, tmp_path: Path) -> None:
    folder = tmp_path / "big"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(os.urandom(1 << 20) * (LARGE_BYTES >> 20))
    process = run_program(UPLOAD_PROGRAM, store_uri, folder, PREFIX)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert store.head(f"{PREFIX}/{MANIFEST_NAME}") is None
    upload_folder(store, folder, PREFIX, {})
    assert contents(fetch_folder(store, PREFIX, tmp_path / "cache")) == contents(folder)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: bytes([data[0] ^ 1]) + data[1:], lambda data: data + b"\0"]
)
def test_a_damaged_file_is_refused_by_name_and_checksum(
    store: Store, folder: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    key = upload_folder(store, folder, PREFIX, {}).key_of(PREFIX, "model.safetensors")
    store.put_bytes(key, damage(store.get_bytes(key)))
    expected = sha256_of_file(folder / "model.safetensors")
    with pytest.raises(DataError, match=rf"{key}: expected sha256 {expected}, found [0-9a-f]{{64}}"):
        fetch_folder(store, PREFIX, tmp_path / "cache")
    assert [entry for entry in (tmp_path / "cache").iterdir() if entry.suffix not in (".lock", ".use")] == []
    store.put_bytes(key, (folder / "model.safetensors").read_bytes())
    assert contents(fetch_folder(store, PREFIX, tmp_path / "cache")) == contents(folder)


def test_a_missing_file_is_named(store: Store, folder: Path, tmp_path: Path) -> None:
    key = upload_folder(store, folder, PREFIX, {}).key_of(PREFIX, "config.json")
    store.delete([key])
    with pytest.raises(DataError, match=key):
        fetch_folder(store, PREFIX, tmp_path / "cache")


def test_the_cache_is_used_and_shared(local_store: Store, folder: Path, tmp_path: Path) -> None:
    manifest = upload_folder(local_store, folder, PREFIX, {})
    cache = tmp_path / "cache"
    first = fetch_folder(local_store, PREFIX, cache)
    local_store.delete([manifest.key_of(PREFIX, "model.safetensors")])
    assert fetch_folder(local_store, PREFIX, cache) == first


def test_a_folder_written_in_parts_is_one_folder(store: Store, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.safetensors").write_bytes(b"another rank's")
    upload_id = new_upload_id()
    entries = [entry for part in (folder, other) for entry in upload_files(store, part, PREFIX, upload_id)]
    with pytest.raises(NotFound):
        read_manifest(store, PREFIX)
    manifest = finish_folder(store, PREFIX, upload_id, entries, {"v": 1})
    assert finish_folder(store, PREFIX, upload_id, reversed(entries), {"v": 1}) == manifest
    fetched = contents(fetch_folder(store, PREFIX, tmp_path / "cache"))
    assert fetched == contents(folder) | contents(other)


def test_nothing_is_written_below_a_manifest(local_store: Store, folder: Path) -> None:
    entries = list(upload_folder(local_store, folder, PREFIX, {}).files)
    before = local_store.list(PREFIX)
    assert upload_files(local_store, folder, PREFIX, new_upload_id()) == entries
    assert local_store.list(PREFIX) == before


def test_only_the_files_that_are_asked_for_are_fetched_and_more_can_follow(
    local_store: Store, folder: Path, tmp_path: Path
) -> None:
    manifest = upload_folder(local_store, folder, PREFIX, {})
    cache = tmp_path / "cache"
    first = fetch_files(local_store, PREFIX, cache, ["config.json"])
    assert contents(first) == {"config.json": b'{"a": 1}'}
    local_store.delete([manifest.key_of(PREFIX, "config.json")])
    assert fetch_files(local_store, PREFIX, cache, ["config.json", "nested/empty.txt"]) == first
    assert set(contents(first)) == {"config.json", "nested/empty.txt"}
    assert contents(fetch_folder(local_store, PREFIX, cache)) == contents(folder)


def test_a_file_that_the_manifest_does_not_name_is_refused(local_store: Store, folder: Path, tmp_path: Path) -> None:
    upload_folder(local_store, folder, PREFIX, {})
    with pytest.raises(NotFound, match=r"names no file other\.json"):
        fetch_files(local_store, PREFIX, tmp_path / "cache", {"other.json"})


@pytest.mark.parametrize("damage", ["changed", "truncated", "removed"])
def test_a_damaged_cache_is_fetched_again(local_store: Store, folder: Path, tmp_path: Path, damage: str) -> None:
    upload_folder(local_store, folder, PREFIX, {})
    cached = fetch_folder(local_store, PREFIX, tmp_path / "cache") / "model.safetensors"
    if damage == "removed":
        cached.unlink()
    else:
        cached.write_bytes(b"x" * (300_000 if damage == "changed" else 10))
    assert contents(fetch_folder(local_store, PREFIX, tmp_path / "cache")) == contents(folder)


def test_processes_that_fetch_at_once_get_one_copy(store: Store, store_uri: str, folder: Path, tmp_path: Path) -> None:
    upload_folder(store, folder, PREFIX, {})
    processes = [run_program(FETCH_PROGRAM, store_uri, PREFIX, tmp_path / "cache") for _ in range(3)]
    answers = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert len(answers) == 1 and contents(Path(answers.pop())) == contents(folder)
    assert [entry for entry in (tmp_path / "cache").iterdir() if entry.name.startswith(".")] == []


def test_memory_does_not_grow_with_the_files(store_uri: str, tmp_path: Path) -> None:
    for name, mebibytes in (("small", 70), ("large", 250)):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "model.safetensors", "wb") as stream:
            for _ in range(mebibytes):
                stream.write(os.urandom(1 << 10) * (1 << 10))
    answer = run_program(MEMORY_PROGRAM, store_uri, tmp_path, tmp_path / "cache").communicate(timeout=280)[0]
    small_bytes, large_bytes = map(int, answer.split())
    assert large_bytes - small_bytes < 160 << 20


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "{}",
        "[" * 100_000,
        manifest_text(files=[{"path": "../../escape", "size_bytes": 1, "sha256": "0" * 64}]),
        manifest_text(files=[{"path": MANIFEST_NAME, "size_bytes": 1, "sha256": "0" * 64}]),
        manifest_text(files=[{"path": "a", "size_bytes": 1, "sha256": "0" * 64}] * 2),
        manifest_text(files=[{"path": "a", "size_bytes": "1", "sha256": "0" * 64}]),
        manifest_text(files=[{"path": "a"}]),
        manifest_text(upload_id="../../elsewhere"),
        manifest_text(upload_id=None),
        manifest_text(format=99),
    ],
)
def test_a_malformed_manifest_is_refused(local_store: Store, tmp_path: Path, text: str) -> None:
    local_store.put_bytes(f"{PREFIX}/{MANIFEST_NAME}", text.encode())
    with pytest.raises(DataError, match=r"manifest\.json: ") as caught:
        fetch_folder(local_store, PREFIX, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "escape").exists()


def test_a_cache_that_cannot_be_written_is_one_line(local_store: Store, folder: Path, tmp_path: Path) -> None:
    upload_folder(local_store, folder, PREFIX, {})
    (tmp_path / "occupied").write_text("a file")
    with pytest.raises(ServiceUnavailable, match="cache .*occupied"):
        fetch_folder(local_store, PREFIX, tmp_path / "occupied")


def test_where_the_bytes_lie_is_no_part_of_the_content() -> None:
    one = Manifest(files=(), extra={"a": 1, "b": [1, 2]}, upload_id="0" * 16)
    two = Manifest(files=(), extra={"b": (1, 2), "a": 1}, upload_id="1" * 16)
    other = Manifest(files=(), extra={"a": 2, "b": [1, 2]}, upload_id="0" * 16)
    assert one.sha256 == two.sha256 != other.sha256 and one.to_bytes() != two.to_bytes()


def test_a_pointer_moves_forward_only(store: Store) -> None:
    assert read_pointer(store, "latest.json") is None
    assert move_pointer(store, "latest.json", 1, {"uri": "one"})
    assert not move_pointer(store, "latest.json", 1, {"uri": "other"})
    assert move_pointer(store, "latest.json", 3, {"uri": "three"})
    assert not move_pointer(store, "latest.json", 2, {"uri": "two"})
    assert read_pointer(store, "latest.json") == {"uri": "three", "version": 3}


def test_a_pointer_ends_at_the_highest_of_racing_versions(store: Store) -> None:
    barrier = threading.Barrier(8)

    def move(version: int) -> bool:
        barrier.wait()
        return move_pointer(store, "latest.json", version, {})

    with ThreadPoolExecutor(8) as pool:
        moved = list(pool.map(move, range(8)))
    assert moved[7]
    assert read_pointer(store, "latest.json") == {"version": 7}


@pytest.mark.parametrize("text", ["", "[]", '{"version": "1"}'])
def test_a_malformed_pointer_is_refused(local_store: Store, text: str) -> None:
    local_store.put_bytes("latest.json", text.encode())
    for call in (
        lambda: read_pointer(local_store, "latest.json"),
        lambda: move_pointer(local_store, "latest.json", 1, {}),
    ):
        with pytest.raises(DataError, match=r"latest\.json: not a pointer"):
            call()
