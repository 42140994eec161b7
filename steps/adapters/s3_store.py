"""A store in an S3 bucket, through boto3. The endpoint and the credentials come from boto3's own environment
(AWS_ENDPOINT_URL_S3, AWS_PROFILE, pod identity, ...).

Conditional writes send the ETag without quotes: AWS accepts both forms, radosgw only this one. No S3-compatible server
that runs on a laptop checks the SDK's CRCs, so whoever knows a file's SHA-256 has it verified here, on download.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import boto3
from boto3.exceptions import S3UploadFailedError
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from s3transfer.exceptions import RetriesExceededError
from tenacity import retry, retry_if_exception, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from steps.adapters.store import (
    AlreadyExists,
    Conflict,
    NotFound,
    ObjectInfo,
    explained_os_errors,
    masked,
    partial_file,
    require_sha256,
    validate_key,
)
from steps.errors import ConfigError, DataError, ServiceUnavailable

UPLOAD_PART_BYTES = 64 << 20
DOWNLOAD_PART_BYTES = 8 << 20
"""Smaller than an upload's part: up to ten parts wait in memory for their turn to be hashed."""

_MAX_KEYS_PER_DELETE = 1000
_BUCKET_PATTERN = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_MISSING_KEY = {"NoSuchKey", "404", "NotFound"}
_LOST_RACE = {"PreconditionFailed", "412"}
_RACING_WRITE = {"ConditionalRequestConflict", "OperationAborted", "UnknownError"}
"""AWS answers racing conditional writes with 409, radosgw with 500 UnknownError: the next try gets a clear answer."""
_BAD_CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidToken",
    "ExpiredToken",
    "TokenRefreshRequired",
    "AuthorizationHeaderMalformed",
}

_UPLOAD = TransferConfig(multipart_threshold=UPLOAD_PART_BYTES, multipart_chunksize=UPLOAD_PART_BYTES)
_DOWNLOAD = TransferConfig(
    multipart_threshold=DOWNLOAD_PART_BYTES,
    multipart_chunksize=DOWNLOAD_PART_BYTES,
    io_chunksize=1 << 20,  # fewer, larger hand-overs to the thread that hashes and writes
    max_concurrency=8,
)


def _code(error: ClientError) -> str:
    return error.response.get("Error", {}).get("Code", "unknown")


def _one_line(error: Exception) -> str:
    return masked(" ".join(str(error).split()))


def _was_retried(error: ClientError) -> bool:
    return error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0) > 0


def _is_racing_write(error: BaseException) -> bool:
    return isinstance(error, ClientError) and _code(error) in _RACING_WRITE


_retry_racing_write = retry(
    retry=retry_if_exception(_is_racing_write),
    stop=stop_after_attempt(8),
    wait=wait_random_exponential(multiplier=0.05, max=2),
    reraise=True,
)

_retry_broken_stream = retry(
    # boto3 retries until the answer's headers arrive; a body that breaks off later is ours to fetch again.
    retry=retry_if_exception_type((ResponseStreamingError, ReadTimeoutError, IncompleteReadError)),
    stop=stop_after_attempt(4),
    wait=wait_random_exponential(multiplier=0.1, max=5),
    reraise=True,
)


