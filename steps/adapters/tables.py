"""The database's tables. `migrations/` creates them; a test holds the two together.

Times are UTC seconds since the epoch by the database's clock. Token ids, log-probabilities and versions are
little-endian int32/float32 blobs (`buffer.py` says which). JSON is text, so that both databases behave alike.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)

SCHEMA_REVISION = "0005"
"""Alembic's newest revision, known without importing alembic."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

RowId = BigInteger().with_variant(Integer, "sqlite")
"""SQLite numbers rows by itself only for a column of type INTEGER."""


class FreeText(TypeDecorator[str]):
    """Text of any origin: what PostgreSQL can't hold (NUL, lone surrogates) becomes U+FFFD on both databases.

    A response's token ids are its record; its text is for verifiers and people.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        if not isinstance(value, str) or (value.isascii() and "\0" not in value):
            return value
        return value.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


runs = Table(
    "runs",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("config_hash", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("config_json", FreeText, nullable=False),
)

iterations = Table(
    "iterations",
    metadata,
    Column("run_id", Text, ForeignKey("runs.run_id"), primary_key=True),
    Column("iteration", Integer, primary_key=True),
    Column("policy_version", Integer, nullable=False),
    Column("cursor_start", BigInteger, nullable=False),
    Column("cursor_end", BigInteger, nullable=False),
    Column("num_prompts", Integer, nullable=False),
    Column("num_units", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    CheckConstraint("cursor_end >= cursor_start", name="cursor"),
)

work_units = Table(
    "work_units",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("iteration", Integer, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("unit", Integer, primary_key=True, autoincrement=False),
    Column("state", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("token", Text),
    Column("expires_at", Double),
    Column("worker", Text),
    Column("leased_at", Double),
    Column("completed_at", Double),
    Column("prompt_uids_json", Text, nullable=False),
    Column("backup_token", Text),
    Column("backup_expires_at", Double),
    ForeignKeyConstraint(["run_id", "iteration"], ["iterations.run_id", "iterations.iteration"]),
    CheckConstraint("kind IN ('rollout', 'reward')", name="kind"),
    CheckConstraint("state IN ('pending', 'leased', 'done')", name="state"),
    CheckConstraint("state <> 'leased' OR (token IS NOT NULL AND expires_at IS NOT NULL)", name="lease"),
)

# The history of leases, one row each: open until `ended_at`. Who may complete a unit is said by `work_units` alone.
unit_leases = Table(
    "unit_leases",
    metadata,
    Column("token", Text, primary_key=True),
    Column("run_id", Text, nullable=False),
    Column("iteration", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("unit", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("worker", Integer, nullable=False),
    Column("pod", Text, nullable=False),
    Column("step_attempt_id", BigInteger, nullable=False),
    Column("is_backup", Boolean(create_constraint=False), nullable=False),
    Column("leased_at", Double, nullable=False),
    Column("last_seen_at", Double, nullable=False),
    Column("first_commit_at", Double),
    Column("last_commit_at", Double),
    Column("ended_at", Double),
    Column("outcome", Text),
    Column("samples", BigInteger, nullable=False, server_default="0"),
    Column("tokens", BigInteger, nullable=False, server_default="0"),
    Column("duplicate_samples", BigInteger, nullable=False, server_default="0"),
    Column("duplicate_tokens", BigInteger, nullable=False, server_default="0"),
    Column("abandoned_tokens", BigInteger, nullable=False, server_default="0"),
    ForeignKeyConstraint(
        ["run_id", "iteration", "kind", "unit"],
        ["work_units.run_id", "work_units.iteration", "work_units.kind", "work_units.unit"],
    ),
    CheckConstraint("outcome IN ('done', 'returned', 'expired', 'lost')", name="outcome"),
    CheckConstraint("(ended_at IS NULL) = (outcome IS NULL)", name="ended"),
    Index(None, "run_id", "iteration", "kind", "unit"),
)

batches = Table(
    "batches",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("iteration", Integer, primary_key=True),
    Column("policy_version", Integer, nullable=False),
    Column("num_groups", Integer, nullable=False),
    Column("num_samples", Integer, nullable=False),
    Column("num_tokens", BigInteger, nullable=False),
    Column("num_dropped", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("uri", Text),
    Column("manifest_sha256", Text),
    ForeignKeyConstraint(["run_id", "iteration"], ["iterations.run_id", "iterations.iteration"]),
    CheckConstraint("(uri IS NULL) = (manifest_sha256 IS NULL)", name="finished"),
)

prompt_draws = Table(
    "prompt_draws",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("iteration", Integer, primary_key=True),
    Column("prompt_uid", Text, primary_key=True),
    Column("position", BigInteger, nullable=False),
    Column("unit", Integer, nullable=False),
    Column("status", Text, nullable=False),
    Column("drop_reason", FreeText),
    Column("consumed_by", Integer),
    Column("prompt_ids", LargeBinary),
    Column("lease_token", Text),
    ForeignKeyConstraint(["run_id", "iteration"], ["iterations.run_id", "iterations.iteration"]),
    ForeignKeyConstraint(
        ["run_id", "consumed_by"], ["batches.run_id", "batches.iteration"], name="fk_prompt_draws_batches"
    ),
    CheckConstraint("status IN ('drawn', 'consumed', 'dropped')", name="status"),
    CheckConstraint("(status = 'consumed') = (consumed_by IS NOT NULL)", name="consumed"),
    CheckConstraint("(status = 'dropped') = (drop_reason IS NOT NULL)", name="dropped"),
    Index(None, "run_id", "status"),
    Index(None, "run_id", "consumed_by"),
)

# The prompt's tokens are the group's, so they are stored once, in prompt_draws.
# Small columns first: SQLite then answers questions about versions and lengths without reading the blobs' pages.
samples = Table(
    "samples",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("iteration", Integer, primary_key=True),
    Column("prompt_uid", Text, primary_key=True),
    Column("sample_index", Integer, primary_key=True, autoincrement=False),
    Column("unit", Integer, nullable=False),
    Column("worker", Text, nullable=False),
    Column("min_version", Integer, nullable=False),
    Column("num_tokens", Integer, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("temperature", Double, nullable=False),
    Column("top_p", Double, nullable=False),
    Column("finish_reason", Text, nullable=False),
    Column("response_text", FreeText, nullable=False),
    Column("versions", LargeBinary, nullable=False),
    Column("response_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("routing", LargeBinary),
    Column("routing_uri", Text),
    Column("mask", LargeBinary),
    ForeignKeyConstraint(
        ["run_id", "iteration", "prompt_uid"],
        ["prompt_draws.run_id", "prompt_draws.iteration", "prompt_draws.prompt_uid"],
    ),
    CheckConstraint("finish_reason IN ('stop', 'length')", name="finish_reason"),
    CheckConstraint("num_tokens > 0", name="num_tokens"),
)

# Beside the samples, not in them: scoring must not rewrite every payload.
rewards = Table(
    "rewards",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("iteration", Integer, primary_key=True),
    Column("prompt_uid", Text, primary_key=True),
    Column("sample_index", Integer, primary_key=True, autoincrement=False),
    Column("status", Text, nullable=False),
    Column("value", Double),
    Column("detail", FreeText, nullable=False),
    Column("worker", Text, nullable=False),
    ForeignKeyConstraint(
        ["run_id", "iteration", "prompt_uid", "sample_index"],
        ["samples.run_id", "samples.iteration", "samples.prompt_uid", "samples.sample_index"],
    ),
    CheckConstraint("status IN ('ok', 'timeout', 'error')", name="status"),
    CheckConstraint("(status = 'ok') = (value IS NOT NULL)", name="value"),
)

publications = Table(
    "publications",
    metadata,
    Column("run_id", Text, ForeignKey("runs.run_id"), primary_key=True),
    Column("policy_version", Integer, primary_key=True, autoincrement=False),
    Column("parent_version", Integer),
    Column("uri", Text, nullable=False),
    Column("manifest_sha256", Text, nullable=False),
    Column("weights_sha256", Text, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    CheckConstraint("parent_version < policy_version", name="parent"),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("policy_version", Integer, primary_key=True, autoincrement=False),
    Column("reward_eval", Double, nullable=False),
    Column("num_prompts", Integer, nullable=False),
    Column("validated", Boolean(create_constraint=False), nullable=False),
    Column("reason", FreeText, nullable=False),
    Column("created_at", Double, nullable=False),
    ForeignKeyConstraint(["run_id", "policy_version"], ["publications.run_id", "publications.policy_version"]),
)

# No reference to `runs`: the attempt of init_run begins before the run exists.
step_attempts = Table(
    "step_attempts",
    metadata,
    Column("attempt_id", RowId, primary_key=True),
    Column("run_id", Text, nullable=False),
    Column("iteration", Integer),
    Column("step", Text, nullable=False),
    Column("worker", Text),
    Column("pod", Text, nullable=False),
    Column("node", Text, nullable=False),
    Column("capacity_type", Text, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("exit_code", Integer),
    Column("detail", FreeText, nullable=False),
    Column("provenance_json", FreeText, nullable=False),
    Column("metrics_json", FreeText, nullable=False),
    Column("transport_json", FreeText, nullable=False, server_default="{}"),
    Column("token", Text),
    CheckConstraint("(ended_at IS NULL) = (exit_code IS NULL)", name="ended"),
    Index(None, "run_id", "iteration"),
    Index(None, "token", unique=True),
)

interruptions = Table(
    "interruptions",
    metadata,
    Column("interruption_id", RowId, primary_key=True),
    Column("attempt_id", RowId, ForeignKey("step_attempts.attempt_id"), nullable=False),
    Column("reason", Text, nullable=False),
    Column("detail", FreeText, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("kind", Text, nullable=False, server_default="stop"),
    Column("deadline_at", Double),
    UniqueConstraint("attempt_id", "reason"),
)

iteration_metrics = Table(
    "iteration_metrics",
    metadata,
    Column("run_id", Text, ForeignKey("runs.run_id"), primary_key=True),
    Column("iteration", Integer, primary_key=True, autoincrement=False),
    Column("phase", Text, primary_key=True),
    Column("metrics_json", FreeText, nullable=False),
)
