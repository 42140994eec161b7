"""The ledger in one place: runs and iterations, publications and verdicts, attempts and interruptions.

Every function takes the database first, is one transaction, and may be repeated without harm.
"""

from steps.adapters.attempts import (
    AttemptRow,
    InterruptionRow,
    begin_attempt,
    end_attempt,
    list_attempts,
    list_interruptions,
    record_interruption,
)
from steps.adapters.lease_history import UnitLeaseRow, list_unit_leases
from steps.adapters.publications_ledger import (
    find_publication,
    get_publication,
    last_validated,
    list_evaluations,
    list_publications,
    record_evaluation,
    record_publication,
)
from steps.adapters.runs import (
    IterationRow,
    PromptDraw,
    RunRow,
    create_run,
    get_iteration,
    get_iteration_metrics,
    get_run,
    last_cursor,
    list_draws,
    list_iterations,
    list_runs,
    plan_iteration,
    set_iteration_metrics,
)

__all__ = [
    "AttemptRow",
    "InterruptionRow",
    "IterationRow",
    "PromptDraw",
    "RunRow",
    "UnitLeaseRow",
    "begin_attempt",
    "create_run",
    "end_attempt",
    "find_publication",
    "get_iteration",
    "get_iteration_metrics",
    "get_publication",
    "get_run",
    "last_cursor",
    "last_validated",
    "list_attempts",
    "list_draws",
    "list_evaluations",
    "list_interruptions",
    "list_iterations",
    "list_publications",
    "list_runs",
    "list_unit_leases",
    "plan_iteration",
    "record_evaluation",
    "record_interruption",
    "record_publication",
    "set_iteration_metrics",
]
