"""A server's processes: started in a group of their own that dies with its starter, waited for, ended for certain."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from steps.adapters.engines.http_client import JsonClient
from steps.adapters.engines.server_kind import Launch, ServerKind, server_environment
from steps.errors import ConfigError, ServiceUnavailable

GRACE_S = 20.0
_POLL_S = 0.2
_TAIL_BYTES = 4000
LOG_BYTES = 64 << 20

# Leads the group, and kills all of it when the thread that started it is gone, even by SIGKILL of its process (Linux
# tells it by a signal): vLLM's engine processes would go on without their server. It is a program of its own because
# code between fork and exec may deadlock where there are threads.
_LAUNCHER = """
import ctypes, os, signal, subprocess, sys
signal.signal(signal.SIGUSR1, lambda *_: os.killpg(0, signal.SIGKILL))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGUSR1)
if os.getppid() != int(sys.argv[1]):
    sys.exit(143)
server = subprocess.Popen([sys.executable, *sys.argv[2:]])
signal.signal(signal.SIGTERM, lambda *_: server.terminate())
code = server.wait()
sys.exit(code if code >= 0 else 128 - code)
"""


class RunningServer(Protocol):
    """A server that answers, started by us or by somebody else."""

    client: JsonClient

    @property
    def is_running(self) -> bool: ...

    def wait_until_healthy(self, kind: ServerKind, timeout_s: float, stop: Callable[[], bool]) -> None: ...

    def stop(self) -> None: ...


class AttachedServer:
    """Somebody else's server: it is not ours to end."""

    def __init__(self, url: str) -> None:
        self.client = JsonClient(url, connections=4)

    @property
    def is_running(self) -> bool:
        return True

    def wait_until_healthy(self, kind: ServerKind, timeout_s: float, stop: Callable[[], bool]) -> None:
        """ServiceUnavailable when it is not healthy."""
        if not kind.is_healthy(self.client):
            raise ServiceUnavailable(
                f"{kind.name} at {self.client.url} does not answer; start it, or leave out --attach"
            )

    def stop(self) -> None:
        self.client.close()


class ServerProcess:
    """One started server. To be made, and started, by a thread that lives as long as the server shall."""

    def __init__(self, kind: ServerKind, launch: Launch, python: str, log: Path) -> None:
        """ConfigError when the interpreter can't run this kind of server."""
        require_module(kind, python)
        self._log = log
        self.client = JsonClient(f"http://{launch.address}:{launch.port}", connections=4)
        with log.open("ab") as output:
            self._log_begin = output.tell()
            self._process = subprocess.Popen(
                [python, "-c", _LAUNCHER, str(os.getpid()), *kind.arguments(launch)],
                env=server_environment(kind, launch),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def group(self) -> int:
        """Process group of the server and of everything that it starts."""
        return self._process.pid

    def wait_until_healthy(self, kind: ServerKind, timeout_s: float, stop: Callable[[], bool]) -> None:
        """ServiceUnavailable when it ends, or is not healthy in time, or `stop` says that nobody waits any more."""
        deadline_s = time.monotonic() + timeout_s
        while not kind.is_healthy(self.client):
            if not self.is_running:
                said = last_words(self._log, self._log_begin)
                raise ServiceUnavailable(f"{kind.name} ended with {self._process.returncode}: {said}")
            if stop():
                raise ServiceUnavailable(f"{kind.name}: the start was given up, its host is asked to end")
            if time.monotonic() > deadline_s:
                raise ServiceUnavailable(
                    f"{kind.name} is not healthy after {timeout_s:.0f} s; see {self._log}, or raise "
                    "rollout.server.start_timeout_s"
                )
            time.sleep(_POLL_S)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """SIGTERM to the server, after the grace period SIGKILL to its whole group."""
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        kill_group(self.group)
        self._process.wait()
        self.client.close()


def reserve_port(address: str) -> socket.socket:
    """A port that nobody gets by chance while the socket is open; a server that asks for this one may listen on it.

    Between two servers on one machine that pick the same free port, requests would go to the wrong one.
    """
    reserved = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # servers set the first one, vLLM both
        reserved.setsockopt(socket.SOL_SOCKET, option, 1)
    reserved.bind((address, 0))
    return reserved


def bound_log(log: Path) -> None:
    """Begin a log anew that has grown past LOG_BYTES, with the old one beside it; its writers append."""
    if log.exists() and log.stat().st_size > LOG_BYTES:
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)


def last_words(log: Path, since: int) -> str:
    """The last line of a log after byte `since` that names an error, else its last one, and where the log is."""
    with log.open("rb") as file:
        file.seek(max(since, log.stat().st_size - _TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return f"{(errors or lines or ['no output'])[-1][:300]} ({log})"


def kill_group(group: int) -> None:
    """SIGKILL what is left of a process group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def server_python() -> str:
    """The interpreter that runs a server: MOERL_ENGINE_PYTHON, by default this one."""
    return os.environ.get("MOERL_ENGINE_PYTHON") or sys.executable


def require_module(kind: ServerKind, python: str) -> None:
    """ConfigError unless the interpreter `python` has the server's package."""
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({kind.module!r}) is None)"
    try:
        found = subprocess.run([python, "-c", look], stdin=subprocess.DEVNULL, check=False).returncode == 0
    except OSError as error:
        raise ConfigError(f"MOERL_ENGINE_PYTHON = {python!r}: {error.strerror}; give a Python interpreter") from None
    if not found:
        raise ConfigError(
            f'rollout.engine = "{kind.name}": {python} has no package {kind.module}; {kind.install}, or name another '
            "interpreter in MOERL_ENGINE_PYTHON"
        )
