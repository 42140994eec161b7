"""Fixtures of the S3 servers: one radosgw and one moto server, shared by all workers of a test session."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from tests.s3_servers import S3Server, join_server, leave_server


def _shared_server(kind: str, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[S3Server]:
    base = tmp_path_factory.getbasetemp()
    state_dir = (base if worker_id == "master" else base.parent) / f"s3-{kind}"
    try:
        yield join_server(kind, state_dir)
    finally:
        leave_server(state_dir)


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[S3Server]:
    yield from _shared_server("moto", tmp_path_factory, worker_id)


@pytest.fixture(scope="session")
def radosgw_server(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[S3Server]:
    yield from _shared_server("radosgw", tmp_path_factory, worker_id)


def use_server(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Point this test's environment at `server` and return the name of a new bucket there."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    bucket = f"test-{uuid.uuid4().hex[:16]}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return bucket


@pytest.fixture(params=["directory", "moto", "radosgw"])
def store_uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The root of an empty store: each test that asks for it runs on a directory and on both servers."""
    if request.param == "directory":
        return (tmp_path / "store").as_uri()
    server: S3Server = request.getfixturevalue(f"{request.param}_server")
    return f"s3://{use_server(server, monkeypatch)}/some/prefix"
