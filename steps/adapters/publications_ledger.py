"""The ledger of publications and of their held-out evaluations."""

from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, RowMapping, select

from steps.adapters.database import Database, database_clock, insert_if_absent
from steps.adapters.retries import retried
from steps.adapters.tables import evaluations, publications
from steps.errors import DataError
from steps.records import Evaluation, Publication

PUBLICATION_COLUMNS = [publications.c[name] for name in Publication.__dataclass_fields__]
EVALUATION_COLUMNS = [evaluations.c[name] for name in Evaluation.__dataclass_fields__]


@retried
def record_publication(db: Database, publication: Publication) -> Publication:
    """Record a publication; recording it again changes nothing. Returns what is recorded.

    Raises:
        DataError: the same policy version is recorded with another content.
    """
    values: dict[str, Any] = {**asdict(publication), "created_at": database_clock()}
    with db.transaction() as connection:
        insert_if_absent(connection, publications, values)
        recorded = _require_publication(connection, publication.run_id, publication.policy_version)
    if recorded.weights_sha256 != publication.weights_sha256:
        raise DataError(
            f"run {publication.run_id}, policy version {publication.policy_version}: already recorded with weights "
            f"{recorded.weights_sha256[:12]}, not {publication.weights_sha256[:12]}; a publication never changes"
        )
    return recorded


@retried
def get_publication(db: Database, run_id: str, policy_version: int) -> Publication:
    """Raises DataError when that version isn't published."""
    with db.read() as connection:
        return _require_publication(connection, run_id, policy_version)


@retried
def find_publication(db: Database, run_id: str, policy_version: int) -> Publication | None:
    """None when that version isn't published."""
    with db.read() as connection:
        return _find_publication(connection, run_id, policy_version)


@retried
def list_publications(db: Database, run_id: str) -> list[Publication]:
    """All publications of the run, by policy version."""
    statement = select(*PUBLICATION_COLUMNS).where(publications.c.run_id == run_id)
    with db.read() as connection:
        rows = connection.execute(statement.order_by(publications.c.policy_version))
        return [_publication(row) for row in rows.mappings()]


@retried
def record_evaluation(db: Database, evaluation: Evaluation) -> Evaluation:
    """Record the verdict on a published version. The first verdict stands; returns the one that is recorded.

    Raises:
        DataError: that version isn't published.
    """
    values: dict[str, Any] = {**asdict(evaluation), "created_at": database_clock()}
    with db.transaction() as connection:
        _require_publication(connection, evaluation.run_id, evaluation.policy_version)
        insert_if_absent(connection, evaluations, values)
        statement = select(*EVALUATION_COLUMNS).where(
            evaluations.c.run_id == evaluation.run_id, evaluations.c.policy_version == evaluation.policy_version
        )
        return Evaluation(**connection.execute(statement).mappings().one())


@retried
def list_evaluations(db: Database, run_id: str) -> list[Evaluation]:
    """All verdicts of the run, by policy version."""
    statement = select(*EVALUATION_COLUMNS).where(evaluations.c.run_id == run_id)
    with db.read() as connection:
        rows = connection.execute(statement.order_by(evaluations.c.policy_version))
        return [Evaluation(**row) for row in rows.mappings()]


@retried
def last_validated(db: Database, run_id: str) -> Publication | None:
    """The newest publication that passed the gate; None when none did."""
    statement = (
        select(*PUBLICATION_COLUMNS)
        .join_from(publications, evaluations)
        .where(publications.c.run_id == run_id, evaluations.c.validated)
        .order_by(publications.c.policy_version.desc())
        .limit(1)
    )
    with db.read() as connection:
        row = connection.execute(statement).mappings().one_or_none()
        return None if row is None else _publication(row)


def _find_publication(connection: Connection, run_id: str, policy_version: int) -> Publication | None:
    statement = select(*PUBLICATION_COLUMNS).where(
        publications.c.run_id == run_id, publications.c.policy_version == policy_version
    )
    row = connection.execute(statement).mappings().one_or_none()
    return None if row is None else _publication(row)


def _require_publication(connection: Connection, run_id: str, policy_version: int) -> Publication:
    found = _find_publication(connection, run_id, policy_version)
    if found is None:
        raise DataError(f"run {run_id}: policy version {policy_version} is not published; run the publish step first")
    return found


def _publication(row: RowMapping) -> Publication:
    return Publication(**row)
