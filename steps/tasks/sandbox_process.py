"""One process that scores: started, asked, watched and ended. What it answers is not trusted, not even its form."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from steps.config import RewardConfig, TaskConfig
from steps.errors import ConfigError
from steps.tasks.sandbox_paths import PROJECT_ROOT, VisiblePaths
from steps.tasks.scoring import Outcome

_SCRIPT = Path(__file__).with_name("sandbox_child.py")
_LOAD_TIMEOUT_S = 300.0
_GRACE_S = 2.0
"""Beyond the limit that a verifier is held to by a signal inside its process, before the process is killed."""
_POLL_S = 0.1
_LONGEST_LINE = 1 << 16
_PRINTED_BYTES = 1 << 18
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Lost(Exception):
    """The process is of no more use. `outcome` is that of the sample it was working on."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome[2])
        self.outcome = outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSettings:
    task: TaskConfig
    reward: RewardConfig
    visible: VisiblePaths
    scratch: str | None
    memory_bytes: int

    def line(self) -> bytes:
        settings = {
            "parent": os.getpid(),
            "root": str(PROJECT_ROOT),
            "path": [os.path.realpath(entry or os.curdir) for entry in sys.path],
            "task": asdict(self.task),
            "timeout_s": self.reward.timeout_s,
            "sandbox": self.reward.sandbox,
            "memory_bytes": self.memory_bytes,
            "scratch": self.scratch,
            **asdict(self.visible),
        }
        return json.dumps(settings).encode() + b"\n"

    def environment(self) -> dict[str, str]:
        """The process's whole environment; with the sandbox off it is this process's own."""
        if self.reward.sandbox == "off":
            return dict(os.environ)
        passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        home = self.scratch or "/nonexistent"
        return {**passed_on, **_ONE_THREAD, "PYTHONHASHSEED": "0", "HOME": home, "TMPDIR": home}


