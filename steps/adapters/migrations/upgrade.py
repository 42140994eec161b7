"""Runs Alembic inside a transaction that the caller holds, without an alembic.ini."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection


def upgrade_to_head(connection: Connection) -> None:
    """Apply every missing migration; the caller commits."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
