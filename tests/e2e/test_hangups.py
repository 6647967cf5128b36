"""Hang-ups on the real stack, in every phase: the engine stops, the books end the call, the dead are gone."""

import asyncio
import json
import socket
import struct
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from engine_bridge.drivers.lmcache_mp import LmcacheMp
from engine_bridge.engine_address import EngineAddress
from engine_bridge.stack.engine_stack import EngineStack
from lifecycle.core.events import CallArrived, CallEnded, CallMapped
from lifecycle.core.ids import Namespace, split_keys
from lifecycle.ports import Presence
from lifecycle.vocabulary import CallEnd
from tests.e2e.agent import Agent, World, config_for, lifecycle, prose, world_of
from tests.e2e.engine_cache import BOTH, NOWHERE, PLAIN, Cache
from tests.e2e.polling import POLL_SECONDS, SECONDS, polled
from tests.e2e.test_lifecycle_books import assert_books_equal_a_recount
from tests.proxy.live_server import RawClient

CHAT = b"/v1/chat/completions"
LONG_WORDS = 2500
"""A prompt of some twelve thousand tokens: the tiny model takes several steps for it."""

ENDLESS = 20_000
"""More tokens than any call here may live to generate."""


class Caller:
    """A client with a socket of its own."""

    def __init__(self, world: World, agent: Agent, way: str) -> None:
        self._world = world
        self._agent = agent
        self._way = way
        self.socket: RawClient | None = None
        self.heard = b""

    async def send(self, call: str, max_tokens: int = ENDLESS, *, share: float = 1.0, **body: Any) -> None:
        """Send the agent's list, or a share of the bytes of it."""
        port = int(self._world.up.data_url.rsplit(":", 1)[1])
        document = {
            "model": self._world.cache.stack.options.model_name,
            "messages": self._agent.messages,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            **PLAIN,
            **body,
        }
        raw = json.dumps(document).encode()
        [(name, value)] = lifecycle(ctx=self._agent.ctx, call=call).items()
        lines = [
            b"POST %b HTTP/1.1" % CHAT,
            b"host: a.client",
            b"content-type: application/json",
            b"content-length: %d" % len(raw),
            b"%b: %b" % (name.encode(), value.encode()),
        ]
        self.socket = await RawClient.connect(port)
        await self.socket.send(b"\r\n".join(lines) + b"\r\n\r\n" + raw[: int(len(raw) * share)])

    async def hear(self, what: bytes, times: int = 1) -> None:
        """Read until something was said so many times."""
        assert self.socket is not None
        async with asyncio.timeout(SECONDS):
            while self.heard.count(what) < times:
                piece = await self.socket.reader.read(2**16)
                assert piece, self.heard[-300:]
                self.heard += piece

    def hang_up(self) -> None:
        """Go, in the way that was asked for: by an ordinary end, or by a reset."""
        assert self.socket is not None
        if self._way == "reset":
            sock: socket.socket = self.socket.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.writer.transport.abort()


