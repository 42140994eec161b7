"""Commands for a person to paste: they work wherever this program was started from, and whatever a path holds."""

import os
import shlex
import sys
from pathlib import Path


def moerl_command(*arguments: str) -> str:
    """`moerl ARGUMENTS` as it can be typed in the current directory."""
    return shlex.join([*_program("moerl", "workflows"), *arguments])


def mlflow_command(*arguments: str) -> str:
    """`mlflow ARGUMENTS`, likewise."""
    return shlex.join([*_program("mlflow", "mlflow"), *arguments])


def shown_path(path: Path) -> str:
    """Relative to the current directory where that is shorter; never mistaken for an option."""
    absolute = os.path.abspath(path)
    relative = os.path.relpath(absolute)
    if relative.startswith("-"):
        relative = os.path.join(os.curdir, relative)
    return min(relative, absolute, key=len)


def _program(script: str, module: str) -> list[str]:
    """The console script of our environment, which need not be on PATH; without one, our interpreter and a module."""
    beside = Path(sys.executable).parent / script
    if not beside.is_file():
        return [sys.executable, "-m", module]
    shown = shown_path(beside)
    return [shown if os.sep in shown else os.path.join(os.curdir, shown)]
