"""Every engine that a run can name."""

from pathlib import Path

from steps.adapters.engines.base import Engine
from steps.adapters.engines.server_kind import ServerKind
from steps.adapters.engines.sglang_server import SglangServer
from steps.adapters.engines.torch_engine import TorchEngine
from steps.adapters.engines.vllm_server import VllmServer

SERVER_KINDS: dict[str, ServerKind] = {"vllm": VllmServer(), "sglang": SglangServer()}


def load_engine(name: str, folder: Path, policy_version: int, *, record_routing: bool = False) -> Engine:
    """An engine inside this process, on a publication's folder. Raises ValueError for a name that is no such engine.

    `record_routing`: responses come with the experts that their tokens went to.
    """
    if name != "torch":
        raise ValueError(f"rollout.engine {name!r} is not an engine inside the worker: use torch")
    return TorchEngine.load(folder, policy_version, record_routing=record_routing)
