"""What came of the prompts of each iteration, and what was worked for nothing: sums for the report.

Read from the prompts' and the leases' rows alone, a few hundred an iteration; an audit uses the samples.
"""

from dataclasses import dataclass

from sqlalchemy import Select, case, func, select

from steps.adapters.database import Database
from steps.adapters.tables import prompt_draws, unit_leases


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationAccount:
    """Sums of one iteration."""

    drawn: int
    """Prompts; so are the next four."""
    sampled: int
    trained: int
    dropped: int
    open: int
    """Neither trained nor dropped so far."""
    samples: int
    """Stored; so are their response tokens."""
    tokens: int
    scored: int
    """Samples that have a reward or the reason why not."""
    duplicate_samples: int
    """Sampled by two workers; the second copy was thrown away."""
    wasted_tokens: int
    """Response tokens of such copies, and those that a drained worker gave up. A killed worker's are not known."""
    lost_leases: int
    """Leases that ended without completing their unit."""


def list_accounts(db: Database, run_id: str) -> dict[int, IterationAccount]:
    """By iteration."""
    with db.read() as connection:
        of_prompts = connection.execute(_prompts(run_id)).mappings().all()
        of_leases = {row["iteration"]: dict(row) for row in connection.execute(_leases(run_id)).mappings()}
    accounts = {}
    for row in of_prompts:
        sums = {name: int(value) for name, value in (dict(row) | of_leases.get(row["iteration"], _NO_LEASES)).items()}
        iteration = sums.pop("iteration")
        accounts[iteration] = IterationAccount(**sums)
    return accounts


_LEASE_SUMS = ("samples", "tokens", "scored", "duplicate_samples", "wasted_tokens", "lost_leases")
_NO_LEASES = dict.fromkeys(_LEASE_SUMS, 0)


def _prompts(run_id: str) -> Select[tuple[int, ...]]:
    columns = prompt_draws.c
    return (
        select(
            columns.iteration,
            func.count().label("drawn"),
            func.count(columns.lease_token).label("sampled"),
            *(
                func.sum(case((columns.status == status, 1), else_=0)).label(name)
                for status, name in (("consumed", "trained"), ("dropped", "dropped"), ("drawn", "open"))
            ),
        )
        .where(columns.run_id == run_id)
        .group_by(columns.iteration)
    )


def _leases(run_id: str) -> Select[tuple[int, ...]]:
    columns = unit_leases.c
    is_rollout = columns.kind == "rollout"
    return (
        select(
            columns.iteration,
            func.sum(case((is_rollout, columns.samples), else_=0)).label("samples"),
            func.sum(case((is_rollout, columns.tokens), else_=0)).label("tokens"),
            func.sum(case((is_rollout, 0), else_=columns.samples)).label("scored"),
            func.sum(columns.duplicate_samples).label("duplicate_samples"),
            func.sum(columns.duplicate_tokens + columns.abandoned_tokens).label("wasted_tokens"),
            func.sum(case((columns.outcome.in_(("returned", "expired", "lost")), 1), else_=0)).label("lost_leases"),
        )
        .where(columns.run_id == run_id)
        .group_by(columns.iteration)
    )
