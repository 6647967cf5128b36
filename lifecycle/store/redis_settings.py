"""Values that are made once and then shared by every process on one Redis log."""

from collections.abc import Callable

from lifecycle.store.redis_server import RedisServer


class RedisSettings:
    """Named values beside the event log: they are as private and as durable as the log."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    async def get_or_create(self, name: str, factory: Callable[[], bytes]) -> bytes:
        """The value of `name`; made by `factory` the first time.

        Processes that ask at once all get the same value. Raises `LogUnavailable`.
        """
        return await self._server.ask(lambda: self._ask(name, factory))

    async def _ask(self, name: str, factory: Callable[[], bytes]) -> bytes:
        key, client = self._server.key("setting", name), self._server.client
        found: bytes | None = await client.get(key)  # type: ignore[assignment]
        if found is None:
            await client.set(key, factory(), nx=True)
            found = await client.get(key)  # type: ignore[assignment]
        return found or b""
