"""The process that runs reward code: `python -S -P sandbox_child.py`, started by `steps.tasks.sandbox_process`.

The first line on stdin is its settings. It restricts itself before any module of the user's is imported, answers with
{"effective": measures} or {"refused": reason}, and then, for each line [prompt or null (the one before), response],
with [status, value, detail, whether this process ends now]. Its stdin and stdout are out of a verifier's way: what that
prints goes to stderr. Until it knows its `sys.path` it imports the standard library only.
"""

import ctypes
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steps.tasks.dataset import Verifier

_PR_SET_PDEATHSIG = 1


def main() -> None:
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    settings: dict[str, Any] = json.loads(requests.readline())
    _die_with(settings["parent"])
    sys.path.insert(0, settings["root"])
    effective = _restrict(settings)
    # What scoring needs is imported before all is said to be well: a failure here is no sample's own.
    import steps.tasks.scoring  # noqa: F401
    from steps.errors import ConfigError

    try:
        verifier = _load(settings, effective)
    except ConfigError as error:
        _answer(answers, {"refused": str(error)})
        return
    _answer(answers, {"effective": effective})
    _serve(requests, answers, verifier, settings["timeout_s"])


def _serve(requests: Any, answers: int, verifier: "Verifier", timeout_s: float) -> None:
    from steps.records import Prompt
    from steps.tasks.scoring import score

    cpu = _CpuLimit(timeout_s)
    prompt = None
    for line in requests:
        about, response = json.loads(line)
        prompt = prompt if about is None else Prompt(**about)
        assert prompt is not None
        cpu.renew()
        status, value, detail = score(verifier, prompt, response, timeout_s)
        # What earlier samples left behind may be what filled the memory: the next one gets a new process.
        ends = status == "error" and detail.startswith("MemoryError")
        _answer(answers, [status, value, detail, ends])
        if ends:
            os._exit(0)


def _answer(answers: int, message: object) -> None:
    os.write(answers, json.dumps(message).encode() + b"\n")


def _restrict(settings: Mapping[str, Any]) -> dict[str, Any]:
    if settings["sandbox"] == "off":
        return {}
    from steps.tasks.sandbox_kernel import restrict

    return restrict(settings)


def _load(settings: Mapping[str, Any], effective: Mapping[str, Any]) -> "Verifier":
    """The verifier. One of our own needs no more of the path than our own modules, and is ready sooner."""
    from steps.errors import ConfigError
    from steps.tasks import verifiers

    missing = [f"{measure} ({why})" for measure, why in effective.items() if isinstance(why, str)]
    if missing and settings["sandbox"] == "required":
        raise ConfigError(
            f"reward.sandbox = required: not in effect on this node: {', '.join(missing)}; run on another kernel "
            "or set best-effort"
        )
    name = settings["task"]["verifier"]
    if name in verifiers.BY_NAME:
        return verifiers.BY_NAME[name]
    import site

    site.main()
    sys.path[:] = settings["path"]
    from steps.config import TaskConfig
    from steps.tasks.catalog import load_verifier

    return load_verifier(TaskConfig(**settings["task"]))


def _die_with(parent: int) -> None:
    """The kernel kills this process when its parent ends, even by SIGKILL (Linux; elsewhere stdin ends)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


class _CpuLimit:
    """At least `timeout_s` and at most about twice as much processor time a sample, of all threads together."""

    def __init__(self, timeout_s: float) -> None:
        self._allowance_s = min(math.ceil(timeout_s), 1 << 30) + 1
        self._renew_at_s = -1.0

    def renew(self) -> None:
        used_s = time.process_time()
        if used_s > self._renew_at_s:
            limit_s = math.ceil(used_s) + 2 * self._allowance_s
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
            self._renew_at_s = limit_s - self._allowance_s


if __name__ == "__main__":
    main()