class S3Store:
    """See `steps.adapters.store.Store`. Safe to share between threads."""

    def __init__(self, bucket: str, prefix: str) -> None:
        if not _BUCKET_PATTERN.fullmatch(bucket):
            raise ConfigError(f"store s3://{bucket}/{prefix}: {bucket!r} is not a bucket name; use s3://bucket/prefix")
        self._bucket = bucket
        self._prefix = f"{validate_key(prefix)}/" if prefix else ""
        self._bucket_was_seen = False
        # Hosts other than AWS seldom resolve bucket.host names.
        custom = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        config = Config(
            retries={"mode": "standard", "max_attempts": 5},
            connect_timeout=5,
            read_timeout=60,
            max_pool_connections=64,
            s3={"addressing_style": "path" if custom else "auto"},
            request_checksum_calculation="when_supported",
            response_checksum_validation="when_supported",
        )
        try:
            # A session of its own: boto3's default session isn't safe to share between threads.
            self._client = boto3.session.Session().client("s3", config=config)
        except BotoCoreError as error:
            raise ConfigError(
                f"{self.uri}: {_one_line(error)}; check AWS_PROFILE, AWS_REGION and AWS_ENDPOINT_URL_S3"
            ) from error
        except ValueError:  # its text holds the endpoint, which may hold a password
            raise ConfigError(
                f"{self.uri}: the endpoint is no URL; correct AWS_ENDPOINT_URL_S3 (https://host:port)"
            ) from None

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def uri_of(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._name(key)}"

    def put_bytes(self, key: str, data: bytes, *, if_none_match: bool = False) -> ObjectInfo:
        name = self._name(key)
        with self._explained(key, "PutObject"):
            if not if_none_match:
                etag = self._client.put_object(Bucket=self._bucket, Key=name, Body=data)["ETag"]
            else:
                etag = self._put_if(key, data, AlreadyExists, IfNoneMatch="*")
        return ObjectInfo(key=key, size_bytes=len(data), etag=etag.strip('"'))

    def get_bytes(self, key: str) -> bytes:
        with self._explained(key, "GetObject"):
            return self._read(self._name(key))

    def head(self, key: str) -> ObjectInfo | None:
        name = self._name(key)
        with self._explained(key, "HeadObject"):
            try:
                found = self._client.head_object(Bucket=self._bucket, Key=name)
            except ClientError as error:
                if _code(error) not in _MISSING_KEY:
                    raise
                self._require_bucket()
                return None
        return ObjectInfo(key=key, size_bytes=found["ContentLength"], etag=found["ETag"].strip('"'))

    def compare_and_swap(self, key: str, data: bytes, expected_etag: str | None) -> ObjectInfo:
        condition = {"IfNoneMatch": "*"} if expected_etag is None else {"IfMatch": expected_etag}
        with self._explained(key, "PutObject"):
            etag = self._put_if(key, data, Conflict, **condition)
        return ObjectInfo(key=key, size_bytes=len(data), etag=etag.strip('"'))

    def upload_file(self, path: Path, key: str) -> ObjectInfo:
        size_bytes = path.stat().st_size
        with self._explained(key, "PutObject"):
            try:
                self._client.upload_file(str(path), self._bucket, self._name(key), Config=_UPLOAD)
            except S3UploadFailedError as error:
                raise error.__context__ or error from error  # boto3 hides the code that says what is wrong
        info = self.head(key)
        if info is None or info.size_bytes != size_bytes:
            found = "nothing" if info is None else f"{info.size_bytes} bytes"
            raise DataError(f"{self.uri_of(key)}: expected {size_bytes} bytes, found {found}; write it again")
        return info

    def download_file(self, key: str, path: Path, sha256: str | None = None) -> None:
        name = self._name(key)
        with explained_os_errors(f"downloading {self.uri_of(key)} to {path}"), partial_file(path) as temporary:
            with self._explained(key, "GetObject"), open(temporary, "wb") as stream:
                sink = _HashingSink(stream)
                self._client.download_fileobj(self._bucket, name, sink, Config=_DOWNLOAD)  # type: ignore[arg-type]
            if sha256 is not None:
                require_sha256(self.uri_of(key), sha256, sink.digest.hexdigest())

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
            batch = names[start : start + _MAX_KEYS_PER_DELETE]
            with self._explained("", "DeleteObject"):
                answer = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": [{"Key": name} for name in batch], "Quiet": True}
                )
            for refused in answer.get("Errors", []):
                raise ServiceUnavailable(f"s3://{self._bucket}/{refused['Key']}: not deleted ({refused['Code']})")

    @_retry_broken_stream
    def _read(self, name: str) -> bytes:
        return self._client.get_object(Bucket=self._bucket, Key=name)["Body"].read()

    def _name(self, key: str) -> str:
        return self._prefix + validate_key(key)

    def _put_if(self, key: str, data: bytes, lost: Callable[[str], Exception], **condition: str) -> str:
        """Conditional PutObject; raise `lost(key)` when the condition doesn't hold. Returns the new ETag."""
        retried = False

        @_retry_racing_write
        def put() -> str:
            nonlocal retried
            try:
                answer = self._client.put_object(Bucket=self._bucket, Key=self._name(key), Body=data, **condition)  # type: ignore[arg-type]
            except ClientError as error:
                retried = retried or _was_retried(error) or _is_racing_write(error)
                raise
            return answer["ETag"]

        try:
            return put()
        except ClientError as error:
            if _code(error) not in _LOST_RACE | _MISSING_KEY:
                raise
            # After a retry the winner may be our own first try, whose answer was lost.
            current = self.head(key) if retried else None
            if current is not None and self.get_bytes(key) == data:
                return current.etag
            raise lost(key) from error

    def _require_bucket(self) -> None:
        """HEAD of a missing key and of a missing bucket get the same 404: tell them apart, once."""
        if not self._bucket_was_seen:
            try:
                self._client.head_bucket(Bucket=self._bucket)
            except ClientError as error:
                if _code(error) in _MISSING_KEY:
                    raise self._no_bucket() from error
            self._bucket_was_seen = True

    def _no_bucket(self) -> ConfigError:
        return ConfigError(f"s3://{self._bucket}: no such bucket; create it, or correct MOERL_STORE")

    @contextmanager
    def _explained(self, key: str, action: str) -> Iterator[None]:
        """Turn boto3's exceptions into the store's, each in one line that names the bucket and the key."""
        where = f"s3://{self._bucket}/{self._prefix}{key}"
        try:
            yield
        except ClientError as error:
            raise self._explain(error, where, action) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise ConfigError(
                f"{where}: no AWS credentials; give the pod an IAM role, or set AWS_PROFILE or AWS_ACCESS_KEY_ID"
            ) from error
        except (ConnectionError, HTTPClientError, RetriesExceededError) as error:
            raise ServiceUnavailable(
                f"{where}: {masked(self._client.meta.endpoint_url)} can't be reached ({type(error).__name__});"
                " check the network and AWS_ENDPOINT_URL_S3, then run again"
            ) from error
        except BotoCoreError as error:
            raise ServiceUnavailable(f"{where}: {action} failed ({_one_line(error)}); run again") from error

    def _explain(self, error: ClientError, where: str, action: str) -> Exception:
        code = _code(error)
        if code == "NoSuchBucket":
            return self._no_bucket()
        if code in _MISSING_KEY:
            self._require_bucket()
            return NotFound(f"{where}: not found in the store")
        if code in _BAD_CREDENTIALS:
            return ConfigError(f"{where}: the AWS credentials are refused ({code}); correct or renew them")
        if code in ("AccessDenied", "403", "Forbidden"):
            return ServiceUnavailable(
                f"{where}: access denied; allow s3:{action} and s3:ListBucket on bucket {self._bucket} to this identity"
            )
        return ServiceUnavailable(f"{where}: the server refuses {action} ({code}); run again later")


class _HashingSink:
    """A file that can't seek: s3transfer fetches parts in parallel and hands them over in order, to be hashed."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()

    def write(self, chunk: bytes) -> int:
        self.digest.update(chunk)
        return self._stream.write(chunk)
