"""Rollout units that take too long: an iteration may go on without them, once it has others."""

import json

from sqlalchemy import and_, exists, func, select, update

from steps.adapters.database import Database, database_clock
from steps.adapters.runs import drop_open_prompts, lock_run
from steps.adapters.tables import work_units

DROP_REASON = "not sampled before the straggler deadline"


def drop_late_units(db: Database, run_id: str, iteration: int, after_s: float) -> int:
    """End the rollout units that aren't done, and record their prompts as dropped; returns how many units.

    Only when at least one unit is done and `after_s` seconds have passed since the first of those was leased. A worker
    that still holds one of the others has lost its lease: what it would commit is refused.
    """
    of_iteration = and_(
        work_units.c.run_id == run_id, work_units.c.iteration == iteration, work_units.c.kind == "rollout"
    )
    begun = select(func.min(work_units.c.leased_at)).where(of_iteration, work_units.c.state == "done")
    late = and_(of_iteration, work_units.c.state != "done", begun.scalar_subquery() + after_s <= database_clock())
    drop = (
        update(work_units)
        .where(late)
        .values(state="done", token=None, expires_at=None, completed_at=database_clock())
        .returning(work_units.c.prompt_uids_json)
    )
    # Every idle worker asks many times a second: only one that finds something takes the run's lock.
    with db.read() as connection:
        if not connection.execute(select(exists().where(late))).scalar_one():
            return 0
    with db.transaction() as connection:
        lock_run(connection, run_id)
        dropped = [json.loads(row.prompt_uids_json) for row in connection.execute(drop)]
        reasons = {uid: DROP_REASON for uids in dropped for uid in uids}
        drop_open_prompts(connection, run_id, iteration, reasons)
    return len(dropped)
