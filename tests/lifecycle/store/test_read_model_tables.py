"""The tables in the code are the tables that the revisions build, and the columns that events write."""

from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, create_engine

from lifecycle.core.events import RecordedEvent
from lifecycle.projections.read_rows import KEYS, changes
from lifecycle.store.read_model_database import open_read_model_database
from lifecycle.store.read_model_tables import ROWS, VERSION_TABLE, metadata
from tests.lifecycle.core.event_examples import EVENT_TYPES, full
from tests.lifecycle.store.postgres_process import new_shared_database
from tests.lifecycle.store.test_tables import statements


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
async def test_code_and_revisions_agree(tmp_path: Path, backend: str) -> None:
    url = f"sqlite:///{tmp_path}/migrated.db" if backend == "sqlite" else await new_shared_database()
    engine = await open_read_model_database(url)

    def differences(connection: Connection) -> list[Any]:
        options = {"compare_type": True, "version_table": VERSION_TABLE}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))

    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await engine.dispose()


async def test_keys_and_columns_are_alike(tmp_path: Path) -> None:
    engine = await open_read_model_database(f"sqlite:///{tmp_path}/migrated.db")
    await engine.dispose()
    direct = create_engine(f"sqlite:///{tmp_path}/direct.db")
    metadata.create_all(direct)
    direct.dispose()
    migrated = statements(tmp_path / "migrated.db")
    migrated.pop(VERSION_TABLE)
    assert migrated == statements(tmp_path / "direct.db")


def test_events_write_the_columns_that_there_are() -> None:
    assert {name: tuple(c.name for c in table.primary_key) for name, table in ROWS.items()} == KEYS
    for event_type in EVENT_TYPES:
        for change in changes(RecordedEvent("ctx/uid", 1, 1, full(event_type))):
            columns = {c.name for c in ROWS[change.table].columns}
            assert set(change.values) == columns if change.whole else set(change.values) <= columns
