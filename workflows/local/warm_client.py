"""The executor's side of the warm server: start a step, signal it, wait for its exit code."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steps.errors import ServiceUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """Modules that the server imports for all steps: before the first one starts, and later, while none asks for it."""

    first: tuple[str, ...] = ()
    when_idle: tuple[str, ...] = ()


DEFAULT_PRELOAD = Preload(
    first=(
        "torch",
        "transformers",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "tokenizers",
        "safetensors.torch",
        "sqlalchemy.dialects.sqlite",
        "sqlite3",
        "alembic.command",
        "pydantic.main",
        "pydantic.fields",
        "pydantic.dataclasses",
        "pydantic.type_adapter",
        "tomli_w",
        "numpy",
        "steps.initial_policy",
        "steps.leasing",
        "steps.report_html",
        "steps.reporting",
        "steps.tracking_events",
        "steps.transport_evidence",
        "moe.consolidate",
    ),
    # Two seconds of imports that only the reports need.
    when_idle=("mlflow", "mlflow.store.tracking.sqlalchemy_store"),
)
# Set before numpy, torch and arrow load: a thread pool that exists at a fork is broken in the child.
SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_END_WAIT_S = 1.0  # it sees the end of its socket at once, unless it is still importing


class WarmServer:
    """The server process and our end of its socket. It imports in the background; requests wait in the socket."""

    def __init__(self, *, log: Path, cwd: Path, preload: Preload = DEFAULT_PRELOAD) -> None:
        self.log = log
        self.ids = itertools.count(1)
        self.socket, theirs = socket.socketpair()
        script = Path(__file__).with_name("warm_server.py")
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    str(script),
                    str(theirs.fileno()),
                    ",".join(preload.first),
                    ",".join(preload.when_idle),
                ],
                pass_fds=(theirs.fileno(),),
                cwd=cwd,
                env={**os.environ, **SINGLE_THREADED},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C at the terminal is the executor's to handle
            )

    def close(self) -> None:
        """Ends the server, and with it every step that still runs."""
        self.socket.close()
        try:
            self._process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(slots=True)
class StepProcess:
    """A step in the server's care. `started` gives the pid, `ended` the exit code."""

    id: int
    started: asyncio.Future[int]
    ended: asyncio.Future[int]


class WarmClient:
    """Talks to a WarmServer from one event loop: `async with WarmClient(server) as client`."""

    def __init__(self, server: WarmServer) -> None:
        self._server = server
        self._steps: dict[int, StepProcess] = {}
        self._ended = False

    @property
    def server_ended(self) -> bool:
        """True once no step can be started any more."""
        return self._ended

    async def __aenter__(self) -> "WarmClient":
        # A duplicate, so that the server outlives this event loop.
        self._reader, self._writer = await asyncio.open_connection(sock=self._server.socket.dup())
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        for step in self._steps.values():  # none, unless an exception cut the submission short
            self.signal(step, signal.SIGKILL)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()
        self._listener.cancel()
        self._writer.close()

    async def _listen(self) -> None:
        try:
            while line := await self._reader.readline():
                self._receive(json.loads(line))
        except (ConnectionError, ValueError):  # it was killed with a request unread, or in the middle of a line
            pass
        finally:
            self._ended = True
            for step in self._steps.values():
                for future in (step.started, step.ended):
                    if not future.done():
                        future.set_exception(self._gone())
                        future.exception()  # mark as retrieved: whoever waits for it still gets it

    def _receive(self, message: Mapping[str, int]) -> None:
        step = self._steps.get(message["id"])
        if step is None:  # left over from a submission that was cut short
            return
        if "pid" in message:
            step.started.set_result(message["pid"])
        else:
            del self._steps[step.id]
            step.ended.set_result(message["code"])

    def _gone(self) -> ServiceUnavailable:
        return ServiceUnavailable(f"the process that starts the steps has ended; see {self._server.log}")

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> StepProcess:
        if self._ended:
            raise self._gone()
        loop = asyncio.get_running_loop()
        step = StepProcess(next(self._server.ids), loop.create_future(), loop.create_future())
        self._steps[step.id] = step
        self._send(
            {"op": "start", "id": step.id, "argv": list(argv), "env": dict(env), "cwd": str(cwd), "log": str(log)}
        )
        return step

    def signal(self, step: StepProcess, number: signal.Signals) -> None:
        """To the step's whole process group; nothing happens once it has ended."""
        if not self._ended and not step.ended.done():
            self._send({"op": "signal", "id": step.id, "signal": int(number)})

    def _send(self, request: dict[str, Any]) -> None:
        self._writer.write(json.dumps(request).encode() + b"\n")
