"""A store in an S3 bucket, through boto3. The endpoint and the credentials come from boto3's own environment
(AWS_ENDPOINT_URL_S3, AWS_PROFILE, pod identity, ...).

Requests are repeated by `retries`, in full: boto3 itself repeats only the parts of a large transfer. Conditional writes
send the ETag without quotes: AWS accepts both forms, radosgw only this one. No S3-compatible server that runs on a
laptop checks the SDK's CRCs. So a small object is sent with its MD5, which they all check, and carries its SHA-256,
which is checked by whoever reads it; and whoever knows a file's SHA-256 has it verified here, on download.
"""

import hashlib
import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from boto3.exceptions import S3UploadFailedError
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from steps.adapters import s3_errors
from steps.adapters.retries import Outage, retried
from steps.adapters.s3_download import Download
from steps.adapters.s3_errors import (
    DENIED,
    EXPIRED,
    LOST_PRECONDITION,
    MISSING_KEY,
    PASSING,
    code_of,
    damaged,
    one_line,
)
from steps.adapters.store import (
    AlreadyExists,
    Conflict,
    NotFound,
    ObjectInfo,
    explained_os_errors,
    partial_file,
    sha256_of_bytes,
    validate_key,
)
from steps.environment import service_deadline_s
from steps.errors import ConfigError, DataError, ServiceUnavailable

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

UPLOAD_PART_BYTES = 32 << 20
"""Smaller parts cost more requests, larger ones leave the connections idle at the end."""
SMALL_FILE_BYTES = 4 << 20
"""Up to this size a file is sent as a small object is: in one request that is checked end to end."""
SHA256_METADATA = "moerl-sha256"

_MAX_KEYS_PER_DELETE = 1000
_BUCKET_PATTERN = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")

_UPLOAD = TransferConfig(multipart_threshold=UPLOAD_PART_BYTES, multipart_chunksize=UPLOAD_PART_BYTES)
_REQUEST_TIMEOUT_S = 20.0
_PART_TIMEOUT_S = 60.0
_PART_TRIES = 5


