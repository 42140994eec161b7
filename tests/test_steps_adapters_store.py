import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steps.adapters.store import (
    AlreadyExists,
    Conflict,
    NotFound,
    open_store,
    sha256_of_file,
    validate_key,
)
from steps.errors import ConfigError, DataError, ServiceUnavailable

RACERS = 16
LARGE_BYTES = 70 << 20  # more than one part of a multipart upload

RACE_PROGRAM = """
import sys
from steps.adapters.store import AlreadyExists, Conflict, open_store
kind, uri, me = sys.argv[1:]
store = open_store(uri)
sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
try:
    if kind == "create":
        store.put_bytes("race", me.encode(), if_none_match=True)
    else:
        store.compare_and_swap("race", me.encode(), kind)
    print("won")
except (AlreadyExists, Conflict):
    print("lost")
"""

UPLOAD_PROGRAM = """
import sys
from pathlib import Path
from steps.adapters.store import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
while True:
    store.upload_file(Path(sys.argv[2]), "folder/large")
    store.delete(["folder/large"])
"""


def run_program(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )


def race_threads(attempt: Callable[[int], object]) -> list[int]:
    """Run `attempt(i)` in 16 threads at once; return the winners."""
    barrier = threading.Barrier(RACERS)

    def go(racer: int) -> int | None:
        barrier.wait()
        try:
            attempt(racer)
        except (AlreadyExists, Conflict):
            return None
        return racer

    with ThreadPoolExecutor(RACERS) as pool:
        return [racer for racer in pool.map(go, range(RACERS)) if racer is not None]


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.bin"
    path.write_bytes(os.urandom(1 << 20) * (LARGE_BYTES >> 20))
    return path


def test_bytes_come_back_and_are_described(store_uri: str) -> None:
    store = open_store(store_uri)
    info = store.put_bytes("a/b c+ü.json", b"hello")
    assert info.key == "a/b c+ü.json" and info.size_bytes == 5
    assert store.get_bytes("a/b c+ü.json") == b"hello"
    assert store.head("a/b c+ü.json") == info
    assert store.put_bytes("empty", b"").size_bytes == 0 and store.get_bytes("empty") == b""


def test_a_put_replaces_and_changes_the_etag(store_uri: str) -> None:
    store = open_store(store_uri)
    first = store.put_bytes("a", b"1")
    assert store.put_bytes("a", b"2").etag != first.etag
    assert store.get_bytes("a") == b"2"


def test_a_missing_object_is_not_found(store_uri: str, tmp_path: Path) -> None:
    store = open_store(store_uri)
    store.put_bytes("file", b"x")
    for key in ("missing", "no/such/folder", "file/below"):
        assert store.head(key) is None
        with pytest.raises(NotFound, match=key):
            store.get_bytes(key)
        with pytest.raises(NotFound, match=key):
            store.download_file(key, tmp_path / "target")
    assert list(tmp_path.glob("*target*")) == []


def test_a_listing_is_a_folder_in_order_and_nothing_beside_it(store_uri: str) -> None:
    store = open_store(store_uri)
    keys = ["runs/r1/z", "runs/r1/a/b", "runs/r1/a-b", "runs/r10/x", "top"]
    for key in keys:
        store.put_bytes(key, key.encode())
    listed = store.list("runs/r1")
    assert [info.key for info in listed] == ["runs/r1/a-b", "runs/r1/a/b", "runs/r1/z"]
    assert listed == [store.head(info.key) for info in listed]
    assert store.list("runs/r1/") == listed
    assert sorted(info.key for info in store.list("")) == sorted(keys)
    assert store.list("nothing/here") == []


def test_a_long_listing_is_complete(store_uri: str) -> None:
    store = open_store(store_uri)
    keys = [f"many/{index:04d}" for index in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put_bytes(key, b""), keys))
    assert [info.key for info in store.list("many")] == keys
    store.delete(keys)
    assert store.list("many") == []


