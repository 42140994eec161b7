"""The history of leases, a second lease on a slow unit, which lease a group came by, kinds of interruptions."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    _create_unit_leases()
    op.add_column("work_units", sa.Column("backup_token", sa.Text()))
    op.add_column("work_units", sa.Column("backup_expires_at", sa.Double()))
    op.add_column("prompt_draws", sa.Column("lease_token", sa.Text()))
    op.add_column("step_attempts", sa.Column("token", sa.Text()))
    op.create_index(op.f("ix_step_attempts_token"), "step_attempts", ["token"], unique=True)
    op.add_column("interruptions", sa.Column("kind", sa.Text(), nullable=False, server_default="stop"))
    op.add_column("interruptions", sa.Column("deadline_at", sa.Double()))


def _create_unit_leases() -> None:
    counts = ("samples", "tokens", "duplicate_samples", "duplicate_tokens", "abandoned_tokens")
    op.create_table(
        "unit_leases",
        sa.Column("token", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("iteration", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("unit", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker", sa.Integer(), nullable=False),
        sa.Column("pod", sa.Text(), nullable=False),
        sa.Column("step_attempt_id", sa.BigInteger(), nullable=False),
        sa.Column("is_backup", sa.Boolean(create_constraint=False), nullable=False),
        sa.Column("leased_at", sa.Double(), nullable=False),
        sa.Column("last_seen_at", sa.Double(), nullable=False),
        sa.Column("first_commit_at", sa.Double()),
        sa.Column("last_commit_at", sa.Double()),
        sa.Column("ended_at", sa.Double()),
        sa.Column("outcome", sa.Text()),
        *(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0") for name in counts),
        sa.CheckConstraint("(ended_at IS NULL) = (outcome IS NULL)", name=op.f("ck_unit_leases_ended")),
        sa.CheckConstraint("outcome IN ('done', 'returned', 'expired', 'lost')", name=op.f("ck_unit_leases_outcome")),
        sa.ForeignKeyConstraint(
            ["run_id", "iteration", "kind", "unit"],
            ["work_units.run_id", "work_units.iteration", "work_units.kind", "work_units.unit"],
            name=op.f("fk_unit_leases_work_units"),
        ),
        sa.PrimaryKeyConstraint("token", name=op.f("pk_unit_leases")),
    )
    op.create_index(
        op.f("ix_unit_leases_run_id_iteration_kind_unit"), "unit_leases", ["run_id", "iteration", "kind", "unit"]
    )
