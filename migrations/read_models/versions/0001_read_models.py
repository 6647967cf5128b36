"""Contexts, calls, directives, pins, and how far they tell."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "kv_read_models",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("log_id", sa.Text, nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("stale", sa.Text, nullable=False),
        sa.Column("rebuild", sa.Boolean, nullable=False),
    )
    op.create_table(
        "kv_contexts",
        sa.Column("uid", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("context_id", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("salt", sa.Text, nullable=False),
        sa.Column("agent", sa.Text, nullable=False),
        sa.Column("flow", sa.Text, nullable=False),
        sa.Column("parent_uid", sa.Text, nullable=False),
        sa.Column("forked", sa.Boolean, nullable=False),
        sa.Column("one_off", sa.Boolean, nullable=False),
        sa.Column("rung", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("messages", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger),
        sa.Column("unmapped", sa.Text, nullable=False),
        sa.Column("unverified", sa.Text, nullable=False),
        sa.Column("gap", sa.Text, nullable=False),
        sa.Column("wait", sa.Text, nullable=False),
        sa.Column("wait_tool", sa.Text, nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("closed_at", sa.DateTime(timezone=True)),
        sa.Column("close_reason", sa.Text, nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
    )
    op.create_index("kv_contexts_by_name", "kv_contexts", ["tenant", "context_id"])
    op.create_index("kv_contexts_by_time", "kv_contexts", ["last_at"])
    op.create_table(
        "kv_calls",
        sa.Column("uid", sa.Text, primary_key=True),
        sa.Column("call_id", sa.Text, primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True),
        sa.Column("streamed", sa.Boolean, nullable=False),
        sa.Column("choices", sa.BigInteger, nullable=False),
        sa.Column("messages", sa.BigInteger, nullable=False),
        sa.Column("arrived_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("first_token_at", sa.DateTime(timezone=True)),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("finish_reason", sa.Text, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger),
        sa.Column("cached_tokens", sa.BigInteger),
        sa.Column("output_tokens", sa.BigInteger),
        sa.Column("mapping", sa.Text, nullable=False),
        sa.Column("mapping_reason", sa.Text, nullable=False),
        sa.Column("mapped_tokens", sa.BigInteger),
        sa.Column("position", sa.BigInteger, nullable=False),
    )
    op.create_index("kv_calls_by_time", "kv_calls", ["arrived_at"])
    op.create_table(
        "kv_directives",
        sa.Column("directive_id", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("salt", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("chunks", sa.BigInteger, nullable=False),
        sa.Column("as_of", sa.BigInteger, nullable=False),
        sa.Column("proposed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("outcome_reason", sa.Text, nullable=False),
        sa.Column("sent", sa.Boolean),
        sa.Column("applied", sa.BigInteger, nullable=False),
        sa.Column("skipped", sa.BigInteger, nullable=False),
        sa.Column("settled_at", sa.DateTime(timezone=True)),
        sa.Column("position", sa.BigInteger, nullable=False),
    )
    op.create_index("kv_directives_by_time", "kv_directives", ["proposed_at"])
    op.create_table(
        "kv_pins",
        sa.Column("pin_id", sa.Text, primary_key=True),
        sa.Column("uid", sa.Text, nullable=False),
        sa.Column("message", sa.BigInteger, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("priority", sa.BigInteger),
        sa.Column("leased_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("until_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("released_at", sa.DateTime(timezone=True)),
        sa.Column("release_reason", sa.Text, nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
    )
    op.create_index("kv_pins_by_context", "kv_pins", ["uid"])


def downgrade() -> None:
    """Drop them: `kvtether rebuild` fills them again."""
    op.drop_table("kv_pins")
    op.drop_table("kv_directives")
    op.drop_table("kv_calls")
    op.drop_table("kv_contexts")
    op.drop_table("kv_read_models")
