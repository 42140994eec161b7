"""A real S3 server behind a proxy that lets a fifth of the requests fail, in every way that S3 has."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from steps.adapters import retries, s3_store
from steps.adapters.retries import Outage
from steps.adapters.store import AlreadyExists, Conflict, Store, open_store, sha256_of_bytes
from steps.errors import ConfigError, DataError, ServiceUnavailable
from tests.doubles.s3_fault_proxy import FAULTS, Fault, S3FaultProxy
from tests.fixtures_s3 import use_server
from tests.fixtures_steps import REPOSITORY, RUN, StepRunner
from tests.s3_servers import S3Server

ProxyMaker = Callable[..., S3FaultProxy]


@pytest.fixture
def proxied(radosgw_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxyMaker]:
    """Makes a proxy before a new bucket, and has the environment of this test lead through it."""
    proxies: list[S3FaultProxy] = []

    def make(rate: float, faults: tuple[Fault, ...] = FAULTS, hang_s: float = 0.5) -> S3FaultProxy:
        bucket = use_server(radosgw_server, monkeypatch)
        proxy = S3FaultProxy(radosgw_server.endpoint, rate, seed=7, faults=faults, hang_s=hang_s)
        proxies.append(proxy)
        proxy.store_uri = f"s3://{bucket}/some/prefix"
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        monkeypatch.setenv("MOERL_SERVICE_DEADLINE_S", "60")
        return proxy

    yield make
    for proxy in proxies:
        proxy.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(retries, "LONGEST_PAUSE_S", 0.05)


def use_everything(store: Store, folder: Path) -> None:
    """Every method, each answer checked."""
    for number in range(3):
        data = f"object {number} ".encode() * 100
        store.put_bytes(f"a/{number}", data)
        assert store.get_bytes(f"a/{number}") == data
        info = store.put_bytes(f"once/{number}", data, if_none_match=True)
        with pytest.raises(AlreadyExists):
            store.put_bytes(f"once/{number}", b"other", if_none_match=True)
        swapped = store.compare_and_swap(f"once/{number}", b"new", info.etag)
        with pytest.raises(Conflict):
            store.compare_and_swap(f"once/{number}", b"late", info.etag)
        assert store.head(f"once/{number}") == swapped
        assert store.head(f"none/{number}") is None
        (folder / "file").write_bytes(data)
        store.upload_file(folder / "file", f"file/{number}")
        store.download_file(f"file/{number}", folder / "copy", sha256_of_bytes(data))
        assert (folder / "copy").read_bytes() == data
    assert [info.key for info in store.list("once")] == sorted(f"once/{number}" for number in range(3))
    store.delete(info.key for info in store.list(""))
    assert store.list("") == []


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_survived_by_every_method(proxied: ProxyMaker, fault: Fault, tmp_path: Path, quick: None) -> None:
    proxy = proxied(0.05 if fault == "expired_token" else 0.25, (fault,), hang_s=0.05)
    use_everything(open_store(proxy.store_uri), tmp_path)
    assert proxy.counts[fault] > 0


def test_a_large_file_survives_faults_in_its_parts(
    proxied: ProxyMaker, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = s3_store.TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20)
    monkeypatch.setattr(s3_store, "_UPLOAD", parts)
    proxy = proxied(0.2, tuple(fault for fault in FAULTS if not fault.startswith("hang")))
    store, source = open_store(proxy.store_uri), tmp_path / "source"
    source.write_bytes(bytes(range(256)) * (80 << 10))  # 20 MiB
    for number in range(2):
        store.upload_file(source, f"large/{number}")
        store.download_file(f"large/{number}", tmp_path / "copy", sha256_of_bytes(source.read_bytes()))
        assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert sum(proxy.counts.values()) - proxy.counts["none"] > 0


def test_a_request_without_an_answer_is_given_up_and_made_again(
    proxied: ProxyMaker, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    proxy = proxied(1.0, ("hang_after",), hang_s=60.0)
    monkeypatch.setenv("MOERL_SERVICE_DEADLINE_S", "6")  # a sixth of it for each request
    store = open_store(proxy.store_uri)
    waiting = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(store.put_bytes, "a", b"data", if_none_match=True)
        while not proxy.counts["hang_after"]:
            waiting.wait(0.01)
        proxy.rate = 0.0
        assert put.result().size_bytes == 4  # the first request had written it: it is still ours
    assert store.get_bytes("a") == b"data"


def test_swaps_that_lose_their_answers_are_neither_lost_nor_done_twice(proxied: ProxyMaker, quick: None) -> None:
    proxy = proxied(0.3, ("error_after", "reset_after", "reset_before", "slow_down"))
    store, swaps, writers = open_store(proxy.store_uri), 6, 3

    def add_lines(writer: int) -> None:
        for line in (f"{writer}/{number}\n".encode() for number in range(swaps)):
            while True:
                info = store.head("log")
                before = store.get_bytes("log") if info else b""
                if line in before:  # also by a swap that ended in Conflict: another one followed before its answer
                    break
                with suppress(Conflict):
                    store.compare_and_swap("log", before + line, info.etag if info else None)

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(add_lines, range(writers)))
    lines = store.get_bytes("log").decode().splitlines()
    assert sorted(lines) == sorted(f"{writer}/{number}" for writer in range(writers) for number in range(swaps))
    assert proxy.counts["reset_after"] and proxy.counts["error_after"]


def test_an_object_that_is_corrupt_where_it_lies_is_found(proxied: ProxyMaker, tmp_path: Path, quick: None) -> None:
    proxy = proxied(1.0, ("flipped_answer",))
    store = open_store(proxy.store_uri)
    store.put_bytes("a", b"some content")
    with pytest.raises(DataError, match=r"/a: expected sha256 .*, found .*; the object is corrupt, write it again"):
        store.get_bytes("a")
    with pytest.raises(DataError, match="/a: expected sha256"):
        store.download_file("a", tmp_path / "a", sha256_of_bytes(b"some content"))
    assert list(tmp_path.iterdir()) == []


def test_an_expired_token_is_renewed_from_where_it_came(
    proxied: ProxyMaker, radosgw_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    proxy = proxied(0.0)
    proxy.expired_keys = {"old-key"}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    credentials = tmp_path / "credentials"

    def write(key: str, secret: str) -> None:
        credentials.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")

    write("old-key", "old-secret")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    store = open_store(proxy.store_uri)
    with pytest.raises(ConfigError, match="the AWS credentials are refused .* correct or renew them"):
        store.put_bytes("a", b"data")
    write(radosgw_server.access_key, radosgw_server.secret_key)
    assert store.put_bytes("a", b"data").size_bytes == 4


@pytest.mark.parametrize(
    ("code", "status", "expected", "repeated"),
    [
        ("SlowDown", 503, ServiceUnavailable, True),
        ("InternalError", 500, ServiceUnavailable, True),
        ("503", 503, ServiceUnavailable, True),
        ("RequestTimeout", 400, ServiceUnavailable, True),
        ("RequestTimeTooSkewed", 403, ServiceUnavailable, True),
        ("ConditionalRequestConflict", 409, ServiceUnavailable, True),
        ("BadDigest", 400, DataError, True),
        ("ExpiredToken", 400, ConfigError, True),
        ("AccessDenied", 403, ServiceUnavailable, False),
        ("NoSuchBucket", 404, ConfigError, False),
        ("InvalidRegion", 400, ConfigError, False),
        ("PermanentRedirect", 301, ConfigError, False),
        ("InvalidAccessKeyId", 403, ConfigError, False),
        ("SignatureDoesNotMatch", 403, ConfigError, False),
        ("EntityTooLarge", 400, ServiceUnavailable, False),
    ],
)
def test_each_answer_of_s3_has_its_class(
    code: str, status: int, expected: type, repeated: bool, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.setenv("MOERL_SERVICE_DEADLINE_S", "0.2")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    calls = []

    def refuse(**request: object) -> None:
        calls.append(request)
        raise ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")

    monkeypatch.setattr(s3_store.S3Store, "_connect", lambda *a, **k: FakeClient(refuse))
    with pytest.raises(expected, match=r"s3://bucket") as caught:
        open_store("s3://bucket/p").get_bytes("key")
    assert "\n" not in str(caught.value) and not isinstance(caught.value, Outage)
    assert (len(calls) > 1) == repeated


class FakeClient:
    """Stands for boto3's client where only the error matters."""

    def __init__(self, get_object: Callable[..., None]) -> None:
        self.get_object = get_object
        self.meta = self
        self.endpoint_url = "http://127.0.0.1:1"


def test_a_campaign_completes_and_its_readers_see_only_whole_versions_that_never_go_back(
    proxied: ProxyMaker, steps: StepRunner, undisturbed_weights: str, tmp_path: Path
) -> None:
    proxy = proxied(0.2)
    steps.env["MOERL_STORE"] = steps.store_uri = proxy.store_uri
    stop = tmp_path / "stop"
    reader = subprocess.Popen(
        [sys.executable, "-m", "tests.publication_reader", proxy.store_uri, RUN, str(tmp_path / "seen"), str(stop)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        started = steps.init()
        assert started.code == 0, started.log
        steps.iterate(1)
        steps.iterate(2)
    finally:
        stop.touch()
        seen, _ = reader.communicate()
    assert reader.returncode == 0, seen
    assert seen.split()[-1] == "2", seen
    assert steps.final_weights() == undisturbed_weights
    assert proxy.counts.total() - proxy.counts["none"] > 30
    assert {fault for fault in FAULTS if fault != "flipped_request"} <= proxy.counts.keys()
