"""Runs revisions on the connection and inside the transaction of whoever opened the database."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=context.config.attributes["metadata"],
    version_table=context.config.attributes["version_table"],
    render_as_batch=True,
)
context.run_migrations()
