"""Which tokens of a sample the policy has sampled, where a tool or an environment gave others."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("samples", sa.Column("mask", sa.LargeBinary()))
