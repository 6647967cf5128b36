"""Values that are made once and then shared by every process on one database."""

from collections.abc import Callable

from sqlalchemy import select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from lifecycle.store.database import naming_failures
from lifecycle.store.tables import settings


class SqlSettings:
    """Named values in the event log's own database: they are as private and as durable as the log."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def get_or_create(self, name: str, factory: Callable[[], bytes]) -> bytes:
        """The value of `name`; made by `factory` the first time.

        Processes that ask at once all get the same value. Raises `LogUnavailable`.
        """
        read = select(settings.c.value).where(settings.c.name == name)
        with naming_failures(self._engine.url):
            async with self._engine.connect() as connection:
                found = await connection.scalar(read)
                if found is None:
                    await connection.execute(
                        insert(settings).values(name=name, value=factory()).on_conflict_do_nothing()
                    )
                    found = await connection.scalar(read)
        return bytes(found or b"")
