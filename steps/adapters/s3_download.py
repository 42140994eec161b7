"""Fetch a large object in parts: several at a time, each to its place in the file, hashed in order as they come.

s3transfer can only hash what it hands over in order, and lets the other parts wait meanwhile. Here parts are written
as they come; the hash follows them through the page cache. Memory: one chunk for each part on its way.
"""

import hashlib
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from botocore.exceptions import IncompleteReadError, ReadTimeoutError, ResponseStreamingError
from s3transfer.exceptions import RetriesExceededError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef

PART_BYTES = 16 << 20
PARALLEL_PARTS = 8
PART_TRIES = 5
CHUNK_BYTES = 256 << 10
"""Larger ones come from fresh memory each time, whose pages cost more than the calls that they save."""
_BROKEN_BODY = (IncompleteReadError, ReadTimeoutError, ResponseStreamingError)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


class Download:
    """One object into one file; `run` returns the SHA-256 of what was written, as hexadecimal digits."""

    def __init__(self, client: "S3Client", bucket: str, name: str, path: Path) -> None:
        self._client, self._bucket, self._name, self._path = client, bucket, name, path

    def run(self) -> str:
        """Raises what boto3 raises, RetriesExceededError when the body of a part breaks off again and again."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            return self._into(file)
        finally:
            os.close(file)

    def _into(self, file: int) -> str:
        head = self._client.head_object(Bucket=self._bucket, Key=self._name)
        size_bytes, etag = head["ContentLength"], head["ETag"]
        digest = hashlib.sha256()
        starts = range(0, size_bytes, PART_BYTES)
        pool = ThreadPoolExecutor(max(1, min(PARALLEL_PARTS, len(starts))))
        try:
            parts: list[Future[None]] = [
                pool.submit(self._part, file, start, min(start + PART_BYTES, size_bytes), etag) for start in starts
            ]
            for start, part in zip(starts, parts, strict=True):
                part.result()
                _hash(digest, file, start, min(start + PART_BYTES, size_bytes))
        finally:
            pool.shutdown(cancel_futures=True)
        return digest.hexdigest()

    def _part(self, file: int, start: int, end: int, etag: str) -> None:
        """Write bytes `start` to `end` (exclusive); a body that breaks off is asked for again."""
        for number in range(1, PART_TRIES + 1):
            answer = self._client.get_object(
                Bucket=self._bucket, Key=self._name, Range=f"bytes={start}-{end - 1}", IfMatch=etag
            )
            try:
                return _write(answer, file, start, end)
            except _BROKEN_BODY as error:
                if number == PART_TRIES:
                    raise RetriesExceededError(error) from error


def _write(answer: "GetObjectOutputTypeDef", file: int, start: int, end: int) -> None:
    place = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
    if place is None or int(place[1]) != start or answer["ContentLength"] != end - start:
        raise IncompleteReadError(actual_bytes=answer["ContentLength"], expected_bytes=end - start)
    body, position = answer["Body"], start
    while chunk := body.read(CHUNK_BYTES):
        position += os.pwrite(file, chunk, position)
    if position != end:
        raise IncompleteReadError(actual_bytes=position - start, expected_bytes=end - start)


def _hash(digest: "hashlib._Hash", file: int, start: int, end: int) -> None:
    for position in range(start, end, CHUNK_BYTES):
        digest.update(os.pread(file, min(CHUNK_BYTES, end - position), position))
