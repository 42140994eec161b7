"""How the tokens of an attempt reached the experts: requested, observed, evidence."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("step_attempts", sa.Column("transport_json", sa.Text(), nullable=False, server_default="{}"))
