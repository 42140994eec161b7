"""Scoring in a process of its own, which holds no secret and is held to limits: see docs/security.md.

A verifier that hangs, dies, fills the memory or answers nonsense costs its own sample, and no other.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from steps.config import RewardConfig, TaskConfig
from steps.records import Prompt
from steps.tasks.sandbox_paths import visible_paths
from steps.tasks.sandbox_process import ProcessSettings, ScoringProcess
from steps.tasks.scoring import Outcome

_SAMPLES_AT_ONCE = 256
_SHARE_OF_MEMORY = 0.75
_CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")


class Scorer:
    """`with Scorer(task, reward) as scorer`: one process that scores one sample after the other.

    It starts in the background. What it can't load, or a measure that is required and not in effect, is raised as
    ConfigError by the first call that needs it. `check` is called often while a verifier works; what it raises passes.
    """

    def __init__(
        self,
        task: TaskConfig,
        reward: RewardConfig,
        *,
        private: Iterable[Path] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._check = check
        self._scratch = _make_scratch()
        self._settings = ProcessSettings(
            task=task,
            reward=reward,
            visible=visible_paths(private),
            scratch=self._scratch,
            memory_bytes=_memory_bytes(reward),
        )
        self._process: ScoringProcess | None = ScoringProcess(self._settings)
        self.effective: dict[str, Any] = {}
        """Of each measure: true, Landlock's version, or why it is not in effect. Empty until the verifier is loaded."""

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_process()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def load(self) -> None:
        """Wait until the verifier is loaded."""
        self._running()

    def report(self) -> dict[str, Any]:
        """What is asked of the sandbox and what is `effective`, for the ledger."""
        return {"requested": self._settings.reward.sandbox, "effective": self.effective}

    def score(self, samples: Sequence[tuple[Prompt, str]]) -> list[Outcome]:
        """The outcome of each (prompt, response), in order."""
        outcomes: list[Outcome] = []
        while len(outcomes) < len(samples):
            process = self._running()
            asked = samples[len(outcomes) : len(outcomes) + _SAMPLES_AT_ONCE]
            answered, lost = process.ask(_requests(asked), self._check)
            outcomes += answered
            first_of_process = process.asked + len(answered) == 0
            process.asked += len(answered)
            if lost is not None:
                self._end_process()
                # An earlier sample may be to blame for what is no timeout: a second try, in a process that saw none.
                if first_of_process or lost.outcome[0] == "timeout":
                    outcomes.append(lost.outcome)
            self._clear_scratch()
        return outcomes

    def _running(self) -> ScoringProcess:
        if self._process is None:
            self._process = ScoringProcess(self._settings)
        self.effective = self._process.effective(self._check)
        return self._process

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _clear_scratch(self) -> None:
        if self._scratch is None:
            return
        for path in Path(self._scratch).iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()


def _requests(samples: Sequence[tuple[Prompt, str]]) -> list[bytes]:
    """A line a sample; the prompt only where it is another than the one before."""
    lines, before = [], None
    for prompt, response in samples:
        about = None
        if prompt is not before:
            about = {"uid": prompt.uid, "text": prompt.text, "answer": prompt.answer, "meta": prompt.meta}
        lines.append(json.dumps([about, response]).encode() + b"\n")
        before = prompt
    return lines


def _make_scratch() -> str | None:
    """A folder that a verifier may write to; None where there is no place for one, as on a read-only file system."""
    try:
        return tempfile.mkdtemp(prefix="moerl-scoring-")
    except OSError:
        return None


def _memory_bytes(reward: RewardConfig) -> int:
    """The configured limit, or most of what the container has: else the kernel would kill the whole step."""
    wanted = reward.memory_mib << 20
    try:
        limit = _CGROUP_MEMORY.read_text().strip()
    except OSError:
        return wanted
    return min(wanted, int(int(limit) * _SHARE_OF_MEMORY)) if limit.isdecimal() else wanted
