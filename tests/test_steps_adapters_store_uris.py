"""URIs of stores and objects: what is refused, and that no message shows credentials."""

import os
from pathlib import Path

import pytest

from steps.adapters.store import NotFound, masked, open_store, read_uri
from steps.errors import ConfigError, ServiceUnavailable


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "gs://bucket/x",
        "s3://",
        "s3://Bad_Bucket/x",
        "s3://bucket/a//b",
        "s3://bucket/a/../b",
        "s3://bucket/.moerl",
        "s3://bucket/" + "x" * 300,
        "s3://bucket?x/a",
        "S3://bucket/a",
        "http://host/x",
        "http://[host/x",
        "file://host/x",
        "file:",
        "file:///a%00b",
    ],
)
def test_an_unusable_root_is_refused_in_one_line(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(uri)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://KEY:pa-ss@bucket/p",
        "s3://KEY:pa-ss@bucket/a//b",
        "s3://KEY:pa/pa-ss@bucket/p",
        "s3://KEY:pa-ss",
        "s3://pa-ss@bucket",
    ],
)
def test_credentials_in_an_s3_uri_are_refused_and_not_shown(uri: str) -> None:
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") as caught:
        open_store(uri)
    assert "pa-ss" not in str(caught.value) and "KEY:" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "https://KEY:pa-ss@minio/b",
        "https://KEY:pa/pa-ss@minio/b",
        "file://KEY:pa-ss@minio/b",
        "http://KEY:pa-ss@[minio/b",
    ],
)
def test_an_unusable_root_is_shown_without_its_credentials(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"://\*\*\*@\[?minio/b|IPv6") as caught:
        open_store(uri)
    assert "pa-ss" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pa-ss@host/x", "https://***@host/x"),
        ("failed: http://user:pa-ss@host:80/api refused", "failed: http://***@host:80/api refused"),
        ("s3://key:a/b+c@host/x", "s3://***@host/x"),
        ("http://user:p@ss@host/x", "http://***@host/x"),
        ("http://token@host and http://u:p@other", "http://***@host and http://***@other"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("http://host:80/x", "http://host:80/x"),
    ],
)
def test_users_and_passwords_in_urls_are_masked(text: str, shown: str) -> None:
    assert masked(text) == shown


def test_an_object_is_read_by_its_uri(store_uri: str) -> None:
    store = open_store(store_uri)
    store.put_bytes("a/b c.toml", b"seed = 1")
    assert read_uri(store.uri_of("a/b c.toml")) == b"seed = 1"
    with pytest.raises(NotFound):
        read_uri(store.uri_of("a/c.toml"))


@pytest.mark.parametrize("uri", ["", "s3://bucket", "s3://bucket/", "s3://bucket/a/", "s3://bucket/..", "s3://b//x"])
def test_a_uri_that_names_no_object_is_a_config_error(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_uri(uri)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look into every directory")
def test_a_root_in_a_closed_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(ServiceUnavailable, match="permission denied"):
        open_store(str(tmp_path / "closed" / "store"))