class ScoringProcess:
    """Starts at once and loads in the background; `effective` waits for that and comes before `ask`.

    Main thread only: the kernel ends the process with the thread that started it.
    """

    def __init__(self, settings: ProcessSettings) -> None:
        self._settings = settings
        self.asked = 0
        self._popen = subprocess.Popen(
            [sys.executable, "-S", "-P", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=settings.environment(),
            start_new_session=True,
            bufsize=0,
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None and self._popen.stderr is not None
        self._requests, self._answers, self._printed = self._popen.stdin, self._popen.stdout, self._popen.stderr
        for pipe in (self._requests, self._answers, self._printed):
            os.set_blocking(pipe.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._answers, selectors.EVENT_READ)
        self._selector.register(self._printed, selectors.EVENT_READ)
        self._printable_bytes = _PRINTED_BYTES
        self._received = b""
        self._unsent = settings.line()
        self._send()
        self._effective: dict[str, Any] | None = None

    def effective(self, check: Callable[[], None]) -> dict[str, Any]:
        """The measures that are in effect, once the verifier is loaded.

        Raises ConfigError when it can't be, or when a required measure is not in effect.
        """
        if self._effective is None:
            where = f"task.verifier = {self._settings.task.verifier}"
            lines, lost = self._exchange(1, _LOAD_TIMEOUT_S, check)
            if lost is not None:
                raise ConfigError(f"{where}: the scoring process ended while it loaded it: {lost}")
            answer = _parsed(lines[0])
            if not isinstance(answer, dict) or not {"refused", "effective"} & answer.keys():
                raise ConfigError(f"{where}: wrote to its process's pipes while it was imported")
            if "refused" in answer:
                raise ConfigError(str(answer["refused"]))
            self._effective = answer["effective"]
        return dict(self._effective)

    def ask(self, requests: Sequence[bytes], check: Callable[[], None]) -> tuple[list[Outcome], Lost | None]:
        """Outcomes of the first requests, and why there are no more than these; None when all are answered."""
        if self._received or self._readable():
            return [], Lost(_ERROR_OUT_OF_TURN)
        self._unsent = b"".join(requests)
        self._send()
        lines, lost = self._exchange(len(requests), self._settings.reward.timeout_s + _GRACE_S, check)
        outcomes: list[Outcome] = []
        for line in lines:
            parsed = _outcome(_parsed(line))
            if parsed is None:
                return outcomes, Lost(_ERROR_OUT_OF_TURN)
            outcome, ends = parsed
            if ends:
                return outcomes, Lost(outcome)
            outcomes.append(outcome)
        return outcomes, lost

    def close(self) -> None:
        """End the process, whatever it does."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.kill()
        self._popen.wait()
        self._selector.close()
        for pipe in (self._requests, self._answers, self._printed):
            pipe.close()

    def _exchange(self, wanted: int, limit_s: float, check: Callable[[], None]) -> tuple[list[bytes], Lost | None]:
        """Send what is unsent, and receive this many lines, each at most `limit_s` after the one before."""
        lines: list[bytes] = []
        deadline_s = time.monotonic() + limit_s
        while len(lines) < wanted:
            check()
            readable = self._wait(max(0.0, min(_POLL_S, deadline_s - time.monotonic())))
            if readable:
                chunk = self._answers.read(1 << 16)
                if chunk == b"":
                    return lines, Lost(self._ended())
                *new, self._received = (self._received + (chunk or b"")).split(b"\n")
                lines += new
                if new:
                    deadline_s = time.monotonic() + limit_s
                elif len(self._received) > _LONGEST_LINE:
                    return lines, Lost(_ERROR_OUT_OF_TURN)
            elif time.monotonic() >= deadline_s:
                return lines, Lost(("timeout", None, f"no result within {self._settings.reward.timeout_s:g} s"))
        if len(lines) > wanted:
            self._received = b"\n"  # more answers than questions: seen before the next ones are asked
        return lines[:wanted], None

    def _wait(self, timeout_s: float) -> bool:
        """Wait until something can be done; print and send what there is. True when an answer can be read."""
        answered = False
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._answers:
                answered = True
            elif key.fileobj is self._printed:
                self._pass_on()
            else:
                self._send()
        return answered

    def _readable(self) -> bool:
        return any(key.fileobj is self._answers for key, _ in self._selector.select(0))

    def _send(self) -> None:
        try:
            written = self._requests.write(self._unsent) or 0
        except BrokenPipeError:  # the other pipe tells why
            written = len(self._unsent)
        self._unsent = self._unsent[written:]
        registered = self._requests in {key.fileobj for key in self._selector.get_map().values()}
        if self._unsent and not registered:
            self._selector.register(self._requests, selectors.EVENT_WRITE)
        elif not self._unsent and registered:
            self._selector.unregister(self._requests)

    def _pass_on(self) -> None:
        """Show what a verifier prints, up to a limit: a log must not fill a disk."""
        text = self._printed.read(1 << 16)
        if text == b"":
            self._selector.unregister(self._printed)
        elif text and self._printable_bytes > 0:
            sys.stderr.write(text[: self._printable_bytes].decode(errors="replace"))
            self._printable_bytes -= len(text)
            if self._printable_bytes <= 0:
                sys.stderr.write("\n(what else the verifier prints is not shown)\n")
            sys.stderr.flush()

    def _ended(self) -> Outcome:
        try:
            code = self._popen.wait(1.0)
        except subprocess.TimeoutExpired:
            return "error", None, "the scoring process closed its pipe"
        while self._printed in {key.fileobj for key in self._selector.get_map().values()} and self._selector.select(0):
            self._pass_on()
        if code == -signal.SIGXCPU:
            return "timeout", None, f"no result within {self._settings.reward.timeout_s:g} s of processor time"
        if code < 0:
            return "error", None, f"the scoring process was killed by {signal.Signals(-code).name}"
        return "error", None, f"the scoring process ended with code {code}"


_ERROR_OUT_OF_TURN: Outcome = ("error", None, "the scoring process wrote something that is no answer")


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _outcome(answer: object) -> tuple[Outcome, bool] | None:
    """The outcome and whether the process ends with it; None for what is not one."""
    if not isinstance(answer, list) or len(answer) != 4:
        return None
    status, value, detail, ends = answer
    if not isinstance(detail, str) or not isinstance(ends, bool) or len(detail) > 1000:
        return None
    if status == "ok" and type(value) is float and 0.0 <= value <= 1.0:
        return (("ok", value, detail), ends)
    if status in ("timeout", "error") and value is None:
        return ((status, None, detail), ends)
    return None
