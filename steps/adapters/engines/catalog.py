"""Every engine that a run can name."""

from pathlib import Path

from steps.adapters.engines.base import Engine
from steps.adapters.engines.torch_engine import TorchEngine

_ENGINES = {"torch": TorchEngine}


def load_engine(name: str, folder: Path, policy_version: int, *, record_routing: bool = False) -> Engine:
    """The engine that `rollout.engine` names, on a publication's folder.

    `record_routing`: responses come with the experts that their tokens went to. Raises ValueError for a name that does
    not exist, and for an engine that can't record.
    """
    if name not in _ENGINES:
        raise ValueError(f"rollout.engine {name!r} does not exist: use one of {', '.join(sorted(_ENGINES))}")
    engine = _ENGINES[name]
    if record_routing and not engine.can_record_routing:
        raise ValueError(
            f"rollout.engine {name!r} does not tell the experts of a token: set moe.routing_replay to trainer or none"
        )
    return engine.load(folder, policy_version, record_routing=record_routing)
