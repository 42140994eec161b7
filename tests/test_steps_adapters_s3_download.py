"""Large objects in parts: every byte in its place, hashed, and asked for again when a body breaks off."""

import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import IncompleteReadError
from s3transfer.exceptions import RetriesExceededError

from steps.adapters import s3_download
from steps.adapters.s3_download import PART_TRIES, Download

PART = 1000


class FakeClient:
    """Answers as S3 does; `broken`: how many bodies break off in the middle, `shifted`: whether ranges are wrong."""

    def __init__(self, data: bytes, broken: int = 0, shifted: bool = False) -> None:
        self.data, self.broken, self.shifted = data, broken, shifted
        self.ranges: list[str] = []

    def head_object(self, **_: Any) -> dict[str, Any]:
        return {"ContentLength": len(self.data), "ETag": '"e"'}

    def get_object(self, *, Range: str, IfMatch: str, **_: Any) -> dict[str, Any]:
        assert IfMatch == '"e"'
        self.ranges.append(Range)
        first, last = map(int, Range.removeprefix("bytes=").split("-"))
        data = self.data[first : last + 1]
        place = f"bytes {first + self.shifted}-{last + self.shifted}/{len(self.data)}"
        body: Any = io.BytesIO(data)
        if self.broken:
            self.broken -= 1
            body = BrokenBody(data[: len(data) // 2])
        return {"ContentRange": place, "ContentLength": len(data), "Body": body}


class BrokenBody(io.BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        if data := super().read(size):
            return data
        raise IncompleteReadError(actual_bytes=1, expected_bytes=2)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_download, "PART_BYTES", PART)
    monkeypatch.setattr(s3_download, "CHUNK_BYTES", 300)


def fetch(client: Any, path: Path) -> str:
    return Download(client, "bucket", "name", path).run()


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 20 * PART + 7])
def test_a_file_of_any_size_is_whole_and_hashed(tmp_path: Path, size: int) -> None:
    data = bytes(number * 31 % 251 for number in range(size))
    (tmp_path / "file").write_bytes(b"something longer that lay there" * 2)
    assert fetch(FakeClient(data), tmp_path / "file") == hashlib.sha256(data).hexdigest()
    assert (tmp_path / "file").read_bytes() == data


def test_only_the_part_that_broke_off_is_asked_for_again(tmp_path: Path) -> None:
    data = bytes(range(250)) * 20
    client = FakeClient(data, broken=1)
    assert fetch(client, tmp_path / "file") == hashlib.sha256(data).hexdigest()
    assert len(client.ranges) == 6
    assert len(set(client.ranges)) == 5


@pytest.mark.parametrize("fault", [{"broken": 10**6}, {"shifted": True}])
def test_a_part_that_never_comes_whole_is_an_error(tmp_path: Path, fault: Any) -> None:
    client = FakeClient(b"a" * PART, **fault)
    with pytest.raises(RetriesExceededError):
        fetch(client, tmp_path / "file")
    assert len(client.ranges) == PART_TRIES
