"""Every engine that a run can name."""

from pathlib import Path

from steps.adapters.engines.base import Engine
from steps.adapters.engines.torch_engine import TorchEngine


def load_engine(name: str, folder: Path, policy_version: int) -> Engine:
    """The engine that `rollout.engine` names, on a publication's folder; ValueError for a name that does not exist."""
    if name == "torch":
        return TorchEngine.load(folder, policy_version)
    raise ValueError(f"rollout.engine {name!r} does not exist: use one of torch")
