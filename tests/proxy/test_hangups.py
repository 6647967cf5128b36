"""Clients that go in any phase of a call: the engine is stopped, the books end the call, nothing is left."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lifecycle.core.events import CallArrived, CallEnded
from lifecycle.vocabulary import CallEnd
from tests.proxy.live_server import RawClient
from tests.proxy.scripted_upstream import Exchange, chat_chunks
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import SECONDS, Message, Whole, lifecycle, port_of, system, user, whole_proxy

CHAT = b"/v1/chat/completions"
LIST = [system("you are a toy that is left alone"), user("tell me something that fills some chunks")]
ANSWER = "something that the client does not wait for"

PHASES = ("prefill", "prefill of a whole answer", "decode", "whole answer", "before the end")


class Stopping:
    """The toy engine; a call that names a phase in its body is computed and then stopped there for ever."""

    def __init__(self, it: Whole) -> None:
        self._toy = it.toy
        self.stopped: asyncio.Queue[Exchange] = asyncio.Queue()

    async def script(self, exchange: Exchange) -> None:
        if exchange.target != CHAT:
            await self._toy.script(exchange)
            return
        body = json.loads(await exchange.read_body())
        phase = body.get("phase", "")
        if not phase:
            await self._toy.chat(exchange, body)
            return
        self._toy.compute(body, ANSWER)
        pieces = chat_chunks([ANSWER])
        if phase in ("decode", "before the end"):
            await exchange.start_stream()
            for piece in pieces[: 2 if phase == "decode" else -1]:
                await exchange.chunk(piece)
        elif phase == "whole answer":
            await exchange.head(200, [(b"Content-Type", b"application/json"), (b"Content-Length", b"999")])
            await exchange.write(b'{"id": "chatcmpl-1", "choices": [')
        self.stopped.put_nowait(exchange)
        await asyncio.Event().wait()


@asynccontextmanager
async def stopping(tmp_path: Path) -> AsyncIterator[tuple[Whole, Stopping]]:
    async with whole_proxy(tmp_path) as it:
        engine = Stopping(it)
        it.engine.script = engine.script
        yield it, engine


async def send(it: Whole, phase: str, call: str, messages: list[Message], share: float = 1.0) -> RawClient:
    """Send a call, or a share of its bytes, on a connection of its own."""
    body: dict[str, Any] = {"model": NAME, "messages": messages, "phase": phase}
    raw = json.dumps(body | {"stream": phase in ("prefill", "decode", "before the end")}).encode()
    client = await RawClient.connect(port_of(it))
    headers = [(n.encode(), v.encode()) for n, v in lifecycle(ctx="a", call=call).items()]
    await client.request(b"POST", CHAT, [*headers, (b"content-length", b"%d" % len(raw))])
    await client.send(raw[: int(len(raw) * share)])
    return client


def go(client: RawClient, way: str) -> None:
    """Hang up: by an ordinary end, or by a reset."""
    if way == "reset":
        sock: socket.socket = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.writer.transport.abort()


async def until_quiet(it: Whole, num_tasks: int) -> None:
    """Until no job waits and no more tasks run than before."""
    await it.runtime.mailboxes.settled()
    async with asyncio.timeout(SECONDS):
        while len(asyncio.all_tasks()) > num_tasks:
            await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=0.05)  # type: ignore[arg-type]


def nothing_is_held(it: Whole) -> None:
    state = it.context("a")
    assert not state.flights
    assert it.runtime.tracker.contexts.index.oldest_unknown_ns(state.namespace) is None


@pytest.mark.parametrize("way", ["end", "reset"])
@pytest.mark.parametrize("phase", PHASES)
async def test_in_every_phase_the_engine_stops_and_what_it_stored_is_freed(
    tmp_path: Path, phase: str, way: str
) -> None:
    async with stopping(tmp_path) as (it, engine):
        await it.chat(LIST[:1], lifecycle(ctx="a", call="1"))
        num_tasks = len(asyncio.all_tasks())
        client = await send(it, phase, "2", LIST)
        exchange = await asyncio.wait_for(engine.stopped.get(), SECONDS)
        if "prefill" not in phase:
            await client.read_head()
        go(client, way)
        await asyncio.wait_for(exchange.hung_up.wait(), SECONDS)
        await it.until(lambda: not it.context("a").flights)
        ends = [e.end for e in await it.events(CallEnded) if e.call_id == "2"]
        assert ends == [CallEnd.ABORTED]
        await until_quiet(it, num_tasks)
        nothing_is_held(it)
        await it.ops({"op": "close", "seq": 1, "ctx": "a"})
        await it.until(lambda: not it.cache.chunks)
        assert not it.context("a").versions


@pytest.mark.parametrize("way", ["end", "reset"])
async def test_of_a_call_that_was_never_sent_whole_nobody_hears(tmp_path: Path, way: str) -> None:
    async with stopping(tmp_path) as (it, _):
        await it.chat(LIST[:1], lifecycle(ctx="a", call="1"))
        num_tasks, num_calls = len(asyncio.all_tasks()), len(it.engine.exchanges)
        client = await send(it, "decode", "2", LIST, share=0.5)
        go(client, way)
        await until_quiet(it, num_tasks)
        assert [e.call_id for e in await it.events(CallArrived)] == ["1"]
        assert len(it.engine.exchanges) == num_calls


async def test_streams_of_retries_leave_no_job_no_task_and_no_hold(tmp_path: Path) -> None:
    async with stopping(tmp_path) as (it, engine):
        await it.chat(LIST[:1], lifecycle(ctx="a", call="1"))
        num_tasks = len(asyncio.all_tasks())

        async def attempt(call: str, phase: str, way: str, messages: list[Message]) -> None:
            client = await send(it, phase, call, messages)
            exchange = await asyncio.wait_for(engine.stopped.get(), SECONDS)
            go(client, way)
            await asyncio.wait_for(exchange.hung_up.wait(), SECONDS)

        for number in range(10):
            await attempt("2", PHASES[number % len(PHASES)], ("end", "reset")[number % 2], LIST)
        retries = [attempt("2", PHASES[n % len(PHASES)], "reset", LIST) for n in range(5)]
        others = [[*LIST[:1], user(f"{n} is another question, and not a short one")] for n in range(5)]
        calls = [attempt(f"c{n}", PHASES[n], "end", messages) for n, messages in enumerate(others)]
        async with asyncio.TaskGroup() as group:
            for each in (*retries, *calls):
                group.create_task(each)
        await it.until(lambda: it.context("a").attempts.get("2") == 15 and not it.context("a").flights)
        assert len([e for e in await it.events(CallEnded) if e.end is CallEnd.ABORTED]) == 20
        await until_quiet(it, num_tasks)
        nothing_is_held(it)
        await it.chat(LIST, lifecycle(ctx="a", call="2"))
        assert set(it.toy.keys(LIST)) <= set(it.cache.chunks)
        await it.ops({"op": "close", "seq": 1, "ctx": "a"})
        assert not it.context("a").versions
