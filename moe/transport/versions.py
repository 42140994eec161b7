"""Versions of everything between a token and the wire, read where each keeps it. What is not there is left out.

The readers of the EFA installer's files are written against its documentation; not yet run on hardware.
"""

import json
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

MODULES = ("deep_ep", "uccl", "uccl.ep", "nccl", "nccl.ep")
"""Libraries of the backends; looked at when a backend has loaded them, never imported here."""
DISTRIBUTIONS = ("deep-ep", "sgl-deep-ep", "deepinfer-ep", "uccl", "nccl-extensions", "nccl4py", "nvidia-nccl-cu13")
DRIVERS = {"efa_driver": "efa", "nvidia_driver": "nvidia", "gdrdrv_driver": "gdrdrv"}
LIBRARIES = {"nccl_library": "libnccl.so", "libfabric_library": "libfabric.so", "net_plugin_library": "libnccl-net"}
"""Shared libraries that this process has mapped."""
INSTALLED = {
    "efa_installer": r"EFA installer version: (\S+)",
    "libfabric": r"libfabric1?-aws[-_](\d[^_\s-]*)",
    "aws_ofi_nccl": r"(?:libnccl-ofi|aws-ofi-nccl)[-_](\d[^_\s-]*)",
}
"""In /opt/amazon/efa_installed_packages, which the EFA installer writes."""
IMAGE_FILE = "etc/argo-moe-rl/image.json"
"""What the container image was built from, as its OCI labels say; the Dockerfile writes both."""
VARIABLES = (
    "NCCL_GIN_TYPE",
    "NCCL_NET_PLUGIN",
    "NCCL_SOCKET_IFNAME",
    "FI_PROVIDER",
    "NVSHMEM_REMOTE_TRANSPORT",
    "NVSHMEM_LIBFABRIC_PROVIDER",
    "EP_REUSE_NCCL_COMM",
    "EP_DISABLE_GIN",
)


def read_versions(root: Path = Path("/")) -> dict[str, str]:
    """Name to version, or to the file that a library was loaded from; `root` is where /sys, /proc and /opt are."""
    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        nccl: Any = torch.cuda.nccl  # untyped
        found["nccl"] = ".".join(str(number) for number in nccl.version())
    for name, module in DRIVERS.items():
        _put(found, name, _text(root / "sys/module" / module / "version").strip())
    installed = _text(root / "opt/amazon/efa_installed_packages")
    for name, pattern in INSTALLED.items():
        match = re.search(pattern, installed)
        _put(found, name, match[1] if match else "")
    return found | _image(root) | _loaded_libraries(root) | _loaded_modules() | _distributions()


def read_variables() -> dict[str, str]:
    """The environment variables that choose a transport, where they are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _image(root: Path) -> dict[str, str]:
    built_from: dict[str, str] = json.loads(_text(root / IMAGE_FILE) or "{}")
    return {f"image_{name}": value for name, value in built_from.items() if value}


def _loaded_libraries(root: Path) -> dict[str, str]:
    paths = {line.split(maxsplit=5)[-1] for line in _text(root / "proc/self/maps").splitlines() if "/" in line}
    files: dict[str, str] = {}
    for name, prefix in LIBRARIES.items():
        matching = sorted(path for path in paths if Path(path).name.startswith(prefix))
        _put(files, name, ", ".join(matching))
    return files


def _loaded_modules() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in MODULES:
        module: Any = sys.modules.get(name)
        if module is not None:
            _put(found, f"{name}_file", str(getattr(module, "__file__", None) or ""))
            _put(found, f"{name}_version", str(getattr(module, "__version__", "")))
    return found


def _distributions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in DISTRIBUTIONS:
        try:
            found[f"{name} (installed)"] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _text(path: Path) -> str:
    """A file's text; empty where it does not exist or is not for us."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _put(found: dict[str, str], name: str, value: str) -> None:
    if value:
        found[name] = value
