"""Hang-ups, dead engines, timeouts and refusals: who learns what, and who is stopped."""

import asyncio
import json

import pytest

from lifecycle.vocabulary import CallEnd
from proxy.upstream import UpstreamTimeouts
from tests.proxy.data_path import (
    BOTH,
    CHAT,
    JSON,
    Handler,
    path,
    piped,
    tracked,
)
from tests.proxy.live_server import RawClient, RawResponse, fetch
from tests.proxy.scripted_upstream import (
    Exchange,
    Script,
    chat_chunks,
    openai_like,
)


async def _silent(exchange: Exchange) -> None:
    await exchange.read_body()
    await asyncio.Event().wait()


async def _silent_after_a_token(exchange: Exchange) -> None:
    await exchange.read_body()
    await exchange.start_stream()
    await exchange.chunk(chat_chunks(["a"])[1])
    await asyncio.Event().wait()


async def _silent_in_a_sized_answer(exchange: Exchange) -> None:
    await exchange.read_body()
    await exchange.head(200, [(b"Content-Type", b"application/json"), (b"Content-Length", b"100")])
    await exchange.write(b'{"choices":')
    await asyncio.Event().wait()


async def _flooding(exchange: Exchange) -> None:
    await exchange.read_body()
    await exchange.start_stream()
    while True:
        await exchange.chunk(b"data: " + b"x" * 100_000 + b"\n\n")


@BOTH
@pytest.mark.parametrize(
    ("script", "reads"),
    [(_silent, 0), (_silent_after_a_token, 1), (_silent_in_a_sized_answer, 1), (_flooding, 1)],
    ids=["before the head", "mid-stream", "in a sized answer", "while it does not read"],
)
async def test_a_hang_up_stops_the_engine_in_every_phase(
    handler: Handler, script: Script, reads: int
) -> None:
    async with path(script, handler) as p:
        client = await RawClient.connect(p.port)
        await client.request(b"POST", CHAT, JSON, b"{}")
        exchange = await p.engine.arrived()
        await exchange.body_read.wait()
        if reads:
            await client.read_head()
            await client.reader.readexactly(5)
        client.hang_up()
        await asyncio.wait_for(exchange.hung_up.wait(), 10)
        assert (await p.outcome()).end is CallEnd.ABORTED
    if handler is tracked:
        assert p.ledger.told[-1] == "aborted"
        assert p.ledger.told.count("aborted") == 1
        if script is _silent_after_a_token:
            assert p.ledger.facts is not None
            assert p.ledger.facts.choices[0].content == "a"


async def test_a_hang_up_during_the_upload_stops_the_engine() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()

    async with path(script, piped) as p:
        client = await RawClient.connect(p.port)
        await client.request(b"POST", b"/x", [(b"Content-Length", b"1000")])
        await client.send(b"abc")
        exchange = await p.engine.arrived()
        client.hang_up()
        await asyncio.wait_for(exchange.hung_up.wait(), 10)
        assert (await p.outcome()).end is CallEnd.ABORTED


@BOTH
@pytest.mark.parametrize("way", ["cut", "reset"])
async def test_an_engine_that_dies_mid_stream_breaks_the_transfer(handler: Handler, way: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.start_stream()
        await exchange.chunk(chat_chunks(["a"])[1])
        await go_on.wait()
        getattr(exchange, way)()

    go_on = asyncio.Event()
    async with path(script, handler) as p:
        client = await RawClient.connect(p.port)
        await client.request(b"POST", CHAT, JSON, b"{}")
        await client.read_head()
        first = await client.read_chunk()
        go_on.set()
        rest = await client.reader.read()
        client.close()
        assert (await p.outcome()).end is CallEnd.FAILED
    assert first == chat_chunks(["a"])[1]
    assert rest == b""
    assert b"0\r\n\r\n" not in rest
    if handler is tracked:
        assert p.ledger.told[-1] == "failed"


@BOTH
async def test_an_engine_that_dies_in_a_sized_answer(handler: Handler) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.head(200, [(b"Content-Length", b"10")])
        await exchange.write(b"half")
        exchange.cut()

    async with path(script, handler) as p:
        response = await fetch(p.port, b"POST", CHAT, JSON, b"{}")
    assert (response.body, response.complete) == (b"half", False)


def own_error(response: RawResponse) -> tuple[int, str]:
    error = json.loads(response.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status, error["type"]


@BOTH
async def test_an_engine_that_dies_before_it_answers(handler: Handler) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        exchange.reset()

    async with path(script, handler) as p:
        response = await fetch(p.port, b"POST", CHAT, JSON, b"{}")
        assert own_error(response) == (502, "kvtether_upstream_broken")
        assert len(p.engine.exchanges) == 1
        assert (await p.outcome()).end is CallEnd.FAILED


@BOTH
async def test_no_engine_at_all(handler: Handler) -> None:
    async with path(openai_like, handler) as p:
        await p.engine.__aexit__(None, None, None)
        response = await fetch(p.port, b"POST", CHAT, JSON, b"{}")
    assert own_error(response) == (502, "kvtether_upstream_unreachable")


@BOTH
async def test_no_first_byte_in_time(handler: Handler) -> None:
    async with path(_silent, handler, UpstreamTimeouts(first_byte=0.05)) as p:
        response = await fetch(p.port, b"POST", CHAT, JSON, b"{}")
        assert own_error(response) == (504, "kvtether_upstream_timeout")
        await asyncio.wait_for(p.engine.exchanges[0].hung_up.wait(), 10)


async def test_silence_in_mid_stream_ends_in_a_broken_transfer() -> None:
    async with path(_silent_after_a_token, tracked, UpstreamTimeouts(idle=0.05)) as p:
        response = await fetch(p.port, b"POST", CHAT, JSON, b"{}")
        assert not response.complete
        await asyncio.wait_for(p.engine.exchanges[0].hung_up.wait(), 10)


@BOTH
@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_cap_is_refused(handler: Handler, declared: bool) -> None:
    async with path(openai_like, handler) as p:
        client = await RawClient.connect(p.port)
        if declared:
            await client.request(b"POST", CHAT, [(b"Content-Length", b"10000001")])
        else:
            await client.request(b"POST", CHAT, [(b"Transfer-Encoding", b"chunked")])
            piece = b"x" * 1_000_000
            for _ in range(11):
                client.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        response = await client.response()
        client.close()
    assert own_error(response) == (413, "kvtether_body_too_large")


@BOTH
async def test_contradicting_lengths_are_refused(handler: Handler) -> None:
    async with path(openai_like, handler) as p:
        both = [(b"Content-Length", b"3"), (b"Transfer-Encoding", b"chunked")]
        client = await RawClient.connect(p.port)
        await client.request(b"POST", CHAT, both)
        await client.send(b"3\r\nabc\r\n0\r\n\r\n")
        assert (await client.response()).status == 400
        client.close()
        assert p.engine.exchanges == []
