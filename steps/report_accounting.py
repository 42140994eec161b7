"""The part of the report page that says what came of every prompt, and what was worked for nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from steps.report_parts import count_text, section, table

COLUMNS = {
    "drawn": "prompts drawn",
    "sampled": "sampled",
    "trained": "trained",
    "dropped": "dropped",
    "open": "open",
    "samples": "samples",
    "scored": "scored",
    "duplicate_samples": "duplicated",
    "wasted_tokens": "tokens wasted",
    "lost_leases": "leases lost",
}
HINT = (
    "Every prompt drawn is trained on once, dropped with a reason (see the notes), or open while its iteration runs. "
    "Duplicated samples were thrown away; tokens that a killed worker had not committed are not counted. "
    "moerl audit recomputes all this from the samples."
)


def accounting_section(iterations: Sequence[Mapping[str, Any]]) -> str:
    """A table by iteration, and their sum; `iterations` are rows of the report."""
    accounts = [(str(row["iteration"]), row["accounting"]) for row in iterations]
    total = {name: sum(account[name] for _, account in accounts) for name in COLUMNS}
    rows = [[name, *(count_text(account[key]) for key in COLUMNS)] for name, account in [*accounts, ("all", total)]]
    return section("Accounting", HINT, table(("iteration", *COLUMNS.values()), rows))
