"""`moerl audit RUN`: prove from a run's database and store that no sample was lost or used twice."""

from typing import Annotated

import typer

from steps.errors import DataError
from workflows.shared_options import RUNS_DIR, Run, RunsDir, examples

audit_app = typer.Typer()


@audit_app.command(epilog=examples("moerl audit RUN", "moerl audit RUN --deep --json"))
def audit(
    run_id: Run,
    runs_dir: RunsDir = RUNS_DIR,
    deep: Annotated[bool, typer.Option("--deep", help="Also recompute the checksums of every file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Recompute every sum of a run on this machine from its database and store: exit 0 when all agrees, 65 otherwise.

    On a cluster, run `python -m steps.audit --run RUN` in a pod with the run's environment.
    """
    from steps.adapters.database import open_database
    from steps.adapters.store import open_store
    from steps.audit import audit_run, print_audit
    from workflows.run_folder import open_run

    folder = open_run(runs_dir, run_id)
    if not folder.database.is_file():
        raise DataError(f"run {folder.run_id} has not recorded anything yet: there is nothing to audit")
    result = audit_run(open_database(folder.database_url), open_store(str(folder.store)), folder.run_id, deep=deep)
    print_audit(result, as_json=as_json)
    if not result.clean:
        raise typer.Exit(DataError.exit_code)
