"""Command lines of the steps. A wrong call exits with 64 and one line, as Argo's retry rules expect."""

import argparse
from typing import NoReturn

from steps.errors import UsageError


class StepParser(argparse.ArgumentParser):
    """argparse with our exit code and a single line instead of the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(UsageError.exit_code, f"{self.prog}: {message}; see --help\n")


def step_parser(step: str, description: str | None, *, iteration: bool = True, worker: bool = False) -> StepParser:
    """A parser with the options that all steps share; `description` is the step module's docstring."""
    example = f"python -m steps.{step} --run reverse-digits-1"
    parser = StepParser(
        prog=f"steps.{step}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"example:\n  {example}{' --iteration 1' if iteration else ''}{' --worker 0' if worker else ''}",
        allow_abbrev=False,
    )
    parser.add_argument("--run", required=True, help="run id, for example reverse-digits-1")
    if iteration:
        parser.add_argument("--iteration", required=True, type=positive_int, help="policy iteration, counted from 1")
    if worker:
        parser.add_argument("--worker", required=True, type=natural_int, help="number of this worker in its fan-out")
    return parser


def positive_int(text: str) -> int:
    """1, 2, ...; leading zeros are allowed (Argo's sequences pad)."""
    value = natural_int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return value


def natural_int(text: str) -> int:
    """0, 1, 2, ..."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)
