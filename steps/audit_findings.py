"""What an audit found, and the sums that it recomputed."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """A check that failed: on which row or object, and what is wrong with it."""

    check: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.message}"


@dataclass(kw_only=True, slots=True)
class IterationSums:
    """What came of an iteration's prompts (numbers of prompts unless they say otherwise)."""

    iteration: int
    drawn: int = 0
    sampled: int = 0
    """All samples of the group are there."""
    scored: int = 0
    """All samples of the group have a reward, or a reason why not."""
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """By the kind of the reason."""
    open: int = 0
    """Neither trained nor dropped yet."""
    samples: int = 0
    tokens: int = 0
    """Response tokens of all samples."""
    rewards: Counter[str] = field(default_factory=Counter)
    """Samples by the status of their reward."""
    duplicate_samples: int = 0
    """Sampled a second time by another worker, and not stored."""
    lost_leases: int = 0
    """Leases that ended without completing their unit."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"dropped": dict(self.dropped), "rewards": dict(self.rewards)}


class Findings:
    """Collects what fails, and counts what was looked at: a check that saw nothing has proved nothing."""

    def __init__(self) -> None:
        self.failed: list[Finding] = []
        self.looked_at: Counter[str] = Counter()

    def require(self, holds: bool, check: str, where: str, message: str) -> bool:
        """Note that `check` looked at `where`, and what is wrong unless it `holds`; returns `holds`."""
        self.looked_at[check] += 1
        if not holds:
            self.failed.append(Finding(check, where, message))
        return holds

    def equal(self, check: str, where: str, what: str, found: object, expected: object) -> bool:
        """`require` that two values are equal."""
        holds = found == expected
        message = "" if holds else f"{what} is {_short(found)}, expected {_short(expected)}"
        return self.require(holds, check, where, message)

    def add(self, others: "Findings") -> None:
        """Take over what another collection holds."""
        self.failed += others.failed
        self.looked_at += others.looked_at


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
