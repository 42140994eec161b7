"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _create_runs()
    _create_work_units()
    _create_policies()
    _create_experience()
    _create_rewards()
    _create_attempts()


def _create_runs() -> None:
    op.create_table(
        "runs",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("config_hash", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("config_json", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_runs")),
    )
    op.create_table(
        "iterations",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("iteration", sa.Integer(), nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("cursor_start", sa.BigInteger(), nullable=False),
        sa.Column("cursor_end", sa.BigInteger(), nullable=False),
        sa.Column("num_prompts", sa.Integer(), nullable=False),
        sa.Column("num_units", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.CheckConstraint("cursor_end >= cursor_start", name=op.f("ck_iterations_cursor")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_iterations_runs")),
        sa.PrimaryKeyConstraint("run_id", "iteration", name=op.f("pk_iterations")),
    )
    op.create_table(
        "iteration_metrics",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("iteration", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("metrics_json", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_iteration_metrics_runs")),
        sa.PrimaryKeyConstraint("run_id", "iteration", "phase", name=op.f("pk_iteration_metrics")),
    )


def _create_work_units() -> None:
    op.create_table(
        "work_units",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("iteration", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("unit", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("token", sa.Text(), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("leased_at", sa.Double(), nullable=True),
        sa.Column("completed_at", sa.Double(), nullable=True),
        sa.Column("prompt_uids_json", sa.Text(), nullable=False),
        sa.CheckConstraint("kind IN ('rollout', 'reward')", name=op.f("ck_work_units_kind")),
        sa.CheckConstraint(
            "state <> 'leased' OR (token IS NOT NULL AND expires_at IS NOT NULL)", name=op.f("ck_work_units_lease")
        ),
        sa.CheckConstraint("state IN ('pending', 'leased', 'done')", name=op.f("ck_work_units_state")),
        sa.ForeignKeyConstraint(
            ["run_id", "iteration"],
            ["iterations.run_id", "iterations.iteration"],
            name=op.f("fk_work_units_iterations"),
        ),
        sa.PrimaryKeyConstraint("run_id", "iteration", "kind", "unit", name=op.f("pk_work_units")),
    )


def _create_policies() -> None:
    op.create_table(
        "publications",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent_version", sa.Integer(), nullable=True),
        sa.Column("uri", sa.Text(), nullable=False),
        sa.Column("manifest_sha256", sa.Text(), nullable=False),
        sa.Column("weights_sha256", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.CheckConstraint("parent_version < policy_version", name=op.f("ck_publications_parent")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_publications_runs")),
        sa.PrimaryKeyConstraint("run_id", "policy_version", name=op.f("pk_publications")),
    )
    op.create_table(
        "evaluations",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("reward_eval", sa.Double(), nullable=False),
        sa.Column("num_prompts", sa.Integer(), nullable=False),
        sa.Column("validated", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "policy_version"],
            ["publications.run_id", "publications.policy_version"],
            name=op.f("fk_evaluations_publications"),
        ),
        sa.PrimaryKeyConstraint("run_id", "policy_version", name=op.f("pk_evaluations")),
    )
    op.create_table(
        "batches",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("iteration", sa.Integer(), nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("num_groups", sa.Integer(), nullable=False),
        sa.Column("num_samples", sa.Integer(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_dropped", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("uri", sa.Text(), nullable=True),
        sa.Column("manifest_sha256", sa.Text(), nullable=True),
        sa.CheckConstraint("(uri IS NULL) = (manifest_sha256 IS NULL)", name=op.f("ck_batches_finished")),
        sa.ForeignKeyConstraint(
            ["run_id", "iteration"], ["iterations.run_id", "iterations.iteration"], name=op.f("fk_batches_iterations")
        ),
        sa.PrimaryKeyConstraint("run_id", "iteration", name=op.f("pk_batches")),
    )


def _create_experience() -> None:
    op.create_table(
        "prompt_draws",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("iteration", sa.Integer(), nullable=False),
        sa.Column("prompt_uid", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("unit", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("drop_reason", sa.Text(), nullable=True),
        sa.Column("consumed_by", sa.Integer(), nullable=True),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=True),
        sa.CheckConstraint("(status = 'consumed') = (consumed_by IS NOT NULL)", name=op.f("ck_prompt_draws_consumed")),
        sa.CheckConstraint("(status = 'dropped') = (drop_reason IS NOT NULL)", name=op.f("ck_prompt_draws_dropped")),
        sa.CheckConstraint("status IN ('drawn', 'consumed', 'dropped')", name=op.f("ck_prompt_draws_status")),
        sa.ForeignKeyConstraint(
            ["run_id", "consumed_by"], ["batches.run_id", "batches.iteration"], name="fk_prompt_draws_batches"
        ),
        sa.ForeignKeyConstraint(
            ["run_id", "iteration"],
            ["iterations.run_id", "iterations.iteration"],
            name=op.f("fk_prompt_draws_iterations"),
        ),
        sa.PrimaryKeyConstraint("run_id", "iteration", "prompt_uid", name=op.f("pk_prompt_draws")),
    )
    op.create_index(op.f("ix_prompt_draws_run_id_consumed_by"), "prompt_draws", ["run_id", "consumed_by"])
    op.create_index(op.f("ix_prompt_draws_run_id_status"), "prompt_draws", ["run_id", "status"])
    op.create_table(
        "samples",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("iteration", sa.Integer(), nullable=False),
        sa.Column("prompt_uid", sa.Text(), nullable=False),
        sa.Column("sample_index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("unit", sa.Integer(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("min_version", sa.Integer(), nullable=False),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("temperature", sa.Double(), nullable=False),
        sa.Column("top_p", sa.Double(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=False),
        sa.Column("response_text", sa.Text(), nullable=False),
        sa.Column("versions", sa.LargeBinary(), nullable=False),
        sa.Column("response_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint("finish_reason IN ('stop', 'length')", name=op.f("ck_samples_finish_reason")),
        sa.CheckConstraint("num_tokens > 0", name=op.f("ck_samples_num_tokens")),
        sa.ForeignKeyConstraint(
            ["run_id", "iteration", "prompt_uid"],
            ["prompt_draws.run_id", "prompt_draws.iteration", "prompt_draws.prompt_uid"],
            name=op.f("fk_samples_prompt_draws"),
        ),
        sa.PrimaryKeyConstraint("run_id", "iteration", "prompt_uid", "sample_index", name=op.f("pk_samples")),
    )


def _create_rewards() -> None:
    op.create_table(
        "rewards",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("iteration", sa.Integer(), nullable=False),
        sa.Column("prompt_uid", sa.Text(), nullable=False),
        sa.Column("sample_index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.CheckConstraint("(status = 'ok') = (value IS NOT NULL)", name=op.f("ck_rewards_value")),
        sa.CheckConstraint("status IN ('ok', 'timeout', 'error')", name=op.f("ck_rewards_status")),
        sa.ForeignKeyConstraint(
            ["run_id", "iteration", "prompt_uid", "sample_index"],
            ["samples.run_id", "samples.iteration", "samples.prompt_uid", "samples.sample_index"],
            name=op.f("fk_rewards_samples"),
        ),
        sa.PrimaryKeyConstraint("run_id", "iteration", "prompt_uid", "sample_index", name=op.f("pk_rewards")),
    )


def _create_attempts() -> None:
    op.create_table(
        "step_attempts",
        sa.Column("attempt_id", ROW_ID, nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("iteration", sa.Integer(), nullable=True),
        sa.Column("step", sa.Text(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("pod", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("capacity_type", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("provenance_json", sa.Text(), nullable=False),
        sa.Column("metrics_json", sa.Text(), nullable=False),
        sa.CheckConstraint("(ended_at IS NULL) = (exit_code IS NULL)", name=op.f("ck_step_attempts_ended")),
        sa.PrimaryKeyConstraint("attempt_id", name=op.f("pk_step_attempts")),
    )
    op.create_index(op.f("ix_step_attempts_run_id_iteration"), "step_attempts", ["run_id", "iteration"])
    op.create_table(
        "interruptions",
        sa.Column("interruption_id", ROW_ID, nullable=False),
        sa.Column("attempt_id", ROW_ID, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["step_attempts.attempt_id"], name=op.f("fk_interruptions_step_attempts")
        ),
        sa.PrimaryKeyConstraint("interruption_id", name=op.f("pk_interruptions")),
        sa.UniqueConstraint("attempt_id", "reason", name=op.f("uq_interruptions_attempt_id_reason")),
    )
