"""What clients of every age write on a connection, and what becomes of the requests that wait on it."""

import asyncio
import json

import pytest

from lifecycle.vocabulary import CallEnd
from proxy.http_server import MAX_HEAD_BYTES
from tests.proxy.data_path import BOTH, CHAT, JSON, Handler, path, piped
from tests.proxy.live_server import RawClient
from tests.proxy.scripted_upstream import Exchange

H2C = [
    (b"Connection", b"Upgrade, HTTP2-Settings"),
    (b"Upgrade", b"h2c"),
    (b"HTTP2-Settings", b"AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA"),
]
"""What Java's own client asks in its first request on a connection."""


async def echo(exchange: Exchange) -> None:
    await exchange.respond(200, await exchange.read_body())


@BOTH
@pytest.mark.parametrize("chunked", [False, True])
async def test_who_asks_for_another_protocol_is_served_in_this_one(handler: Handler, chunked: bool) -> None:
    async with path(echo, handler) as p:
        client = await RawClient.connect(p.port)
        for number in range(3):
            body = b'{"number": %d}' % number
            if chunked:
                await client.request(b"POST", CHAT, [*H2C, (b"Transfer-Encoding", b"chunked")])
                await client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            else:
                await client.request(b"POST", CHAT, [*H2C, *JSON], body)
            assert (await client.response()).body == body
        client.close()
        for exchange in p.engine.exchanges:
            assert not exchange.header(b"upgrade")
            assert not exchange.header(b"http2-settings")


@BOTH
async def test_the_body_of_a_declined_upgrade_may_come_later(handler: Handler) -> None:
    async with path(echo, handler) as p:
        client = await RawClient.connect(p.port)
        await client.request(b"POST", CHAT, [*H2C, (b"Content-Length", b"6")])
        for piece in (b"ab", b"cd", b"ef"):
            await client.send(piece)
            await asyncio.sleep(0)
        assert (await client.response()).body == b"abcdef"
        client.close()


@BOTH
async def test_trailers_are_no_headers(handler: Handler) -> None:
    async with path(echo, handler) as p:
        client = await RawClient.connect(p.port)
        await client.request(b"POST", CHAT, [(b"Transfer-Encoding", b"chunked")])
        await client.send(b"2\r\n{}\r\n0\r\nAuthorization: Bearer stolen\r\nX-Trailer: 1\r\n\r\n")
        assert (await client.response()).body == b"{}"
        client.close()
        (exchange,) = p.engine.exchanges
        assert not exchange.header(b"authorization")
        assert not exchange.header(b"x-trailer")


@BOTH
@pytest.mark.parametrize("num_behind", [1, 5])
async def test_a_hang_up_behind_pipelined_requests_reaches_the_one_that_runs(
    handler: Handler, num_behind: int
) -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.read_body()
        await asyncio.Event().wait()

    async with path(silent, handler) as p:
        client = await RawClient.connect(p.port)
        for _ in range(1 + num_behind):
            await client.request(b"POST", CHAT, JSON, b"{}")
        exchange = await p.engine.arrived()
        await exchange.body_read.wait()
        client.hang_up()
        await asyncio.wait_for(exchange.hung_up.wait(), 10)
        assert (await p.outcome()).end is CallEnd.ABORTED
        assert len(p.engine.exchanges) == 1


@pytest.mark.parametrize("line", [b"X-Long: ", b"GET /"])
async def test_a_head_without_an_end_is_refused(line: bytes) -> None:
    async with path(echo) as p:
        client = await RawClient.connect(p.port)
        start = line if line.startswith(b"GET") else b"GET / HTTP/1.1\r\nHost: x\r\n" + line
        client.writer.write(start + b"x" * (MAX_HEAD_BYTES + 1))
        response = await client.response()
        client.close()
        assert response.status == 400
        assert json.loads(response.body)["error"]["type"] == "kvtether_invalid_request"
        assert p.engine.exchanges == []


@BOTH
@pytest.mark.parametrize(
    "nonsense",
    [b"nonsense\r\n\r\n", b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n"],
)
async def test_what_came_whole_is_answered_though_nonsense_follows(handler: Handler, nonsense: bytes) -> None:
    refused = asyncio.Event()

    async def late(exchange: Exchange) -> None:
        body = await exchange.read_body()
        await refused.wait()
        await exchange.respond(200, body)

    async with path(late, handler) as p:
        client = await RawClient.connect(p.port)
        for number in range(2):
            await client.request(b"POST", CHAT, JSON, b"%d" % number)
        await client.send(nonsense)
        await p.engine.arrived()
        refused.set()
        for number in range(2):
            assert (await client.response()).body == b"%d" % number
        assert await client.reader.read() == b""
        client.close()
        assert len(p.engine.exchanges) == 2


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", b"GET /" + b"x" * MAX_HEAD_BYTES])
async def test_who_goes_on_sending_behind_nonsense_reads_why_it_is_refused(start: bytes) -> None:
    async with path(echo) as p:
        client = await RawClient.connect(p.port)
        client.writer.write(start + b"x" * 2**24)
        response = await client.response()
        assert (response.status, response.complete) == (400, True)
        assert await client.reader.read() == b""
        await client.writer.drain()
        client.close()


async def test_nonsense_in_a_body_that_is_being_answered_breaks_the_transfer() -> None:
    async def early(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.chunk(b"first")
        await exchange.hung_up.wait()

    async with path(early, piped) as p:
        client = await RawClient.connect(p.port)
        await client.request(b"POST", CHAT, [(b"Transfer-Encoding", b"chunked")])
        await client.read_head()
        assert await client.read_chunk() == b"first"
        await client.send(b"no size\r\n")
        assert await client.reader.read() == b""
        client.close()
        assert (await p.outcome()).end is CallEnd.ABORTED
