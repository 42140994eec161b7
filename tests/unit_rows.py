"""The state of work units, as the tests look at it."""

from dataclasses import dataclass

from sqlalchemy import select

from steps.adapters.database import Database
from steps.adapters.tables import work_units


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRow:
    """A row of `work_units`; times are UTC seconds by the database's clock."""

    kind: str
    unit: int
    state: str
    attempts: int
    worker: str | None
    leased_at: float | None
    expires_at: float | None
    completed_at: float | None


def list_units(db: Database, run_id: str, iteration: int) -> list[UnitRow]:
    """The iteration's units: rollout first, then reward, by number."""
    columns = [work_units.c[name] for name in UnitRow.__dataclass_fields__]
    statement = select(*columns).where(work_units.c.run_id == run_id, work_units.c.iteration == iteration)
    with db.read() as connection:
        rows = connection.execute(statement.order_by(work_units.c.kind.desc(), work_units.c.unit))
        return [UnitRow(**row) for row in rows.mappings()]
