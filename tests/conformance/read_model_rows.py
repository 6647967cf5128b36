"""The rows of the read models, read by somebody else."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from lifecycle.store.read_model_database import parse_url
from lifecycle.store.read_model_tables import ROWS
from tests.conformance.read_model_lives import Rows

SECONDS = 30.0


async def rows_at(url: str) -> Rows:
    """Every row by its key."""
    engine = create_async_engine(parse_url(url), poolclass=NullPool)
    out: Rows = {}
    try:
        async with engine.connect() as connection:
            for name, table in ROWS.items():
                keys = [column.name for column in table.primary_key.columns]
                out[name] = {}
                for row in (await connection.execute(select(table))).mappings():
                    values = {column: _in_utc(value) for column, value in row.items()}
                    key = tuple(values[k] for k in keys)
                    out[name][key if len(keys) > 1 else key[0]] = values
    finally:
        await engine.dispose()
    return out


async def until_rows(url: str, holds: Callable[[Rows], bool]) -> Rows:
    """Wait until the rows are so."""
    async with asyncio.timeout(SECONDS):
        while True:
            if holds(rows := await rows_at(url)):
                return rows
            await asyncio.sleep(0.05)


def _in_utc(value: Any) -> Any:
    """SQLite keeps no zone."""
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value
