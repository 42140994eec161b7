"""Forks steps from an interpreter that has torch loaded already: `python -P warm_server.py FD FIRST WHEN_IDLE`.

It imports the modules FIRST, then serves, and imports WHEN_IDLE while nobody asks for anything.
It reads JSON lines from the socket FD and answers with JSON lines:
    {"op": "start", "id", "argv", "env", "cwd", "log"}   -> {"id", "pid"}, and later {"id", "code"}
    {"op": "signal", "id", "signal"}                      sends it to the whole process group
`code` is the exit code, 128 + n for death by signal n, as Kubernetes shows it. `python -m MODULE` runs in the fork
itself, any other argv is executed. When the socket closes (the executor ended, however it did), every step is killed.

One thread and no torch operation before a fork: a forked child of a threaded parent may deadlock. FIRST and WHEN_IDLE
may name modules of the project that keep to this when imported; steps run them as they were when the server started.
Besides these it imports the standard library only, and runs as a script, so that steps see nothing else of ours loaded.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import weakref
from types import TracebackType
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
EXIT_COMMAND_NOT_FOUND = 64  # as Argo's own supervisor process answers


def preload(modules: list[str]) -> None:
    """Imports what it can. A module that is not installed, or is broken, fails in the step that needs it, not here."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            print(f"not preloaded: {module}: {error!r}", file=sys.stderr)
    gc.collect()
    gc.freeze()  # a collection in a child must not touch, and so copy, every inherited page


def module_of(argv: list[str]) -> str | None:
    """MODULE of `python -m MODULE ...`, None for other commands."""
    interpreters = ("python", "python3", sys.executable)
    return argv[2] if len(argv) > 2 and argv[0] in interpreters and argv[1] == "-m" else None


class Server:
    def __init__(self, connection: socket.socket, when_idle: list[str]) -> None:
        self.connection = connection
        self.when_idle = when_idle
        self.base_path = [entry for entry in sys.path if entry]
        self.pids: dict[int, int] = {}
        self.ids: dict[int, int] = {}
        self.wakeup_read, self.wakeup_write = os.pipe()
        os.set_blocking(self.wakeup_read, False)
        os.set_blocking(self.wakeup_write, False)

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wakeup_write, warn_on_full_buffer=False)
        received = b""
        while True:
            timeout_s = 0 if self.when_idle else None
            readable, _, _ = select.select([self.connection.fileno(), self.wakeup_read], [], [], timeout_s)
            if not readable:
                preload([self.when_idle.pop(0)])
            if self.wakeup_read in readable:
                os.read(self.wakeup_read, 4096)
                self.reap()
            if self.connection.fileno() in readable:
                chunk = self.connection.recv(1 << 16)
                if not chunk:
                    return self.kill_all()
                *lines, received = (received + chunk).split(b"\n")
                for line in lines:
                    self.handle(json.loads(line))

    def handle(self, request: dict[str, Any]) -> None:
        if request["op"] == "signal":
            self.signal(request["id"], request["signal"])
            return
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.become_step(request, server_pid)
        self.pids[request["id"]] = pid
        self.ids[pid] = request["id"]
        self.answer({"id": request["id"], "pid": pid})

    def answer(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # recv sees the end and kills the steps
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def signal(self, step_id: int, number: int) -> None:
        pid = self.pids.get(step_id)
        if pid is None:
            return
        try:
            os.killpg(pid, number)
        except ProcessLookupError:  # forked a moment ago, not yet the leader of its own group
            os.kill(pid, number)

    def reap(self) -> None:
        while self.ids:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            # A container's other processes end with its first one; before waitpid, while the group's id is still taken.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            _, wait_status = os.waitpid(ended.si_pid, 0)
            code = os.waitstatus_to_exitcode(wait_status)
            step_id = self.ids.pop(ended.si_pid)
            del self.pids[step_id]
            self.answer({"id": step_id, "code": code if code >= 0 else 128 - code})

    def kill_all(self) -> None:
        for step_id in list(self.pids):
            self.signal(step_id, signal.SIGKILL)

    def become_step(self, request: dict[str, Any], server_pid: int) -> NoReturn:
        code = 1
        try:
            self.detach(server_pid)
            redirect(request["log"])
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["env"])
            module = module_of(request["argv"])
            if module is None:
                code = execute(request["argv"])
            else:
                extra = [entry for entry in request["env"].get("PYTHONPATH", "").split(os.pathsep) if entry]
                sys.path[:] = [request["cwd"], *extra, *self.base_path]
                code = run_module(module, request["argv"][3:])
        except BaseException:
            traceback.print_exc()
        finally:
            flush()
            os._exit(code)

    def detach(self, server_pid: int) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        die_with_parent(server_pid)
        self.connection.close()
        os.close(self.wakeup_read)
        os.close(self.wakeup_write)
        forget_exit_functions()


def forget_exit_functions() -> None:
    """Exit functions and finalizers of the preloaded modules are the server's: a fresh process would not have them.

    Running torch's costs a step 50 ms. The standard library's two are kept for what the step itself will log or start.
    """
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)
    if "multiprocessing.util" in sys.modules:
        atexit.register(sys.modules["multiprocessing.util"]._exit_function)


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when its parent ends, even by SIGKILL (Linux; elsewhere a no-op)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(128 + signal.SIGKILL)


def redirect(log: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(null)
    os.close(out)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def execute(argv: list[str]) -> int:
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        print(f"can't run {argv[0]}: {error.strerror}", file=sys.stderr)
        return EXIT_COMMAND_NOT_FOUND


def run_module(module: str, arguments: list[str]) -> int:
    """`python -m module arguments` in this process; the exit code that a fresh interpreter would have."""
    importlib.invalidate_caches()
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = exit_code(error.code)
    except BaseException as error:
        traceback.print_exception(error.with_traceback(beyond_runpy(error.__traceback__)))
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]  # what an interpreter does at its end: wait for threads,
    atexit._run_exitfuncs()  # then run the exit functions
    return code


def exit_code(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    print(value, file=sys.stderr)
    return 1


def beyond_runpy(frames: TracebackType | None) -> TracebackType | None:
    """A step's traceback without the frames that only start it."""
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return frames


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.path.insert(0, os.getcwd())
    first, when_idle = ([module for module in names.split(",") if module] for names in sys.argv[2:4])
    preload(first)
    server = Server(connection, when_idle)
    own = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    server.base_path = [entry for entry in server.base_path if entry not in (os.getcwd(), *own)]
    server.serve()
    os._exit(0)  # nothing to clean up, and torch takes its time


if __name__ == "__main__":
    main()
