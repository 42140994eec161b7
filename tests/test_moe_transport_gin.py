"""The GIN type of an NCCL communicator, through a double of libnccl 2.30.7 (src/dev_runtime.cc).

The double refuses what the library refuses: a structure without the magic number, and a version newer than its own. It
fills in the GIN types only for callers after 2.29.3, and never writes past the fields of the version declared.
"""

import os
from typing import Any
from unittest.mock import patch

import pytest

from moe.transport.gin import API_MAGIC, LAYOUT_VERSION, gin_of_group, loaded_nccl, query_gin

COMMUNICATOR = 0xABC0


class NcclLibrary:
    def __init__(self, version: int, gin_type: int = 2, railed: int = 0) -> None:
        self.version = version
        self.gin_type = gin_type
        self.railed = railed
        self.declared = 0

    def ncclGetVersion(self, reference: Any) -> int:
        reference._obj.value = self.version
        return 0

    def ncclCommQueryProperties(self, communicator: Any, reference: Any) -> int:
        properties = reference._obj
        if communicator.value != COMMUNICATOR or properties.magic != API_MAGIC or properties.version > self.version:
            return 5
        self.declared = properties.version
        properties.n_ranks = 16
        if properties.version > 22903:
            properties.gin_type, properties.railed_gin_type = self.gin_type, self.railed
        return 0


@pytest.mark.parametrize(
    ("number", "name"),
    [(0, "none"), (2, "proxy"), (3, "gdaki"), (4, "gpi"), (5, "efa_gda"), (9, "unknown (9)")],
)
def test_gin_types_have_names(number: int, name: str) -> None:
    assert query_gin(NcclLibrary(23007, number, railed=2), COMMUNICATOR) == {
        "gin_type": name,
        "railed_gin_type": "proxy",
    }


@pytest.mark.parametrize("version", [22904, 23007, 23203])
def test_no_newer_layout_is_declared_than_ours_and_than_the_library_knows(version: int) -> None:
    library = NcclLibrary(version)
    assert query_gin(library, COMMUNICATOR)["gin_type"] == "proxy"
    assert library.declared == min(version, LAYOUT_VERSION)


def test_a_library_that_is_too_old_is_not_asked() -> None:
    library = NcclLibrary(22903)
    assert query_gin(library, COMMUNICATOR) == {}
    assert library.declared == 0


def test_a_refusal_of_the_library_is_no_gin_type() -> None:
    assert query_gin(NcclLibrary(23007), COMMUNICATOR + 1) == {}


def test_without_a_process_group_there_is_no_communicator() -> None:
    assert gin_of_group(None) == {}


def test_only_the_library_that_is_loaded_is_asked() -> None:
    with patch("ctypes.CDLL", side_effect=OSError) as load:
        assert loaded_nccl() is None
    load.assert_called_once_with("libnccl.so.2", mode=os.RTLD_NOLOAD)
