"""kill -9 of the proxy at every step between an observation and its outcome: nothing acknowledged is lost,
nothing takes effect twice, nothing live is deleted, and at the end nothing is left."""

import asyncio
import os
import signal
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from engine_bridge.chunk_keys import chunk_keys
from lifecycle.core.directives import DirectiveResult
from lifecycle.core.events import (
    ChunksConfirmed,
    ChunksGone,
    DirectiveSettled,
    OperationApplied,
    RecordedEvent,
)
from lifecycle.core.ids import split_keys
from lifecycle.ports import EventLog
from lifecycle.projections.contexts import Contexts
from lifecycle.store.opening import open_log
from proxy.config import Config
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.lives import books, replayed
from tests.lifecycle.store.redis_process import place_in_shared_redis
from tests.proxy.crash_process import FORKS, SECONDS, run
from tests.proxy.scripted_upstream import ScriptedUpstream
from tests.proxy.toy_model import CHUNK, NAME, ToyEngine
from tests.proxy.whole_proxy import Message, assistant, configured, lifecycle, system, user

UNHEARD_OF = ("no such context", "the context has no list", "the context has no list yet")
"""What an operation is told if the calls before it were answered by a process that died over its books."""

MOMENTS = ("before", "after")
LOOK_PAUSE_SECONDS = 0.2
EVERY = 10
"""So many deaths later the process that puts things right dies over it, too."""


class FarSide(FakeCache):
    """The cache that outlives the proxy, and what was ordered of it.

    `deleted` has every chunk that an order took away, with the log position at which it was ordered.
    """

    def __init__(self) -> None:
        super().__init__(chunk_size=CHUNK)
        self.counts: Counter[bytes] = Counter()
        self.highest: Counter[bytes] = Counter()
        self.deleted: list[tuple[int, bytes]] = []

    def obey(self, kind: str, arguments: list[Any]) -> Any:
        match kind, arguments:
            case "locate", [keys]:
                return [key in self.chunks for key in keys]
            case "pins", []:
                return [(key, n) for key, n in sorted(self.counts.items()) if n]
            case "pin" | "unpin", [tokens]:
                for key in split_keys(chunk_keys(array("I", tokens), CHUNK)):
                    self.counts[key] = max(0, self.counts[key] + (1 if kind == "pin" else -1))
                    self.highest[key] = max(self.highest[key], self.counts[key])
            case "delete", [keys, position]:
                self.deleted += [(position, key) for key in keys if self.chunks.pop(key, None)]
            case "demote", [_, _]:
                raise AssertionError("nobody unseen is there to demote for")
        return None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                message = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
                kind, *arguments = msgspec.msgpack.decode(message)
                answer = msgspec.msgpack.encode(self.obey(kind, arguments))
                writer.write(len(answer).to_bytes(4, "big") + answer)
                await writer.drain()
        writer.close()


class Proxy:
    """One process, from its start to its death."""

    def __init__(self, config: Config, far_port: int, armed: tuple[int, str]) -> None:
        self.pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=run, args=(config, far_port, theirs, armed))
        self.process.start()
        theirs.close()
        self.said: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.gone = asyncio.Event()
        self.acked: dict[int, str] = {}
        self.last_step = ""
        asyncio.get_running_loop().add_reader(self.pipe.fileno(), self.hear)

    def hear(self) -> None:
        try:
            kind, what = self.pipe.recv()
        except (EOFError, ConnectionError):
            asyncio.get_running_loop().remove_reader(self.pipe.fileno())
            self.pipe.close()
            self.process.join()
            self.gone.set()
            return
        if kind == "acked":
            self.acked |= dict(what)
        elif kind == "died":
            self.last_step = what
        else:
            self.said.put_nowait((kind, what))

    async def answer(self, kind: str) -> Any:
        """What it says of that kind, next; None if it dies instead."""
        async with asyncio.timeout(2 * SECONDS):
            gone = asyncio.ensure_future(self.gone.wait())
            said = asyncio.ensure_future(self.said.get())
            await asyncio.wait((gone, said), return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not said.done():
                said.cancel()
                return None
            assert said.result()[0] == kind
            return said.result()[1]

    async def ask(self, command: str, argument: Any, kind: str) -> Any:
        try:
            self.pipe.send((command, argument))
        except OSError:
            await asyncio.wait_for(self.gone.wait(), SECONDS)
            return None
        return await self.answer(kind)

    def kill(self) -> None:
        if not self.gone.is_set():
            os.kill(self.process.pid, signal.SIGKILL)


class Scene:
    """A proxy that is started again whenever it died, before an engine and a cache that live on."""

    def __init__(self, config: Config, far: FarSide, far_port: int, toy: ToyEngine) -> None:
        self.config = config
        self.far = far
        self.far_port = far_port
        self.toy = toy
        self.deaths: list[str] = []
        self.acked: dict[int, str] = {}
        self.http = httpx.AsyncClient(timeout=SECONDS)
        self.proxy: Proxy
        self.data_url = self.admin_url = ""

    async def start(self) -> None:
        """Until one serves. Every few deaths the next one dies, too, over putting things right."""
        number = len(self.deaths)
        dies_at = 1 + number // EVERY % 4 if number % EVERY == EVERY - 1 else 0
        while True:
            self.proxy = Proxy(self.config, self.far_port, (dies_at, MOMENTS[number % 2]))
            urls = await self.proxy.answer("up")
            if urls is not None:
                self.data_url, self.admin_url = urls
                return
            self.bury()
            dies_at = 0

    def bury(self) -> None:
        self.deaths.append(self.proxy.last_step)
        self.acked |= self.proxy.acked

    async def persist(self, attempt: Callable[[], Any]) -> httpx.Response:
        """As a client does whose proxy may go away: the same again, until it was answered."""
        while True:
            try:
                answer: httpx.Response = await attempt()
            except httpx.TransportError:
                await asyncio.wait_for(self.proxy.gone.wait(), SECONDS)
                self.bury()
                await self.start()
                continue
            assert answer.status_code == 200, answer.text
            return answer

    async def call(self, messages: list[Message], *, stream: bool = False, **fields: Any) -> None:
        body = {"model": NAME, "messages": messages, "stream": stream}
        headers = lifecycle(**fields)
        await self.persist(
            lambda: self.http.post(f"{self.data_url}/v1/chat/completions", json=body, headers=headers)
        )
        # Engines take longer for a call than the proxy for its books: toys must be told to wait for them.
        if await self.proxy.ask("settle", None, "settled") is None:
            self.bury()
            await self.start()

    async def ops(self, *ops: dict[str, Any]) -> None:
        body = {"source": "life", "ops": list(ops)}
        answer = await self.persist(lambda: self.http.post(f"{self.data_url}/kv/v1/ops", json=body))
        for result in answer.json()["results"]:
            if result["status"] == "rejected":
                assert self.deaths, answer.text
                assert result["reason"] in UNHEARD_OF, answer.text

    async def quiet(self) -> tuple[int, bytes]:
        """Everything came to its end; answers position and digest of the books then."""
        while True:
            answer = await self.proxy.ask("quiet", None, "books")
            if answer is not None:
                assert isinstance(answer, tuple), answer
                return answer[0], answer[1]
            self.bury()
            await self.start()

    async def close(self) -> None:
        self.proxy.kill()
        await self.proxy.gone.wait()
        await self.http.aclose()


@asynccontextmanager
async def scene(tmp_path: Path, log_url: str) -> AsyncIterator[Scene]:
    far = FarSide()
    toy = ToyEngine(far)
    server = await asyncio.start_server(far.serve, "127.0.0.1", 0)
    async with server, ScriptedUpstream(toy.script) as engine:
        config = configured(tmp_path, engine.url, log_url=log_url)
        it = Scene(config, far, server.sockets[0].getsockname()[1], toy)
        await it.start()
        try:
            yield it
        finally:
            await it.close()


async def life(it: Scene, n: int, whole: bool) -> None:
    """What an agent may do, with texts of its own; a whole life has a fork and a pin, too."""
    a, fork, once = f"a{n}", f"f{n}", f"o{n}"
    head = [system(f"you are number {n} of many toys"), user("do this and that, please")]
    longer = [*head, assistant("ok"), user("and now something else")]
    seq = count(1)
    await it.call(head, ctx=a, call="1")
    await it.call(longer, ctx=a, call="2", stream=True)
    if whole:
        await it.ops({"op": "pin", "seq": next(seq), "ctx": a, "span": [0, 1], "ttl": 600})
        side = [*longer, assistant("ok"), user("a side way")]
        await it.call(side, ctx=fork, parent=a, call="1", fork_at=4)
    await it.call([system(f"summarise {n}"), user("all of it")], ctx=once, call="1", one_off=True)
    await it.ops({"op": "replace", "seq": next(seq), "ctx": a, "span": [1, 4], "n": 1})
    await it.call([head[0], user("what was said, in short")], ctx=a, call="3")
    if whole:
        await it.ops({"op": "unpin", "seq": next(seq), "ctx": a, "span": [0, 1]})
        await it.ops({"op": "close", "seq": 1, "ctx": fork})
    await it.ops({"op": "close", "seq": next(seq), "ctx": a})


async def told_when_all_is_gone(it: Scene, event_log: EventLog) -> list[RecordedEvent]:
    """The log, once every chunk that it calls ours is gone. What a process was computing when it died may be
    proven late, by a slow look, and is freed after that."""
    for _ in range(int(SECONDS / LOOK_PAUSE_SECONDS)):
        told = [r async for r in event_log.read_all()]
        if not _ours(told) & set(it.far.chunks):
            return told
        await asyncio.sleep(LOOK_PAUSE_SECONDS)
    raise AssertionError("dead, ours, and still there")


def _ours(told: list[RecordedEvent]) -> set[bytes]:
    """Chunks that were proven ours and not freed since. What is stored again afterwards needs a proof of its
    own, which a process that dies early may not leave."""
    ours: set[bytes] = set()
    for recorded in told:
        match recorded.event:
            case ChunksConfirmed(stored=True, keys=keys):
                ours.update(split_keys(keys))
            case ChunksGone(keys=keys) | DirectiveSettled(result=DirectiveResult(gone=keys)):
                ours.difference_update(split_keys(keys))
            case _:
                pass
    return ours


async def recounted(it: Scene, log_url: str) -> None:
    """What the log says of everything that happened, against what engine, cache and clients saw."""
    event_log = (await open_log(log_url)).event_log
    told = await told_when_all_is_gone(it, event_log)
    names = {r.position: type(r.event).__name__ for r in told}
    lost = {position for position, name in it.acked.items() if names.get(position) != name}
    assert not lost, "acknowledged, and not in the log"

    applied = Counter(
        (r.stream, e.source, e.operation.seq) for r in told if isinstance(e := r.event, OperationApplied)
    )
    assert set(applied.values()) == {1}, "an operation took effect twice"

    contexts = Contexts()
    deletions = sorted(it.far.deleted)
    for recorded in told:
        while deletions and deletions[0][0] < recorded.position:
            assert_dead(contexts, deletions.pop(0)[1])
        contexts.apply(recorded)
    for _, key in deletions:
        assert_dead(contexts, key)
    assert not any(it.far.counts.values()), "still pinned"
    assert max(it.far.highest.values(), default=1) == 1, "pinned twice"
    assert not any(state.flights or state.open for state in contexts.states.values())
    await event_log.close()


def assert_dead(contexts: Contexts, key: bytes) -> None:
    """By a recount of every version of every context."""
    for state in contexts.states.values():
        assert not any(key in split_keys(v.keys) for v in state.versions.values()), "a live chunk was deleted"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_at_every_step(tmp_path: Path, kind: str) -> None:
    """Before every other step of a life and after those between; with the other log the other way round."""
    log_url = (
        f"sqlite:///{tmp_path / 'log.db'}" if kind == "sqlite" else await place_in_shared_redis(tmp_path)
    )
    async with scene(tmp_path, log_url) as it:
        for n in count(1):
            deaths = len(it.deaths)
            await it.proxy.ask("arm", (n, MOMENTS[(n + (kind == "redis")) % 2]), "armed")
            await life(it, n, whole=kind == "sqlite")
            position, digest = await it.quiet()
            if len(it.deaths) == deaths:
                break
        print(f"died {len(it.deaths)} times:", *it.deaths, sep="\n")
        event_log = (await open_log(log_url)).event_log
        again = await replayed(event_log)
        assert (again.position, books(again)) == (position, digest)
        await event_log.close()
        await recounted(it, log_url)
