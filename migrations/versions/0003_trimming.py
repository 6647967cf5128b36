"""Where a trimmed log begins, and the snapshots that stand for what was trimmed."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables; a log that was never trimmed has no row in them."""
    op.create_table(
        "log_start",
        sa.Column("trimmed_through", sa.Integer, primary_key=True, autoincrement=False),
    )
    op.create_table(
        "trimmed_streams",
        sa.Column("stream", sa.Text, primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
    )
    op.create_table(
        "snapshots",
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("manifest", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "snapshot_parts",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    """Drop them. Only for a log that was never trimmed: an older version cannot read any other."""
    op.drop_table("snapshot_parts")
    op.drop_table("snapshots")
    op.drop_table("trimmed_streams")
    op.drop_table("log_start")
