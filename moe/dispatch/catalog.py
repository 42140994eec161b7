"""Every dispatcher that a run can name."""

from moe.config import MoeConfig
from moe.dispatch.base import TokenDispatcher
from moe.dispatch.local import LocalDispatcher


def build_dispatcher(moe: MoeConfig) -> TokenDispatcher:
    """The dispatcher that `moe.dispatcher` names; raises ValueError for a name that does not exist."""
    if moe.dispatcher == "local":
        return LocalDispatcher()
    raise ValueError(f"moe.dispatcher {moe.dispatcher!r} does not exist: use one of local")
