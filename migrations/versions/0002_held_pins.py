"""Holds that a cache has for us, encrypted."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "held_pins",
        sa.Column("pin_id", sa.Text, primary_key=True),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    """Drop it: holds that are in the cache then stay there until somebody else gives them back."""
    op.drop_table("held_pins")