def test_deleting_is_repeatable(store_uri: str) -> None:
    store = open_store(store_uri)
    store.put_bytes("a", b"1")
    store.put_bytes("b", b"2")
    store.delete(["a", "never", "b/below"])
    store.delete(["a"])
    assert [info.key for info in store.list("")] == ["b"]


def test_uris_lead_back_to_the_same_objects(store_uri: str) -> None:
    store = open_store(store_uri)
    store.put_bytes("runs/r 1/x", b"1")
    assert open_store(store.uri).get_bytes("runs/r 1/x") == b"1"
    assert open_store(store.uri_of("runs/r 1")).get_bytes("x") == b"1"
    assert store.uri_of("runs/r1").startswith(store.uri)


def test_a_conditional_put_never_replaces(store_uri: str) -> None:
    store = open_store(store_uri)
    store.put_bytes("a", b"1", if_none_match=True)
    for data in (b"2", b"1"):
        with pytest.raises(AlreadyExists):
            store.put_bytes("a", data, if_none_match=True)
    assert store.get_bytes("a") == b"1"


def test_compare_and_swap_holds_only_for_the_current_etag(store_uri: str) -> None:
    store = open_store(store_uri)
    with pytest.raises(Conflict):
        store.compare_and_swap("pointer", b"x", "0" * 32)
    first = store.compare_and_swap("pointer", b"1", None)
    with pytest.raises(Conflict):
        store.compare_and_swap("pointer", b"x", None)
    second = store.compare_and_swap("pointer", b"2", first.etag)
    with pytest.raises(Conflict):
        store.compare_and_swap("pointer", b"x", first.etag)
    assert store.get_bytes("pointer") == b"2"
    assert store.head("pointer") == second


def test_exactly_one_of_sixteen_threads_creates(store_uri: str) -> None:
    store = open_store(store_uri)
    for number in range(5):
        key = f"race/{number}"
        winners = race_threads(lambda racer, key=key: store.put_bytes(key, b"%d" % racer, if_none_match=True))
        assert [b"%d" % winner for winner in winners] == [store.get_bytes(key)]


def test_exactly_one_of_sixteen_threads_swaps(store_uri: str) -> None:
    store = open_store(store_uri)
    etag: str | None = None
    for number in range(5):
        winners = race_threads(
            lambda racer, n=number, etag=etag: store.compare_and_swap("pointer", b"%d-%d" % (n, racer), etag)
        )
        assert [b"%d-%d" % (number, winner) for winner in winners] == [store.get_bytes("pointer")]
        current = store.head("pointer")
        assert current is not None
        etag = current.etag


@pytest.mark.parametrize("kind", ["create", "swap"])
def test_exactly_one_of_four_processes_wins(store_uri: str, kind: str) -> None:
    store = open_store(store_uri)
    condition = kind if kind == "create" else store.put_bytes("race", b"before").etag
    processes = [run_program(RACE_PROGRAM, condition, store_uri, str(racer)) for racer in range(4)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert sorted(answers) == ["lost", "lost", "lost", "won"]
    assert store.get_bytes("race") == b"%d" % answers.index("won")


def test_a_large_file_comes_back_whole_and_verified(store_uri: str, large_file: Path, tmp_path: Path) -> None:
    store = open_store(store_uri)
    info = store.upload_file(large_file, "big/file")
    assert info == store.head("big/file") and info.size_bytes == LARGE_BYTES
    store.download_file("big/file", tmp_path / "copy", sha256_of_file(large_file))
    assert sha256_of_file(tmp_path / "copy") == sha256_of_file(large_file)


def test_a_wrong_checksum_is_refused_and_leaves_no_file(store_uri: str, tmp_path: Path) -> None:
    store = open_store(store_uri)
    store.put_bytes("folder/a", b"tampered")
    target = tmp_path / "out" / "copy"
    target.parent.mkdir()
    with pytest.raises(DataError, match=r"folder/a: expected sha256 0{64}, found [0-9a-f]{64}"):
        store.download_file("folder/a", target, "0" * 64)
    assert list(target.parent.iterdir()) == []


def test_a_killed_upload_leaves_nothing_visible(store_uri: str, large_file: Path) -> None:
    store = open_store(store_uri)
    for delay_s in (0.02, 0.1):
        process = run_program(UPLOAD_PROGRAM, store_uri, str(large_file))
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert all(info.size_bytes == LARGE_BYTES for info in store.list(""))
        assert {info.key for info in store.list("")} <= {"folder/large"}
    store.upload_file(large_file, "folder/large")


def test_concurrent_overwrites_never_show_a_mixture(store_uri: str) -> None:
    store = open_store(store_uri)
    contents = [bytes([letter]) * 300_000 for letter in b"abcd"]
    store.put_bytes("a", contents[0])
    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(store.put_bytes, "a", content) for content in contents * 3]
        reads = [pool.submit(store.get_bytes, "a") for _ in range(12)]
        assert all(read.result() in contents for read in reads)
        assert all(write.result().size_bytes == 300_000 for write in writes)


