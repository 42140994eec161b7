"""What a pod is told by its environment: where the store and the database are, and who it is."""

import os
import socket
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import gettempdir

from steps.errors import ConfigError

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


def read_environment() -> StepEnvironment:
    """Read the environment; ConfigError names the variable that is missing and how to set it."""
    progress = os.environ.get("ARGO_PROGRESS_FILE", "")
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
    )


def _required(name: str, what: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(f"environment variable {name} is not set: set it to {what}")
    return value


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
