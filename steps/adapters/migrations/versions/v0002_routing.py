"""Experts that a sample's tokens were sent to: inline, or in the store."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("samples", sa.Column("routing", sa.LargeBinary(), nullable=True))
    op.add_column("samples", sa.Column("routing_uri", sa.Text(), nullable=True))
