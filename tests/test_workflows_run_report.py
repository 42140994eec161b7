"""The tables that a person sees at the end of a run."""

from typing import Any

import pytest
from rich.console import Console

from workflows.run_report import PHASES, run_tables


def row(version: int, seconds: float | None) -> dict[str, Any]:
    """Phases of `seconds`, 2 * `seconds`, ...; an initial row has none."""
    return {
        "policy_version": version,
        "reward_mean": None if seconds is None else 0.5,
        "reward_eval": 0.25,
        "validated": version % 2 == 0,
        "rollout_tokens_per_s": None if seconds is None else 123_456.0,
        "expert_max_violation": 1.5,
        "wall_seconds": 12_345.0,
        "phase_seconds": {} if seconds is None else {phase: seconds * (n + 1) for n, phase in enumerate(PHASES)},
    }


def lines_of(width: int) -> list[str]:
    console = Console(width=width, record=True, force_terminal=False)
    report = {"run_id": "demo", "initial": row(0, None), "iterations": [row(1, 0.125), row(999, 125.0)]}
    with console.capture() as capture:
        for table in run_tables(report, width):
            console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_every_phase_has_its_seconds_in_a_column_and_nothing_is_cut(width: int) -> None:
    lines = lines_of(width)
    words = {word for line in lines for word in line.split()}
    assert {"plan", "rollout", "reward", "flush", "train", "publish", "eval", "report", "total"} <= words
    assert {"0.12", "1.00", "125", "1000", "12345", "123,456", "yes", "no"} <= words
    assert all(len(line) <= width for line in lines) and not any("…" in line for line in lines)


def test_one_table_where_it_fits_and_two_where_it_does_not() -> None:
    assert len(lines_of(100)) == len(lines_of(160)) == 1 + 2 + 3
    assert len(lines_of(80)) == 1 + 2 * (2 + 3)