@pytest.mark.parametrize("key", ["", "/abs", "../up", "a/../b", "a//b", "a/", "./a", "a\\b", "a\nb", ".moerl/tmp/x"])
def test_a_key_that_could_leave_the_root_is_refused(store_uri: str, key: str) -> None:
    store = open_store(store_uri)
    for call in (store.get_bytes, store.head, store.uri_of, lambda key: store.put_bytes(key, b"")):
        with pytest.raises(ValueError, match="store key"):
            call(key)


@given(st.lists(st.sampled_from(["..", ".", "", "a", "b.c", "/", "~", "\x00", "x" * 300]), min_size=1, max_size=5))
def test_every_accepted_key_stays_below_the_root(segments: list[str]) -> None:
    key = "/".join(segments)
    try:
        validate_key(key)
    except ValueError:
        return
    root = Path("/root-of-store")
    assert Path(os.path.normpath(root / key)).is_relative_to(root) and os.path.normpath(root / key) == str(root / key)


def test_a_symbolic_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    root = tmp_path / "store"
    root.mkdir()
    (root / "link").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    store = open_store(str(root))
    for key in ("link/secret", "file"):
        with pytest.raises(DataError, match="symbolic link"):
            store.get_bytes(key)
        with pytest.raises(DataError, match="symbolic link"):
            store.put_bytes(key, b"overwritten")
    assert store.list("") == []
    assert (outside / "secret").read_text() == "secret"


def test_temporary_files_are_never_listed_and_old_ones_are_removed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put_bytes("a", b"1")
    left = tmp_path / ".moerl" / "tmp" / "left-by-a-killed-writer"
    left.write_bytes(b"half")
    assert [info.key for info in store.list("")] == ["a"]
    open_store(str(tmp_path))
    assert left.exists()
    os.utime(left, (0, 0))
    open_store(str(tmp_path))
    assert not left.exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys\n"
        "from steps.adapters.store import open_store\n"
        "from steps.errors import ServiceUnavailable\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "store = open_store(sys.argv[1])\n"
        "try:\n    store.put_bytes('a', b'x' * 10000)\n"
        "except ServiceUnavailable as error:\n    print(error, store.list(''))\n"
    )
    answer = run_program(program, str(tmp_path)).communicate(timeout=60)[0]
    assert "key a" in answer and answer.endswith("[]\n") and answer.count("\n") == 1
    assert list((tmp_path / ".moerl" / "tmp").iterdir()) == []


def test_a_full_device_says_so(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    store.put_bytes("a", b"x" * 100)
    (tmp_path / "full").symlink_to("/dev/full")
    from steps.adapters.store import explained_os_errors

    with pytest.raises(ServiceUnavailable, match="the disk is full"), explained_os_errors("store x"):
        with open("/dev/full", "wb", buffering=0) as stream:
            stream.write(store.get_bytes("a"))


def test_a_file_where_a_folder_should_be_is_one_line(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put_bytes("a", b"1")
    with pytest.raises(ServiceUnavailable, match="key a/b"):
        store.put_bytes("a/b", b"2", if_none_match=True)
    with pytest.raises(ConfigError, match="is a file"):
        open_store(str(tmp_path / "a"))
