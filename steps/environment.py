"""What a pod is told by its environment: where the store and the database are, and who it is."""

import math
import os
import shutil
import socket
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import gettempdir

from steps.errors import ConfigError

SERVICE_DEADLINE_S = 120.0
IMDS_URL = "http://169.254.169.254"

OPTIONAL_SETTINGS = {
    "MOERL_SERVICE_DEADLINE_S": "service-deadline-s",
    "MOERL_IMDS": "imds",
    "MOERL_CACHE_BYTES": "cache-bytes",
}
"""Variables that need not be set, each with its key in a cluster's ConfigMap; `moerl run` takes them from its own."""

REPORTED_PACKAGES = ("torch", "transformers", "safetensors", "sqlalchemy", "mlflow", "hera", "boto3")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEnvironment:
    """The variables that the manifests set; the local executor sets the same ones."""

    store_uri: str
    database_url: str
    tracking_uri: str
    outputs_dir: Path
    progress_file: Path | None
    cache_dir: Path
    pod: str
    node: str
    capacity_type: str
    attempt: int
    workflow: str
    notice_file: Path | None = None
    """Who writes it interrupts the step (`steps.notices`)."""
    imds_url: str = ""
    """AWS's instance metadata service, to be asked for notices; empty: not asked."""


def read_environment() -> StepEnvironment:
    """Read the environment; ConfigError names the variable that is missing and how to set it."""
    service_deadline_s()  # a bad value is found here, and not in an outage
    progress = os.environ.get("ARGO_PROGRESS_FILE", "")
    notice_file = os.environ.get("MOERL_NOTICE_FILE", "")
    return StepEnvironment(
        store_uri=_required("MOERL_STORE", "a folder or s3://bucket/prefix"),
        database_url=_required("MOERL_DATABASE_URL", "sqlite:////absolute/file.db or postgresql+psycopg://..."),
        tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", ""),
        outputs_dir=Path(os.environ.get("MOERL_OUTPUTS_DIR", "/tmp/moerl/outputs")),
        progress_file=Path(progress) if progress else None,
        cache_dir=Path(os.environ.get("MOERL_CACHE_DIR") or Path(gettempdir()) / "moerl-cache"),
        pod=os.environ.get("POD_NAME", f"pid-{os.getpid()}"),
        node=os.environ.get("NODE_NAME", socket.gethostname()),
        capacity_type=os.environ.get("MOERL_CAPACITY_TYPE", "local"),
        attempt=_whole_number("MOERL_ATTEMPT"),
        workflow=os.environ.get("ARGO_WORKFLOW", ""),
        notice_file=Path(notice_file) if notice_file else None,
        imds_url=_imds_url(),
    )


def service_deadline_s() -> float:
    """Seconds for which a call of the database or the store is repeated while that is away; 0: it is tried once.

    A function of its own, since every process may have to wait for them, also one that is no step.
    """
    value = os.environ.get("MOERL_SERVICE_DEADLINE_S") or str(SERVICE_DEADLINE_S)
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ConfigError(f"environment variable MOERL_SERVICE_DEADLINE_S = {value!r}: set it to seconds, e.g. 120")
    return seconds


def read_cache_bytes(cache_dir: Path) -> int:
    """Bytes that local copies of the store's folders may take: MOERL_CACHE_BYTES, or 3/4 of the disk they lie on."""
    return _whole_number("MOERL_CACHE_BYTES") or shutil.disk_usage(cache_dir).total * 3 // 4


def _required(name: str, what: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(f"environment variable {name} is not set: set it to {what}")
    return value


def _imds_url() -> str:
    asked = os.environ.get("MOERL_IMDS") or "off"
    if asked not in ("on", "off"):
        raise ConfigError(f"environment variable MOERL_IMDS = {asked!r}: set it to on or off")
    url = os.environ.get("MOERL_IMDS_URL") or IMDS_URL
    if not url.startswith("http://"):
        raise ConfigError(f"environment variable MOERL_IMDS_URL = {url!r}: set it to http://address[:port]")
    return url if asked == "on" else ""


def _whole_number(name: str) -> int:
    value = os.environ.get(name) or "0"
    if not value.isdecimal():
        raise ConfigError(f"environment variable {name} = {value!r}: set it to a whole number")
    return int(value)


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide a result, read from their metadata (nothing is imported)."""
    versions = {}
    for name in REPORTED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions
