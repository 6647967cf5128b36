"""Where snapshots lie: beside the event log, in its database, its Redis or its memory."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from lifecycle.ports import StoredSnapshot
from lifecycle.store.database import naming_failures
from lifecycle.store.redis_scripts import SNAPSHOT
from lifecycle.store.redis_server import RedisServer
from lifecycle.store.tables import snapshot_parts, snapshots

_AT_ONCE = 500
"""Names in one statement or command."""


class MemorySnapshots:
    """The `SnapshotStore` beside a log in memory."""

    def __init__(self) -> None:
        self._snapshots: dict[int, bytes] = {}
        self._parts: dict[str, bytes] = {}

    async def put(self, parts: Mapping[str, bytes]) -> None:
        """Keep parts."""
        self._parts.update(parts)

    async def commit(self, snapshot: StoredSnapshot, previous: int | None, parts: Collection[str]) -> None:
        """Make it the newest snapshot, and forget all but it and the previous one."""
        kept = {p: m for p, m in self._snapshots.items() if p == previous}
        self._snapshots = kept | {snapshot.position: snapshot.manifest}
        self._parts = {name: content for name, content in self._parts.items() if name in parts}

    async def newest_first(self) -> Sequence[StoredSnapshot]:
        """Every snapshot, the one of the highest position first."""
        return [StoredSnapshot(p, self._snapshots[p]) for p in sorted(self._snapshots, reverse=True)]

    async def parts(self, names: Sequence[str]) -> Mapping[str, bytes]:
        """Content by name; what is not there is left out."""
        return {name: self._parts[name] for name in names if name in self._parts}


class SqlSnapshots:
    """The `SnapshotStore` in the event log's own database."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def put(self, parts: Mapping[str, bytes]) -> None:
        """Keep parts, in one transaction: appends wait for it."""
        if not parts:
            return
        statement = insert(snapshot_parts)
        statement = statement.on_conflict_do_update(
            index_elements=["name"], set_={"content": statement.excluded.content}
        )
        rows = [{"name": name, "content": content} for name, content in parts.items()]
        with naming_failures(self._engine.url):
            async with self._engine.connect() as connection:
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
                await connection.execute(statement, rows)
                await connection.commit()

    async def commit(self, snapshot: StoredSnapshot, previous: int | None, parts: Collection[str]) -> None:
        """Make it the newest snapshot, and forget all but it and the previous one."""
        kept = [snapshot.position] if previous is None else [snapshot.position, previous]
        row = insert(snapshots).values(position=snapshot.position, manifest=snapshot.manifest)
        row = row.on_conflict_do_update(index_elements=["position"], set_={"manifest": row.excluded.manifest})
        with naming_failures(self._engine.url):
            async with self._engine.connect() as connection:
                there = (await connection.scalars(select(snapshot_parts.c.name))).all()
                over = [name for name in there if name not in parts]
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
                await connection.execute(row)
                await connection.execute(delete(snapshots).where(snapshots.c.position.not_in(kept)))
                for names in _batches(over):
                    await connection.execute(delete(snapshot_parts).where(snapshot_parts.c.name.in_(names)))
                await connection.commit()

    async def newest_first(self) -> Sequence[StoredSnapshot]:
        """Every snapshot, the one of the highest position first."""
        query = select(snapshots).order_by(snapshots.c.position.desc())
        with naming_failures(self._engine.url):
            async with self._engine.connect() as connection:
                rows = (await connection.execute(query)).all()
        return [StoredSnapshot(row.position, row.manifest) for row in rows]

    async def parts(self, names: Sequence[str]) -> Mapping[str, bytes]:
        """Content by name; what is not there is left out."""
        found: dict[str, bytes] = {}
        with naming_failures(self._engine.url):
            async with self._engine.connect() as connection:
                for batch in _batches(names):
                    query = select(snapshot_parts).where(snapshot_parts.c.name.in_(batch))
                    found |= {row.name: row.content for row in await connection.execute(query)}
        return found


class RedisSnapshots:
    """The `SnapshotStore` beside the event log in Redis: two hashes in the log's own slot."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._snapshots, self._parts = server.key("snapshots"), server.key("snapshot-parts")
        self._meta = server.key("meta")

    async def put(self, parts: Mapping[str, bytes]) -> None:
        """Keep parts."""
        pairs = [item for pair in parts.items() for item in pair]
        if pairs:
            await self._written(("HSET", self._parts, *pairs))

    async def commit(self, snapshot: StoredSnapshot, previous: int | None, parts: Collection[str]) -> None:
        """Make it the newest snapshot, and forget all but it and the previous one.

        Raises `Deposed` if another process owns the log by now.
        """
        positions, names = await self._server.read(("HKEYS", self._snapshots), ("HKEYS", self._parts))
        kept = {str(snapshot.position), str(previous)}
        late = [p for p in positions if p.decode() not in kept]
        over = [name for name in names if name.decode() not in parts]
        arguments = (self._server.term, snapshot.position, snapshot.manifest, len(late), *late, *over)
        client, keys = self._server.client, (self._meta, self._snapshots, self._parts)

        async def written() -> Any:
            evaluated: Any = client.eval(SNAPSHOT, len(keys), *keys, *arguments)
            return await evaluated

        done, term = await self._server.ask(written)
        if done != b"ok":
            raise self._server.deposed(term)

    async def newest_first(self) -> Sequence[StoredSnapshot]:
        """Every snapshot, the one of the highest position first."""
        (answer,) = await self._server.read(("HGETALL", self._snapshots))
        found = {int(position): manifest for position, manifest in answer.items()}
        return [StoredSnapshot(position, found[position]) for position in sorted(found, reverse=True)]

    async def parts(self, names: Sequence[str]) -> Mapping[str, bytes]:
        """Content by name; what is not there is left out."""
        found: dict[str, bytes] = {}
        for batch in _batches(names):
            (contents,) = await self._server.read(("HMGET", self._parts, *batch))
            found |= {n: c for n, c in zip(batch, contents, strict=True) if c is not None}
        return found

    async def _written(self, *commands: tuple[Any, ...]) -> None:
        """Carry all of them out or none."""

        async def written() -> None:
            async with self._server.client.pipeline(transaction=True) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                await pipeline.execute()

        await self._server.ask(written)


def _batches(names: Iterable[Any]) -> Iterable[list[Any]]:
    everything = list(names)
    return (everything[at : at + _AT_ONCE] for at in range(0, len(everything), _AT_ONCE))
