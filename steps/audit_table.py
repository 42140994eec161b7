"""An audit as text: a table of the sums, then one line for each failed check."""

from collections import Counter
from collections.abc import Callable, Sequence

from steps.audit_findings import Findings, IterationSums

COLUMNS: tuple[tuple[str, Callable[[IterationSums], int]], ...] = (
    ("drawn", lambda sums: sums.drawn),
    ("sampled", lambda sums: sums.sampled),
    ("scored", lambda sums: sums.scored),
    ("trained", lambda sums: sums.trained),
    ("dropped", lambda sums: sums.dropped.total()),
    ("open", lambda sums: sums.open),
    ("samples", lambda sums: sums.samples),
    ("tokens", lambda sums: sums.tokens),
    ("no reward", lambda sums: sums.rewards["timeout"] + sums.rewards["error"]),
    ("duplicated", lambda sums: sums.duplicate_samples),
    ("lost leases", lambda sums: sums.lost_leases),
)


def audit_lines(run_id: str, sums: Sequence[IterationSums], findings: Findings) -> list[str]:
    """The table, what was dropped and why, the failed checks, the verdict."""
    rows = [("iteration", *(name for name, _ in COLUMNS))]
    rows += [(str(one.iteration), *(f"{value(one):,}" for _, value in COLUMNS)) for one in sums]
    rows.append(("all", *(f"{sum(value(one) for one in sums):,}" for _, value in COLUMNS)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    dropped: Counter[str] = sum((one.dropped for one in sums), Counter())
    lines += [f"dropped: {number:,} {reason}" for reason, number in sorted(dropped.items())]
    lines += [f"failed  {finding}" for finding in findings.failed]
    facts, checks = findings.looked_at.total(), len(findings.looked_at)
    verdict = f"{len(findings.failed):,} of {facts:,} facts are wrong" if findings.failed else f"clean: {facts:,} facts"
    return [*lines, f"{run_id}: {verdict}, {checks} checks"]