class S3Store:
    """See `steps.adapters.store.Store`. Safe to share between threads."""

    def __init__(self, bucket: str, prefix: str) -> None:
        if not _BUCKET_PATTERN.fullmatch(bucket):
            raise ConfigError(f"store s3://{bucket}/{prefix}: {bucket!r} is not a bucket name; use s3://bucket/prefix")
        self._bucket = bucket
        self._prefix = f"{validate_key(prefix)}/" if prefix else ""
        self._bucket_was_seen = False
        self._is_aws = not (os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"))
        self._endpoint = self._client.meta.endpoint_url

    @cached_property
    def _client(self) -> "S3Client":
        """For one request at a time, which `retries` repeats; given up early enough to be repeated."""
        return self._connect(tries=1, read_timeout_s=min(_REQUEST_TIMEOUT_S, max(1.0, service_deadline_s() / 6)))

    @cached_property
    def _transfers(self) -> "S3Client":
        """For large files, of which only the part that failed is to be sent again."""
        return self._connect(tries=_PART_TRIES, read_timeout_s=_PART_TIMEOUT_S)

    def _connect(self, tries: int, read_timeout_s: float) -> "S3Client":
        config = Config(
            retries={"mode": "standard", "total_max_attempts": tries},
            connect_timeout=5,
            read_timeout=read_timeout_s,
            max_pool_connections=64,
            # Hosts other than AWS seldom resolve bucket.host names.
            s3={"addressing_style": "auto" if self._is_aws else "path"},
            request_checksum_calculation="when_supported",
            response_checksum_validation="when_supported",
        )
        try:
            # A session of its own: boto3's default session isn't safe to share between threads.
            return boto3.session.Session().client("s3", config=config)
        except BotoCoreError as error:
            raise ConfigError(
                f"{self.uri}: {one_line(error)}; check AWS_PROFILE, AWS_REGION and AWS_ENDPOINT_URL_S3"
            ) from error
        except ValueError:  # its text holds the endpoint, which may hold a password
            raise ConfigError(
                f"{self.uri}: the endpoint is no URL; correct AWS_ENDPOINT_URL_S3 (https://host:port)"
            ) from None

    def _renew_credentials(self) -> None:
        """The next client asks for them anew, wherever they come from: a file, a role, the pod's identity."""
        for name in ("_client", "_transfers"):
            self.__dict__.pop(name, None)

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def uri_of(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._name(key)}"

    def put_bytes(self, key: str, data: bytes, *, if_none_match: bool = False) -> ObjectInfo:
        if if_none_match:
            return self._put_if(key, data, AlreadyExists, IfNoneMatch="*")
        return self._put(key, data)

    @retried
    def get_bytes(self, key: str) -> bytes:
        name = self._name(key)
        with self._explained(key, "GetObject"):
            answer = self._client.get_object(Bucket=self._bucket, Key=name)
            data = answer["Body"].read()
        sent_sha256 = answer["Metadata"].get(SHA256_METADATA)
        if sent_sha256 is not None and sent_sha256 != (found := sha256_of_bytes(data)):
            raise damaged(f"{self.uri_of(key)}: expected sha256 {sent_sha256}, found {found}")
        return data

    @retried
    def head(self, key: str) -> ObjectInfo | None:
        name = self._name(key)
        with self._explained(key, "HeadObject"):
            try:
                found = self._client.head_object(Bucket=self._bucket, Key=name)
            except ClientError as error:
                if code_of(error) not in MISSING_KEY:
                    raise
                self._require_bucket()
                return None
        return ObjectInfo(key=key, size_bytes=found["ContentLength"], etag=found["ETag"].strip('"'))

    def compare_and_swap(self, key: str, data: bytes, expected_etag: str | None) -> ObjectInfo:
        condition = {"IfNoneMatch": "*"} if expected_etag is None else {"IfMatch": expected_etag}
        return self._put_if(key, data, Conflict, **condition)

    def upload_file(self, path: Path, key: str) -> ObjectInfo:
        size_bytes = path.stat().st_size
        if size_bytes <= SMALL_FILE_BYTES:
            return self._put(key, path.read_bytes())
        self._upload_in_parts(path, key)
        info = self.head(key)
        if info is None:  # it was stored, and another process has deleted it since
            return ObjectInfo(key=key, size_bytes=size_bytes, etag="")
        if info.size_bytes != size_bytes:
            raise DataError(
                f"{self.uri_of(key)}: expected {size_bytes} bytes, found {info.size_bytes} bytes; write it again"
            )
        return info

    @retried
    def download_file(self, key: str, path: Path, sha256: str | None = None) -> None:
        name = self._name(key)
        with explained_os_errors(f"downloading {self.uri_of(key)} to {path}"), partial_file(path) as temporary:
            with self._explained(key, "GetObject"):
                found = Download(self._transfers, self._bucket, name, temporary).run()
            if sha256 is not None and found != sha256:
                raise damaged(f"{self.uri_of(key)}: expected sha256 {sha256}, found {found}")

    @retried
    def list(self, prefix: str) -> list[ObjectInfo]:
        folder = prefix.strip("/")
        start = f"{self._name(folder)}/" if folder else self._prefix
        with self._explained(folder, "ListBucket"):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=start)
            return [
                ObjectInfo(
                    key=entry["Key"].removeprefix(self._prefix), size_bytes=entry["Size"], etag=entry["ETag"].strip('"')
                )
                for page in pages
                for entry in page.get("Contents", [])
            ]

    def delete(self, keys: Iterable[str]) -> None:
        names = [self._name(key) for key in keys]
        for start in range(0, len(names), _MAX_KEYS_PER_DELETE):
            self._delete_named(names[start : start + _MAX_KEYS_PER_DELETE])

    @retried
    def _delete_named(self, names: Sequence[str]) -> None:
        with self._explained("", "DeleteObject"):
            answer = self._client.delete_objects(
                Bucket=self._bucket, Delete={"Objects": [{"Key": name} for name in names], "Quiet": True}
            )
        for refused in answer.get("Errors", []):
            line = f"s3://{self._bucket}/{refused['Key']}: not deleted ({refused['Code']})"
            raise Outage(line) if refused["Code"] in PASSING else ServiceUnavailable(line)

    def _name(self, key: str) -> str:
        return self._prefix + validate_key(key)

    @retried
    def _put(self, key: str, data: bytes) -> ObjectInfo:
        with self._explained(key, "PutObject"):
            return self._send(key, data)

    def _put_if(self, key: str, data: bytes, lost: Callable[[str], Exception], **condition: str) -> ObjectInfo:
        """Conditional PutObject; raise `lost(key)` when the condition doesn't hold."""
        tries = 0

        @retried
        def put() -> ObjectInfo:
            nonlocal tries
            tries += 1
            with self._explained(key, "PutObject"):
                try:
                    return self._send(key, data, **condition)
                except ClientError as error:
                    if code_of(error) not in LOST_PRECONDITION | MISSING_KEY:
                        raise
                    # The winner may be our own first try, whose answer was lost.
                    current = self.head(key) if tries > 1 else None
                    if current is not None and self.get_bytes(key) == data:
                        return current
                    raise lost(key) from error

        return put()

    def _send(self, key: str, data: bytes, **condition: str) -> ObjectInfo:
        extra: dict[str, Any] = {"Metadata": {SHA256_METADATA: sha256_of_bytes(data)}, **condition}
        if not self._is_aws:  # AWS checks the SDK's CRC
            extra["ContentMD5"] = b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        answer = self._client.put_object(Bucket=self._bucket, Key=self._name(key), Body=data, **extra)
        return ObjectInfo(key=key, size_bytes=len(data), etag=answer["ETag"].strip('"'))

    @retried
    def _upload_in_parts(self, path: Path, key: str) -> None:
        with self._explained(key, "PutObject"):
            try:
                self._transfers.upload_file(str(path), self._bucket, self._name(key), Config=_UPLOAD)
            except S3UploadFailedError as error:
                raise error.__context__ or error from error  # boto3 hides the code that says what is wrong

    def _require_bucket(self) -> None:
        """HEAD of a missing key and of a missing bucket get the same 404: tell them apart, once."""
        if self._bucket_was_seen:
            return
        try:
            self._client.head_bucket(Bucket=self._bucket)
        except ClientError as error:
            if code_of(error) in MISSING_KEY:
                raise self._no_bucket() from error
            if code_of(error) not in DENIED:  # who may read objects need not be allowed to see the bucket
                raise
        self._bucket_was_seen = True

    def _no_bucket(self) -> ConfigError:
        return ConfigError(f"s3://{self._bucket}: no such bucket; create it, or correct MOERL_STORE")

    @contextmanager
    def _explained(self, key: str, action: str) -> Iterator[None]:
        """Turn boto3's exceptions into the store's, each in one line that names the bucket and the key."""
        where = f"s3://{self._bucket}/{self._prefix}{key}"
        try:
            try:
                yield
            except ClientError as error:
                if code_of(error) == "NoSuchBucket":
                    raise self._no_bucket() from error
                if code_of(error) not in MISSING_KEY:
                    raise
                self._require_bucket()
                raise NotFound(f"{where}: not found in the store") from error
        except s3_errors.CAUGHT as error:
            if code_of(error) in EXPIRED:
                self._renew_credentials()
            raise s3_errors.explain(error, where, action, self._endpoint) from error
