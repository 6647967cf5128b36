"""The event log in Redis Streams.

Keys, all in one hash slot: `meta` (format, epoch, head, trimmed), `feed` (one entry a batch, whose id is the
position of the batch's last event), one stream for each stream of the log (one entry an event, whose id is
its version), and `trimmed` (the last version that each stream lost to a trim). Payloads lie once, in the
streams; the feed says in which order to read them.

Writes. One Lua script looks at everything before it writes anything: the history, the stream's version,
the head. Redis runs a script alone, refuses it for want of memory only before its first write, and its file
keeps a script as one unit; so a batch lands whole or not at all. Sent twice, it lands once.

Order. Positions are counted in the same script: without gaps, and nothing can appear behind a position that
was seen.

History. `epoch` is drawn once, when the log begins, and each batch carries a mark of its own. Every write
and every read checks that the epoch is the one this process began with and that the last batch it has seen is
still there, under its mark. A server that was emptied, or took over without the latest batches, is refused:
going on would give old positions to new events.

Trims. One script takes whole batches off the feed and off their streams, and moves the mark `trimmed` past
them, so a reader that finds something missing can tell what was trimmed from what was lost. The last batch
stays: it carries the mark of the history. A process that has seen nothing since a batch that was trimmed is
told by the epoch alone.

Owner. What only the owner of the log may ask of the cache carries the owner's term, as trims do; a term that
is over is refused (`redis_ownership.py`).
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

from redis.exceptions import RedisError

from lifecycle.core.directives import OWNERS_ALONE
from lifecycle.core.events import DirectiveProposed, Event, RecordedEvent
from lifecycle.errors import CorruptLog, LifecycleError, LogUnavailable, VersionConflict
from lifecycle.store.codec import check_stream, checksum, encode
from lifecycle.store.redis_entries import Run, feed_run, number, recorded_event
from lifecycle.store.redis_scripts import APPEND, FORGET, OPEN, TRIM
from lifecycle.store.redis_server import RedisServer

FORMAT = b"1"
TRIMMED_FORMAT = b"2"
"""Of a log that was trimmed: who does not know of trims would take it for a damaged one."""

_MARK_BYTES = 8
_PAGE = 256
"""Events that are fetched at once."""

_FEED_PAGE = 96
"""Entries of the feed that are fetched at once: a batch has about three events."""

_TRIM_ENTRIES = 256
"""Batches that one script trims: the server does nothing else for about a millisecond."""

_GROUP = 64
"""Batches that are sent at once: Redis syncs its file once for all of them."""

_LOST = "the event log stopped during the append: it may or may not be recorded"


class _Seen(NamedTuple):
    """The last batch that this process knows of: the position of its last event, and its mark."""

    position: int
    mark: bytes


_Outcome: TypeAlias = Sequence[RecordedEvent] | LifecycleError


class _Batch:
    """Events for one stream, encoded, and where their outcome appears. Raises `InvalidObservation`."""

    def __init__(self, stream: str, events: Sequence[Event], expected_version: int, term: int) -> None:
        self.stream = stream
        self.events = tuple(events)
        self.expected_version = expected_version
        self.mark = secrets.token_bytes(_MARK_BYTES)
        owners = any(
            isinstance(e, DirectiveProposed) and isinstance(e.directive, OWNERS_ALONE) for e in events
        )
        fence = term if owners else ""
        self.arguments: list[bytes | int | str] = [str(expected_version), self.mark, stream, fence]
        for version, event in enumerate(self.events, start=expected_version + 1):
            payload = encode(event)
            self.arguments += [payload, checksum(stream, version, payload)]
        self.outcome: asyncio.Future[_Outcome] = asyncio.get_running_loop().create_future()

    def recorded(self, head: int) -> tuple[RecordedEvent, ...]:
        """The batch as it lies behind position `head`."""
        return tuple(
            RecordedEvent(self.stream, self.expected_version + i, head + i, event)
            for i, event in enumerate(self.events, start=1)
        )


class RedisEventLog:
    """The `EventLog` for several processes; each opens its own.

    `server` is open to others who keep their keys beside the log; `close` lets go of it. A read ends at what
    the log held when it began, and may be abandoned at any point.
    """

    def __init__(self, server: RedisServer, epoch: bytes) -> None:
        self.server = server
        self.epoch = epoch
        self._meta, self._feed, self._trimmed = server.key("meta"), server.key("feed"), server.key("trimmed")
        self._seen = _Seen(0, b"")
        self._first = 1
        self._waiting: list[_Batch] = []
        self._writing: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def open(cls, url: str, timeout_s: float = 5.0) -> Self:
        """The log at `url` (`redis://host:6379/0?prefix=kvtether`), begun if there is none.

        `timeout_s` bounds each connection and each answer. Raises `ValueError` for another kind of URL,
        `LogUnavailable` when the server cannot be reached, may lose what it acknowledges or belongs to a
        newer version, `CorruptLog` when only a part of a log is there.
        """
        server = RedisServer(url, timeout_s)
        try:
            keys = [server.key("meta"), server.key("feed")]
            begin = server.client.register_script(OPEN)
            found = await server.ask(lambda: begin(keys=keys, args=[FORMAT, secrets.token_hex(16)]))
            if not found:
                raise CorruptLog(f"{server.place}: of the event log only a part is there; restore it")
            if found[0] not in (FORMAT, TRIMMED_FORMAT):
                raise LogUnavailable(
                    f"{server.place} holds a log of format {found[0].decode()}, which this version does not "
                    "know: a newer one wrote it; run that one, or name another prefix"
                )
            log = cls(server, found[1])
            await log.head()
        except BaseException:
            await server.close()
            raise
        return log

    async def append(
        self, stream: str, events: Sequence[Event], expected_version: int
    ) -> Sequence[RecordedEvent]:
        """Record `events` behind `expected_version`, all or none; on the server's disk when it returns.

        A caller that is cancelled meanwhile does not stop the write: it lands whole or not at all.
        Raises as the port says, `InvalidObservation` for what cannot be encoded, `LogUnavailable` also for a
        server whose history is not the one this process has seen. When the server went away before it
        answered, the batch may have been recorded: a later attempt then meets a `VersionConflict`.
        """
        self._check_open()
        check_stream(stream)
        if not events:
            return ()
        batch = _Batch(stream, events, expected_version, self.server.term)
        self._waiting.append(batch)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write())
        outcome = await batch.outcome
        if isinstance(outcome, VersionConflict):
            raise outcome
        if isinstance(outcome, LifecycleError):
            raise type(outcome)(str(outcome)) from outcome  # a whole group may share the one underneath
        return outcome

    async def read_stream(self, stream: str, after_version: int = 0) -> AsyncIterator[RecordedEvent]:
        """Events of one stream in order. Raises `CorruptLog` also where a version is missing."""
        check_stream(stream)
        key = self.server.key("stream", stream)
        version = max(after_version, 0)
        (newest,) = await self._fetch(("XREVRANGE", key, "+", "-", "COUNT", 1))
        until = number(newest[0][0]) if newest else 0
        while version < until:
            page, trimmed, there = await self._fetch(
                ("XRANGE", key, version + 1, until, "COUNT", _PAGE),
                ("HGET", self._trimmed, stream),
                ("EXISTS", key),
            )
            version = max(version, int(trimmed or 0))
            if not page and version < until and there:
                raise CorruptLog(f"stream {stream!r} lacks version {version + 1}; it ends at {until}")
            if not page:
                return  # all of it was trimmed meanwhile
            for entry in page:
                version += 1
                yield recorded_event(stream, version, entry)

    async def read_all(self, after_position: int = 0) -> AsyncIterator[RecordedEvent]:
        """Events of all streams by position. Raises `CorruptLog` also where a position is missing."""
        position = max(after_position, 0)
        until = await self.head()
        while page := await self._page(position, until):
            for run, entries in page:
                if len(entries) != run.num_events:
                    raise CorruptLog(
                        f"stream {run.stream!r} lacks some of the {run.num_events} versions from "
                        f"{run.first_version} on, which the feed names"
                    )
                position = run.first_position - 1
                for version, entry in enumerate(entries, start=run.first_version):
                    position += 1
                    yield recorded_event(run.stream, version, entry, position)

    async def head(self) -> int:
        """Position of the last event ever recorded, 0 if there was none."""
        newest, meta = await self._fetch(
            ("XREVRANGE", self._feed, "+", "-", "COUNT", 1), ("HGET", self._meta, "head")
        )
        position = number(newest[0][0]) if newest else 0
        if meta != b"%d" % position:
            raise self._torn(position, meta or b"")
        if newest:
            self._saw(_Seen(position, newest[0][1].get(b"m", b"")))
        return position

    async def first_position(self) -> int:
        """Position of the first event that was not trimmed, or that will be the first."""
        await self._fetch()
        return self._first

    async def trim(self, through: int, streams: Collection[str]) -> int:
        """Forget whole batches at and below position `through`, a step of them; never the last one."""
        first = await self.first_position()
        until = min(through, await self.head() - 1)
        step = ("XRANGE", self._feed, first, until, "COUNT", _TRIM_ENTRIES)
        entries = (await self._fetch(step))[0] if first <= until else ()
        if not entries:
            await self._forget(streams)
            return first
        last: dict[str, int] = {}
        for entry_id, fields in entries:
            run = feed_run(entry_id, fields)
            last[run.stream] = run.last_version
        position = number(entries[-1][0])
        keys = (self._meta, self._feed, self._trimmed, *(self.server.key("stream", s) for s in last))
        arguments: list[bytes | int | str] = [self.epoch, TRIMMED_FORMAT, first - 1, position, position + 1]
        arguments.append(self.server.term)
        for stream, version in last.items():
            arguments += [stream, version, version + 1]
        answer = await self._evaluated(TRIM, keys, arguments)
        if answer[0] == b"deposed":
            raise self.server.deposed(answer[1])
        if answer[0] != b"ok":
            raise self._other(answer[1], b"")
        return int(answer[1]) + 1

    async def _forget(self, streams: Collection[str]) -> None:
        """Forget the versions of streams that have no events left and do not go on."""
        (known,) = await self._fetch(("HKEYS", self._trimmed))
        over = [name for name in (key.decode() for key in known) if name not in streams]
        for start in range(0, len(over), _TRIM_ENTRIES):
            names = over[start : start + _TRIM_ENTRIES]
            keys = (self._trimmed, *(self.server.key("stream", name) for name in names))
            await self._evaluated(FORGET, keys, names)

    async def _evaluated(self, script: str, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
        async def asked() -> Any:
            evaluated: Any = self.server.client.eval(script, len(keys), *keys, *arguments)
            return await evaluated

        return await self.server.ask(asked)

    async def close(self) -> None:
        """Let appends that have begun end, then let go of the server. Twice changes nothing."""
        if self._closed:
            return
        self._closed = True
        if self._writing is not None:
            await asyncio.shield(self._writing)
        await self.server.close()

    async def _write(self) -> None:
        """Send what waits, in the order it came; what arrives while an answer is awaited goes together."""
        while self._waiting:
            group = self._waiting[:_GROUP]
            del self._waiting[:_GROUP]
            outcomes: Sequence[_Outcome] = [LogUnavailable(_LOST)] * len(group)
            try:
                outcomes = await self._send(group)
            except LifecycleError as failure:
                outcomes = [failure] * len(group)
            finally:
                for batch, outcome in zip(group, outcomes, strict=True):
                    if not batch.outcome.done():  # its caller may have left
                        batch.outcome.set_result(outcome)

    async def _send(self, group: Sequence[_Batch]) -> list[_Outcome]:
        """What became of each batch. Raises when nothing at all was heard."""

        async def appended() -> list[Any]:
            async with self.server.client.pipeline(transaction=False) as pipeline:
                for batch in group:
                    stream = self.server.key("stream", batch.stream)
                    keys = (self._meta, self._feed, stream, self._trimmed)
                    known = (self.epoch, *self._seen)
                    pipeline.execute_command("EVAL", APPEND, len(keys), *keys, *known, *batch.arguments)
                return await pipeline.execute(raise_on_error=False)

        answers = await self.server.ask(appended)
        return [self._judged(batch, answer) for batch, answer in zip(group, answers, strict=True)]

    def _judged(self, batch: _Batch, answer: Any) -> _Outcome:
        if isinstance(answer, RedisError):
            return self.server.named(answer)
        match answer:
            case [b"ok", head]:
                self._saw(_Seen(int(head) + len(batch.events), batch.mark))
                return batch.recorded(int(head))
            case [b"conflict", actual]:
                return VersionConflict(batch.stream, batch.expected_version, int(actual))
            case [b"deposed", term]:
                return self.server.deposed(term)
            case [b"torn", feed, head]:
                return self._torn(int(feed), head)
        return self._other(*answer[1:])

    async def _page(self, position: int, until: int) -> list[tuple[Run, list[Any]]]:
        """What comes next in the feed behind `position`, about `_PAGE` events, as the streams hold it."""
        while True:
            (page,) = await self._fetch(("XRANGE", self._feed, position + 1, until, "COUNT", _FEED_PAGE))
            position = max(position, self._first - 1)
            if position >= until:
                return []
            runs = self._planned(page, position)
            if not runs:
                raise CorruptLog(f"position {position + 1} is missing in the feed, which ends at {until}")
            ranges = [
                ("XRANGE", self.server.key("stream", run.stream), run.first_version, run.last_version)
                for run in runs
            ]
            entries = await self._fetch(*ranges)
            if self._first <= runs[0].first_position:
                return list(zip(runs, entries, strict=True))

    def _planned(self, page: Sequence[Any], position: int) -> list[Run]:
        """Runs of the feed's entries that follow `position` without a gap, about `_PAGE` events."""
        runs: list[Run] = []
        planned = position
        for entry_id, fields in page:
            run = feed_run(entry_id, fields)
            done = planned + 1 - run.first_position
            if done < 0:
                break
            run = run.part(done, _PAGE - (planned - position))
            runs.append(run)
            planned += run.num_events
            if planned - position >= _PAGE:
                break
        return runs

    async def _fetch(self, *commands: tuple[Any, ...]) -> list[Any]:
        """What the commands answer, if the server's history is the one we know: asked in one transaction."""
        self._check_open()
        seen = self._seen
        (epoch, head, trimmed), there, *answers = await self.server.read(
            ("HMGET", self._meta, "epoch", "head", "trimmed"),
            ("XRANGE", self._feed, seen.position, seen.position),
            *commands,
        )
        known = there[0][1].get(b"m") == seen.mark if there else seen.position <= int(trimmed or 0)
        if epoch != self.epoch or not known:
            raise self._other(epoch or b"", head or b"")
        self._first = int(trimmed or 0) + 1
        return answers

    def _saw(self, seen: _Seen) -> None:
        if seen.position > self._seen.position:
            self._seen = seen

    def _torn(self, feed: int, head: bytes) -> CorruptLog:
        return CorruptLog(
            f"{self.server.place}: the feed ends at position {feed}, but {head.decode() or 0} were counted"
        )

    def _other(self, epoch: bytes, head: bytes) -> LogUnavailable:
        if not epoch:
            found = "holds no event log, though it did: it was emptied, or an empty server took over"
        elif epoch != self.epoch:
            found = "holds another event log than the one this process began with"
        else:
            found = f"lacks events that this process has seen (position {self._seen.position}; it is at "
            found += f"{head.decode() or 0}): an older copy took over"
        return LogUnavailable(
            f"Redis at {self.server.place} {found}. Nothing is recorded there: bring back the server or its "
            "files, or restart to go on from what it holds"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise LogUnavailable("the event log is closed")
