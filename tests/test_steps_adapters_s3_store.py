import json
from collections.abc import Callable
from pathlib import Path

import boto3
import pytest

from steps.adapters.store import open_store
from steps.errors import ConfigError, ServiceUnavailable
from tests.fixtures_s3 import use_server
from tests.s3_servers import S3Server, free_port


@pytest.fixture(params=["moto", "radosgw"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return use_server(request.getfixturevalue(f"{request.param}_server"), monkeypatch)


def test_a_missing_bucket_is_named_by_every_call(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    store = open_store("s3://no-such-bucket-here/prefix")
    calls: list[Callable[[], object]] = [
        lambda: store.put_bytes("a", b""),
        lambda: store.put_bytes("a", b"", if_none_match=True),
        lambda: store.get_bytes("a"),
        lambda: store.head("a"),
        lambda: store.list("a"),
        lambda: store.compare_and_swap("a", b"", None),
        lambda: store.upload_file(tmp_path / "file", "a"),
        lambda: store.download_file("a", tmp_path / "copy"),
        lambda: store.delete(["a"]),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="s3://no-such-bucket-here: no such bucket"):
            call()


def test_an_interrupted_multipart_upload_is_invisible(bucket: str) -> None:
    client = boto3.client("s3")
    upload = client.create_multipart_upload(Bucket=bucket, Key="p/part")["UploadId"]
    client.upload_part(Bucket=bucket, Key="p/part", UploadId=upload, PartNumber=1, Body=b"z" * (5 << 20))
    store = open_store(f"s3://{bucket}/p")
    assert store.head("part") is None and store.list("") == []


@pytest.mark.parametrize("wrong", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
def test_wrong_credentials_are_refused_without_being_printed(
    radosgw_server: S3Server, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    bucket = use_server(radosgw_server, monkeypatch)
    monkeypatch.setenv(wrong, "not-the-right-value")
    with pytest.raises(ConfigError, match=f"s3://{bucket}/a: the AWS credentials are refused") as caught:
        open_store(f"s3://{bucket}").put_bytes("a", b"")
    assert "not-the-right-value" not in str(caught.value) and radosgw_server.secret_key not in str(caught.value)


def test_a_forbidden_bucket_names_the_permission(radosgw_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = use_server(radosgw_server, monkeypatch)
    statement = {"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject", "Resource": "*"}
    deny = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    boto3.client("s3").put_bucket_policy(Bucket=bucket, Policy=deny)
    with pytest.raises(ServiceUnavailable, match=f"s3://{bucket}/k/a: access denied; allow s3:PutObject"):
        open_store(f"s3://{bucket}/k").put_bytes("a", b"")


def test_a_server_that_is_down_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    server = S3Server(kind="none", endpoint=endpoint, access_key="key", secret_key="very-secret")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "file").write_bytes(b"x")
    store = open_store("s3://some-bucket/p")
    for call in (lambda: store.get_bytes("a"), lambda: store.upload_file(tmp_path / "file", "a")):
        with pytest.raises(ServiceUnavailable, match=f"s3://some-bucket/p/a: {endpoint} can't be reached") as caught:
            call()
        assert "very-secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_absent_credentials_are_one_line(moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_server(moto_server, monkeypatch)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    with pytest.raises(ConfigError, match="no AWS credentials"):
        open_store("s3://some-bucket").get_bytes("a")


@pytest.mark.parametrize("endpoint", ["http://me:very-secret@127.0.0.1:1", "me:very-secret@http://x"])
def test_credentials_in_the_endpoint_are_not_shown(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    with pytest.raises((ConfigError, ServiceUnavailable)) as caught:
        open_store("s3://some-bucket").get_bytes("a")
    assert "very-secret" not in str(caught.value)


def test_a_wrong_endpoint_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "not a url")
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL_S3"):
        open_store("s3://some-bucket")
