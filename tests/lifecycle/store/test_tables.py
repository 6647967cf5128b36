"""The tables in the code are the tables that the revisions build."""

import sqlite3
from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine

from lifecycle.store.database import open_database
from lifecycle.store.tables import metadata


def statements(path: Path) -> dict[str, str]:
    """How each table and index was made, without its layout on the page."""
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql NOT NULL").fetchall()
    connection.close()
    return {name: " ".join(sql.split()) for name, sql in rows if name != "alembic_version"}


async def test_code_and_revisions_agree(tmp_path: Path) -> None:
    engine = await open_database(f"sqlite:///{tmp_path}/migrated.db")
    async with engine.connect() as connection:
        differences = await connection.run_sync(
            lambda c: compare_metadata(MigrationContext.configure(c, opts={"compare_type": True}), metadata)
        )
    await engine.dispose()
    assert differences == []

    direct = create_engine(f"sqlite:///{tmp_path}/direct.db")
    metadata.create_all(direct)
    direct.dispose()
    assert statements(tmp_path / "migrated.db") == statements(tmp_path / "direct.db")
