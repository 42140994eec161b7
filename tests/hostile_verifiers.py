"""Verifiers that misbehave, by what the response asks for: they run in the scoring process, never in a test's own."""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_hoard: list[bytearray] = []


def act(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> float:
    """Does what `response` names; 1.0 for `fine`."""
    return float(ACTIONS[response](meta))


def told(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> float:
    """Fails with what `response` names as the exception's text, so that a test can read it."""
    raise RuntimeError(json.dumps(FACTS[response](meta)))


def _fine(_: dict[str, Any]) -> float:
    return 1.0


def _hang_in_c(_: dict[str, Any]) -> float:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(600)
    return 1.0


def _stop_itself(_: dict[str, Any]) -> float:
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


def _burn(_: dict[str, Any]) -> float:
    """Processor time in several threads of C code, without the interpreter's lock."""
    data = bytes(1 << 24)
    import hashlib

    def work() -> None:
        while True:
            hashlib.pbkdf2_hmac("sha256", data[:64], b"", 10_000_000)

    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(600)
    return 1.0


def _eat_memory(_: dict[str, Any]) -> float:
    while True:
        _hoard.append(bytearray(16 << 20))


def _leak(_: dict[str, Any]) -> float:
    _hoard.append(bytearray(150 << 20))
    return 1.0


def _segfault(_: dict[str, Any]) -> float:
    ctypes.string_at(0)
    return 1.0


def _exit(_: dict[str, Any]) -> float:
    os._exit(3)


def _close_pipes(_: dict[str, Any]) -> float:
    os.closerange(3, 256)
    return 1.0


def _garbage(_: dict[str, Any]) -> float:
    """Writes to every descriptor it finds, its process's answers among them."""
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\xff\x00}{ not an answer\n")
        except OSError:
            continue
    return 1.0


def _endless_line(_: dict[str, Any]) -> float:
    for descriptor in range(3, 64):
        try:
            while True:
                os.write(descriptor, b"x" * 65536)
        except OSError:
            continue
    return 1.0


def _forge(_: dict[str, Any]) -> float:
    """Answers for samples that nobody has asked about yet."""
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b'["ok", 1.0, "", false]\n' * 500)
        except OSError:
            continue
    return 1.0


def _print_much(_: dict[str, Any]) -> float:
    for _index in range(2000):
        print('["ok", 0.5, "", false]' * 20)
        print("noise", file=sys.stderr)
    return 1.0


def _kill_parent(_: dict[str, Any]) -> float:
    os.kill(os.getppid(), signal.SIGKILL)
    return 1.0


def _kill_everybody(_: dict[str, Any]) -> float:
    os.kill(-1, signal.SIGKILL)
    return 1.0


def _limit_parent(_: dict[str, Any]) -> float:
    import resource

    resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))
    return 1.0


def _fork(_: dict[str, Any]) -> float:
    if os.fork() == 0:
        os._exit(0)
    return 1.0


def _run_program(_: dict[str, Any]) -> float:
    subprocess.run(["/bin/true"], check=True)
    return 1.0


def _exec(_: dict[str, Any]) -> float:
    os.execv("/bin/true", ["true"])


def _connect(meta: dict[str, Any]) -> float:
    socket.create_connection(("127.0.0.1", meta["port"]), timeout=5).close()
    return 1.0


def _connect_unix(meta: dict[str, Any]) -> float:
    """Through one end of a socket pair, which is allowed."""
    ours, _theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.sendto(b"x", meta["path"])
    return 1.0


def _threads(_: dict[str, Any]) -> float:
    results: list[float] = []
    thread = threading.Thread(target=results.append, args=(1.0,))
    thread.start()
    thread.join()
    return results[0]


def _write(meta: dict[str, Any]) -> float:
    Path(meta["path"]).write_text("changed")
    return 1.0


def _remove(meta: dict[str, Any]) -> float:
    shutil.rmtree(meta["path"])
    return 1.0


def _chmod(meta: dict[str, Any]) -> float:
    os.chmod(meta["path"], 0)
    return 1.0


def _truncate(meta: dict[str, Any]) -> float:
    os.truncate(meta["path"], 0)
    return 1.0


def _scratch(_: dict[str, Any]) -> float:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "file").write_text("x" * 1000)
        moved = Path(folder, "file").rename(Path(folder, "moved"))
        return float(moved.read_text() == "x" * 1000)


def _large_file(_: dict[str, Any]) -> float:
    import tempfile

    with tempfile.TemporaryFile() as file:
        for _index in range(65):
            file.write(bytes(1 << 20))
    return 1.0


def _leave_a_file(_: dict[str, Any]) -> float:
    folder = Path(os.environ["TMPDIR"])
    found = list(folder.iterdir())
    (folder / "left").write_text("left")
    return 0.0 if found else 1.0


def _read(meta: dict[str, Any]) -> float:
    return float(len(Path(meta["path"]).read_bytes()) > 0)


def _escape_by_handle(meta: dict[str, Any]) -> float:
    return float(_libc.syscall(425, 1, None) >= 0)  # io_uring_setup


def _environment(_: dict[str, Any]) -> list[str]:
    return sorted(os.environ)


def _descriptors(_: dict[str, Any]) -> list[int]:
    found = []
    for descriptor in range(256):
        try:
            os.fstat(descriptor)
        except OSError:
            continue
        found.append(descriptor)
    return found


def _capabilities(_: dict[str, Any]) -> int:
    data = ctypes.create_string_buffer(24)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _libc.capget(header, data)
    return int.from_bytes(data.raw[0:4], "little")


ACTIONS = {
    "fine": _fine,
    "hang": lambda _: time.sleep(600),
    "hang in C": _hang_in_c,
    "stop": _stop_itself,
    "burn": _burn,
    "eat memory": _eat_memory,
    "leak": _leak,
    "segfault": _segfault,
    "exit": _exit,
    "close pipes": _close_pipes,
    "garbage": _garbage,
    "endless line": _endless_line,
    "forge": _forge,
    "print": _print_much,
    "kill parent": _kill_parent,
    "kill everybody": _kill_everybody,
    "limit parent": _limit_parent,
    "fork": _fork,
    "run program": _run_program,
    "exec": _exec,
    "connect": _connect,
    "connect unix": _connect_unix,
    "io_uring": _escape_by_handle,
    "threads": _threads,
    "write": _write,
    "remove": _remove,
    "chmod": _chmod,
    "truncate": _truncate,
    "scratch": _scratch,
    "large file": _large_file,
    "leave a file": _leave_a_file,
    "read": _read,
    "has API_KEY": lambda _: "API_KEY" in os.environ,
}
FACTS = {"environment": _environment, "descriptors": _descriptors, "capabilities": _capabilities}