async def engine_count(world: World, name: str) -> float:
    """Sum of a metric of the engine."""
    text = (await world.http.get(f"{world.cache.stack.upstream_url}/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith((f"vllm:{name}{{", f"vllm:{name} "))]
    assert lines, name
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def until_engine(
    world: World, name: str, *, at_least: float = 0, at_most: float = float("inf")
) -> None:
    """Until a metric of the engine lies between two bounds."""

    async def lies_there() -> bool:
        return at_least <= await engine_count(world, name) <= at_most

    await polled(lies_there, POLL_SECONDS / 4)


async def until_idle(world: World) -> None:
    """Until the engine has nothing to do, and the proxy no call and no client."""
    await until_engine(world, "num_requests_running", at_most=0)
    await until_engine(world, "num_requests_waiting", at_most=0)
    await world.runtime.mailboxes.settled()

    async def nothing_open() -> bool:
        return not left_open(world)

    await polled(nothing_open)


def left_open(world: World) -> list[str]:
    """Connections that the proxy's data listener accepted and still holds although the client is gone."""
    closed_by_peer = "08"
    port = int(world.up.data_url.rsplit(":", 1)[1])
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return [row[2] for row in rows if row[3] == closed_by_peer and int(row[1].split(":")[1], 16) == port]


async def directory(world: World) -> set[bytes]:
    """Every key without a salt that the cache's own directory lists, in any tier."""
    found: set[bytes] = set()
    offset = 0
    while True:
        query = {"offset": offset, "limit": 10_000}
        reply = await world.http.get(f"{world.cache.stack.coordinator_url}/directory/keys", params=query)
        page = reply.json()["keys"]
        found.update(bytes.fromhex(k["key"]["chunk_hash_hex"]) for k in page if not k["key"]["cache_salt"])
        offset += len(page)
        if not page or offset >= reply.json()["total"]:
            return found


UNLOCKED_SECONDS = 150.0
"""A lookup whose call was given up before it read leaves its chunks locked in the cache for a minute (see the
stack's options), and what could not be deleted is asked for again every half one."""

MAX_UNPROVEN = 40
"""Chunks of one long question, which stay if they cannot be proven ours; docs/limits.md says when."""


def alive(world: World) -> set[bytes]:
    """Every key that some version of some context holds."""
    states = world.runtime.tracker.contexts.states.values()
    return {key for state in states for v in state.versions.values() for key in split_keys(v.keys)}


async def until_no_zombie(world: World, before: set[bytes]) -> None:
    """Until the directory shows no more than it did before and what the contexts hold."""
    zombies: set[bytes] = set()
    for _ in range(int(UNLOCKED_SECONDS / POLL_SECONDS)):
        zombies = await directory(world) - before - alive(world)
        if not zombies:
            return
        await asyncio.sleep(POLL_SECONDS)
    index = world.runtime.tracker.contexts.index
    books = {key: index.describe(world.namespace, key) for key in sorted(zombies)}
    ours = [each for each in books.values() if each is None or "OURS" in each.flags]
    # What one hang-up left may have been stored before anybody could see that it was not there: seen once.
    if ours or len(books) > MAX_UNPROVEN:
        raise AssertionError(f"{len(zombies)} zombies: {list(books.values())[:5]}")
    print(f"{len(books)} chunks were never proven ours")


def ended(world: World, call: str) -> list[CallEnd]:
    return [e.end for e in world.events(CallEnded) if e.call_id == call]


def mapped(world: World, call: str) -> bool:
    return any(e.call_id == call for e in world.events(CallMapped))


def question(num_words: int = 40) -> dict[str, str]:
    return {"role": "user", "content": prose(num_words)}


WAYS = ("end", "reset")


async def test_in_every_phase_the_engine_stops_and_nothing_dead_stays(world: World) -> None:
    agent = world.agent("impatient")
    await agent.say(prose(40))
    await world.until_confirmed(await agent.keys())
    kept = list(agent.messages)
    before = await directory(world) - alive(world)
    num_tasks = len(asyncio.all_tasks())

    ways = cycle(WAYS)

    def caller(num_words: int) -> Caller:
        """A client with a fresh question, which will go in the other way than the one before it."""
        agent.messages = [*kept, question(num_words)]
        return Caller(world, agent, next(ways))

    async def aborted(call: str, *ends: CallEnd) -> None:
        [end] = await world.until(lambda: ended(world, call))
        assert end in (ends or (CallEnd.ABORTED,))
        await until_idle(world)
        assert_books_equal_a_recount(world)

    # while it sends its body: nobody hears of the call
    client = caller(LONG_WORDS)
    await client.send("sending", share=0.5)
    client.hang_up()
    await until_idle(world)

    # before the first token: the prompt is being computed
    for call, stream in (("prefill", True), ("prefill 2", True), ("whole", False), ("whole 2", False)):
        client = caller(LONG_WORDS)
        await client.send(call, stream=stream)
        await until_engine(world, "num_requests_running", at_least=1)
        client.hang_up()
        await aborted(call)

    # mid-stream, with the tokens counted and without
    counted: dict[str, bool] = {"include_usage": True}
    calls = (("counted", counted), ("counted 2", counted), ("not counted", None), ("not counted 2", None))
    for call, options in calls:
        client = caller(40)
        await client.send(call, stream=True, stream_options=options)
        await client.hear(b"data: ", 150)
        client.hang_up()
        await aborted(call)

    # between the last piece of the answer and its end
    for call in ("last", "last 2"):
        client = caller(40)
        await client.send(call, 100, stream=True)
        await client.hear(b'"finish_reason":"length"')
        client.hang_up()
        await aborted(call, CallEnd.ABORTED, CallEnd.COMPLETED)

    # while a whole answer is being generated
    for call in ("generated", "generated 2"):
        client = caller(40)
        generated = await engine_count(world, "generation_tokens_total")
        await client.send(call, stream=False)
        await until_engine(world, "generation_tokens_total", at_least=generated + 100)
        client.hang_up()
        await aborted(call)

    # the client of a library does the same
    agent.messages = [*kept, question()]
    async with agent.streaming(ENDLESS, {"ignore_eos": True}, hang_up_at=100, call="library"):
        pass
    await aborted("library")

    assert "sending" not in [e.call_id for e in world.events(CallArrived)]
    agent.messages = [*kept, question()]
    await agent.call()
    await world.until_confirmed(await agent.keys())
    assert set(await agent.keys()) <= alive(world)
    await agent.ops({"op": "close"})
    await until_no_zombie(world, before)
    assert not alive(world)

    async def no_task_left() -> bool:
        return len(asyncio.all_tasks()) <= num_tasks

    await polled(no_task_left)


async def test_streams_of_retries_leave_nothing_behind(world: World) -> None:
    cache = world.cache
    other = world.agent("other")
    await other.say(prose(40))
    others = await other.keys()
    await world.until_confirmed(others)
    before = await directory(world)
    agent = world.agent("retrier", system=other.messages[0]["content"])
    agent.messages.append(question(60))

    async def attempt(number: int, call: str, num_events: int) -> None:
        """One attempt that goes after some pieces, or as soon as it is known."""
        client = Caller(world, agent, WAYS[number % 2])
        await client.send(call, stream=bool(number % 3))
        if num_events and number % 3:
            await client.hear(b"data: ", num_events)
        else:
            await world.until(lambda: mapped(world, call))
        client.hang_up()

    for number in range(6):  # one behind the other
        await attempt(number, "c-1", 5 * number)
    await asyncio.gather(*(attempt(n, "c-1", 5 * n) for n in range(6)))
    agent.messages[-1] = question(60)
    await asyncio.gather(*(attempt(n, f"c-{n}", 5 * n) for n in range(2, 8)))
    calls = ["c-1"] * 12 + [f"c-{n}" for n in range(2, 8)]
    await world.until(lambda: len(world.events(CallEnded)) >= len(calls) + 1)
    assert sorted(e.call_id for e in world.events(CallEnded) if e.call_id.startswith("c-")) == sorted(calls)
    await until_idle(world)
    assert_books_equal_a_recount(world)

    # The one that was meant all the time.
    await agent.call(1, call="c-1")
    stored = await agent.keys()
    await world.until_confirmed(stored)
    await until_no_zombie(world, before)
    assert set(stored) <= alive(world)
    # What a delete had taken out of one tier when the call came is alive again, in the other.
    assert NOWHERE not in await cache.where(stored)

    await agent.ops({"op": "close"})
    await until_no_zombie(world, before)
    assert await cache.where(others) == [BOTH] * len(others)
    state = world.state(agent.ctx)
    assert state is not None
    assert not state.versions
    assert not state.flights


class LateCache(LmcacheMp):
    """A cache whose word on what it holds comes only after `over` is set: too late to prove an absence."""

    def __init__(self, stack: EngineStack) -> None:
        super().__init__(
            stack.coordinator_url, [EngineAddress(stack.upstream_url)], chunk_size=stack.options.chunk_size
        )
        self.over = asyncio.Event()

    async def locate(self, namespace: Namespace, keys: Sequence[bytes]) -> Sequence[Presence]:
        await self.over.wait()
        return await super().locate(namespace, keys)


async def ends_inside_a_chunk(cache: Cache, messages: list[dict[str, str]]) -> None:
    """Lengthen the last message until half a chunk of the prompt is left behind the last whole one."""
    while len(await cache.tokens(messages)) % cache.chunk < cache.stack.options.block_size:
        messages[-1]["content"] += " x"


@pytest.mark.parametrize("found", [False, True])
async def test_an_uncounted_call_frees_what_it_computed_and_nothing_that_was_there(
    engine_stack: EngineStack, cache: Cache, tmp_path: Path, found: bool
) -> None:
    late = LateCache(engine_stack)
    async with world_of(cache, config_for(engine_stack, tmp_path), control=late) as world:
        agent = world.agent("uncounted")
        theirs: list[bytes] = []
        if found:  # somebody who is not followed had the same beginning first
            first = [*agent.messages, question()]
            await cache.direct(first, max_tokens=1)
            theirs = await cache.keys(first)
            await cache.await_tiers(theirs, BOTH)
            await cache.forget_engine_cache()
            agent.messages = [*first, {"role": "assistant", "content": "yes"}]
        agent.messages.append(question(60))
        await ends_inside_a_chunk(cache, agent.messages)
        agent.asked = list(agent.messages)
        keys = await agent.keys()
        theirs = [key for key in theirs if key in keys]
        client = Caller(world, agent, "end")
        await client.send("c-1", stream=True)
        await client.hear(b"data: ", 5)
        client.hang_up()
        await world.until(lambda: ended(world, "c-1"))
        late.over.set()
        own = [key for key in keys if key not in theirs]
        assert len(own) >= 4
        await world.until_confirmed(keys)
        await agent.ops({"op": "close"})
        await world.until_gone(own)
        await cache.await_tiers(own, NOWHERE)
        await world.sweep()
        assert await cache.where(theirs) == [BOTH] * len(theirs)
        assert len(theirs) >= (4 if found else 0)
        if found:
            await cache.forget_engine_cache()
            reply = await cache.direct(agent.asked, max_tokens=1)
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == cache.chunk * len(theirs)
