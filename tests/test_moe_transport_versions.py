"""Versions along the transport, read from a made-up /sys, /proc and /opt."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from moe.transport.versions import read_variables, read_versions

INSTALLED = """# EFA installer version: 1.50.0
# Debug packages installed: no
# Packages installed:
efa-config_1.18_all libfabric1-aws_2.6.0amzn1.0_amd64 libfabric-aws-bin_2.6.0amzn1.0_amd64 libnccl-ofi_1.21.1-1_amd64
"""
MAPS = """7f00-7f01 r-xp 00000000 fe:00 1 /usr/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2
7f02-7f03 r-xp 00000000 fe:00 2 /opt/amazon/efa/lib/libfabric.so.1.30.0
7f02-7f04 rw-p 00000000 fe:00 2 /opt/amazon/efa/lib/libfabric.so.1.30.0
7f05-7f06 r-xp 00000000 fe:00 3 /opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so
7f07-7f08 rw-p 00000000 00:00 0
"""


def test_versions_come_from_where_each_is_kept(tmp_path: Path) -> None:
    files = {
        "sys/module/efa/version": "3.3.0g\n",
        "sys/module/nvidia/version": "580.95.05\n",
        "opt/amazon/efa_installed_packages": INSTALLED,
        "proc/self/maps": MAPS,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    versions = read_versions(tmp_path)
    assert versions["torch"] == torch.__version__
    expected = {
        "efa_driver": "3.3.0g",
        "nvidia_driver": "580.95.05",
        "efa_installer": "1.50.0",
        "libfabric": "2.6.0amzn1.0",
        "aws_ofi_nccl": "1.21.1",
        "nccl_library": "/usr/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2",
        "libfabric_library": "/opt/amazon/efa/lib/libfabric.so.1.30.0",
        "net_plugin_library": "/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so",
    }
    assert {name: versions.get(name) for name in expected} == expected


def test_two_nccl_libraries_are_both_named(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/maps").write_text(
        "7f00-7f01 r-xp 0 fe:00 1 /a/libnccl.so.2\n7f02-7f03 r-xp 0 fe:00 2 /b/libnccl.so.2.30.7\n"
    )
    assert read_versions(tmp_path)["nccl_library"] == "/a/libnccl.so.2, /b/libnccl.so.2.30.7"


def test_what_is_not_there_is_left_out(tmp_path: Path) -> None:
    versions = read_versions(tmp_path)
    assert versions.keys().isdisjoint({"efa_driver", "libfabric", "aws_ofi_nccl", "nccl_library", "deep_ep_version"})


def test_a_loaded_backend_tells_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("deep_ep")
    library.__file__ = "/opt/deep_ep/__init__.py"
    library.__dict__["__version__"] = "2.1.0"
    monkeypatch.setitem(sys.modules, "deep_ep", library)
    versions = read_versions(tmp_path)
    assert (versions["deep_ep_version"], versions["deep_ep_file"]) == ("2.1.0", "/opt/deep_ep/__init__.py")


def test_only_variables_that_are_set_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_GIN_TYPE", "2")
    monkeypatch.delenv("FI_PROVIDER", raising=False)
    variables = read_variables()
    assert variables["NCCL_GIN_TYPE"] == "2"
    assert "FI_PROVIDER" not in variables


def test_what_the_image_was_built_from_is_named_where_there_is_an_image(tmp_path: Path) -> None:
    assert not [name for name in read_versions(tmp_path) if name.startswith("image_")]
    image = tmp_path / "etc/argo-moe-rl/image.json"
    image.parent.mkdir(parents=True)
    image.write_text('{"target": "gpu", "version": "0.1.0", "deepep": "sgl-deep-ep==0.1.2", "efa_installer": ""}\n')
    versions = {name: value for name, value in read_versions(tmp_path).items() if name.startswith("image_")}
    assert versions == {"image_target": "gpu", "image_version": "0.1.0", "image_deepep": "sgl-deep-ep==0.1.2"}
