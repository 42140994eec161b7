"""Programs as forks of the test process, which has loaded what they need: each costs milliseconds, not an import."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess


@dataclass(frozen=True)
class Program:
    """A running program."""

    process: BaseProcess
    output_fd: int

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def finish(self) -> tuple[int, str]:
        """Exit code (negative: the signal that killed it) and output, which ends when no process has it open."""
        with os.fdopen(self.output_fd) as stream:
            output = stream.read()
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        return code, output


def start(main: Callable[[], int | None], environment: Mapping[str, str] | None = None) -> Program:
    """Run `main` in a fork, with these variables besides; its exit code is what `main` returns or exits with."""
    reading, writing = os.pipe()

    def run() -> None:
        os.close(reading)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(writing)
        # pytest's own streams write to its files.
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.environ.update(environment or {})
        raise SystemExit(main())

    process = get_context("fork").Process(target=run)
    process.start()
    os.close(writing)
    return Program(process, reading)
