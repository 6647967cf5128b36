"""Upgraded connections through the proxy, byte by byte: the handshake, both directions, and every end."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lifecycle.core.ids import Namespace
from proxy.tunnel import Tunnel
from tests.proxy.live_server import RawClient
from tests.proxy.plain_proxy import MEGABYTES, proxied, within
from tests.proxy.scripted_upstream import Exchange, Script, ScriptedUpstream
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import whole_proxy

HANDSHAKE = (
    (b"Upgrade", b"websocket"),
    (b"Connection", b"keep-alive, Upgrade"),
    (b"Sec-WebSocket-Version", b"13"),
    (b"Sec-WebSocket-Key", b"dGhlIHNhbXBsZSBub25jZQ=="),
)
SWITCH = (
    (b"Upgrade", b"WebSocket"),
    (b"X-Odd", b"1"),
    (b"connection", b"upgrade"),
    (b"X-Odd", b"2"),
    (b"Sec-WebSocket-Accept", b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="),
)
SWITCHED = b"".join(
    [
        b"HTTP/1.1 101 Scripted\r\n",
        *(b"%b: %b\r\n" % header for header in SWITCH),
        b"\r\n",
    ]
)


@asynccontextmanager
async def raw(tmp_path: Path, script: Script) -> AsyncIterator[tuple[int, asyncio.Queue[Exchange]]]:
    """A scripted engine behind the proxy; gives the proxy's port, and what clients of it asked the engine."""
    arrived: asyncio.Queue[Exchange] = asyncio.Queue()

    async def and_else(exchange: Exchange) -> None:
        if exchange.header(b"user-agent"):  # the proxy's own question
            await exchange.respond(503)
            exchange.cut()
        else:
            arrived.put_nowait(exchange)
            await script(exchange)

    async with ScriptedUpstream(and_else) as upstream, proxied(tmp_path, upstream.url) as up:
        yield int(up.data_url.rpartition(":")[2]), arrived


@asynccontextmanager
async def handshake(port: int, behind: bytes = b"") -> AsyncIterator[RawClient]:
    client = await RawClient.connect(port)
    lines = [b"GET /v1/realtime?model=m%2F1 HTTP/1.1", b"Host: client.example"]
    lines += [name + b": " + value for name, value in HANDSHAKE]
    try:
        await client.send(b"\r\n".join(lines) + b"\r\n\r\n" + behind)
        yield client
    finally:
        client.hang_up()


# -- bytes ------------------------------------------------------------------------------------------------


async def test_the_handshake_arrives_with_its_own_headers_and_the_answer_as_it_is(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.head(101, SWITCH)
        await exchange.write(b"\x81\x02hi")
        await exchange.reader.read()

    async with raw(tmp_path, script) as (port, arrived), handshake(port) as client:
        assert await within(client.reader.readexactly(len(SWITCHED) + 4)) == SWITCHED + b"\x81\x02hi"
        asked = await within(arrived.get())
        assert (asked.method, asked.target) == ("GET", b"/v1/realtime?model=m%2F1")
        assert sorted(asked.headers) == [
            (b"connection", b"Upgrade"),
            (b"host", b"127.0.0.1:%d" % asked.writer.get_extra_info("sockname")[1]),
            (b"sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ=="),
            (b"sec-websocket-version", b"13"),
            (b"upgrade", b"websocket"),
        ]
        client.close()


async def test_what_came_right_behind_the_handshake_arrives_first(tmp_path: Path) -> None:
    early, later = MEGABYTES[:300_000], MEGABYTES[300_000:400_000]

    async def script(exchange: Exchange) -> None:
        await asked.wait()
        await exchange.head(101, SWITCH)
        await exchange.write(await exchange.reader.readexactly(len(early + later)))
        exchange.cut()

    asked = asyncio.Event()
    async with raw(tmp_path, script) as (port, arrived), handshake(port, early[:1000]) as client:
        client.writer.write(early[1000:])
        await within(arrived.get())
        asked.set()
        await client.send(later)
        assert await within(client.reader.read(-1)) == SWITCHED + early + later


@pytest.mark.parametrize("direction", ["to the engine", "to the client"])
async def test_half_an_end_leaves_the_other_direction_open(tmp_path: Path, direction: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.head(101, SWITCH)
        if direction == "to the engine":
            heard = await exchange.reader.read()
            await exchange.write(heard[::-1])
            exchange.cut()
        else:
            await exchange.write(b"all I say")
            exchange.writer.write_eof()
            heard_last.set_result(await exchange.reader.read())

    heard_last: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    async with raw(tmp_path, script) as (port, _), handshake(port) as client:
        assert await within(client.reader.readexactly(len(SWITCHED))) == SWITCHED
        if direction == "to the engine":
            await client.send(b"abc")
            client.writer.write_eof()
            assert await within(client.reader.read()) == b"cba"
        else:
            assert await within(client.reader.read()) == b"all I say"
            await client.send(b"still here")
            client.close()
            assert await within(heard_last) == b"still here"


async def test_a_reset_by_the_engine_is_a_reset_for_the_client(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.head(101, SWITCH)
        await exchange.reader.readexactly(2)
        exchange.reset()

    async with raw(tmp_path, script) as (port, _), handshake(port) as client:
        assert await within(client.reader.readexactly(len(SWITCHED))) == SWITCHED
        await client.send(b"go")
        with pytest.raises(ConnectionResetError):
            await within(client.reader.read())


async def test_a_reset_by_the_client_is_a_reset_for_the_engine(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.head(101, SWITCH)
        try:
            await exchange.reader.read()
            seen.set_result(None)
        except ConnectionResetError as error:
            seen.set_result(error)

    seen: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    async with raw(tmp_path, script) as (port, _), handshake(port) as client:
        await within(client.reader.readexactly(len(SWITCHED)))
        sock: socket.socket = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.hang_up()
        assert isinstance(await within(seen), ConnectionResetError)


async def test_a_client_that_hangs_up_before_the_answer_stops_the_engine(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        exchange.body_read.set()
        await asyncio.Event().wait()

    async with raw(tmp_path, script) as (port, arrived), handshake(port) as client:
        asked = await within(arrived.get())
        client.hang_up()
        await within(asked.hung_up.wait())


@pytest.mark.parametrize("direction", ["to the engine", "to the client"])
async def test_a_slow_reader_slows_the_sender(tmp_path: Path, direction: str) -> None:
    """Nobody reads: what the sender gets rid of is what sockets and a bounded buffer hold, far from all."""
    everything = 64 * 1024 * 1024
    sent = 0
    stuck, read_on = asyncio.Event(), asyncio.Event()

    async def pour(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        piece = bytes(1024 * 1024)
        while sent < everything:
            writer.write(piece)
            try:
                await asyncio.wait_for(asyncio.shield(writer.drain()), 1)
            except TimeoutError:
                stuck.set()
                await writer.drain()
            sent += len(piece)
        writer.write_eof()

    async def drink(reader: asyncio.StreamReader) -> int:
        await read_on.wait()
        size = 0
        while data := await reader.read(1024 * 1024):
            size += len(data)
        return size

    async def script(exchange: Exchange) -> None:
        await exchange.head(101, SWITCH)
        if direction == "to the client":
            await pour(exchange.writer)
        else:
            drunk.set_result(await drink(exchange.reader))

    drunk: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with raw(tmp_path, script) as (port, _), handshake(port) as client:
        await within(client.reader.readexactly(len(SWITCHED)))
        pouring = None
        if direction == "to the engine":
            pouring = asyncio.ensure_future(pour(client.writer))
        else:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await within(stuck.wait())
        assert sent < everything / 2
        if direction == "to the client":
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        read_on.set()
        total = await within(drunk if pouring else drink(client.reader))
        assert total == everything
        if pouring:
            await within(pouring)
        client.close()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"HTTP/1.1 101 Odd\r\nUpgrade: websocket\r\n\r\n", 502),
        (b"HTTP/1.1 426 Odd\r\nUpgrade: websocket\r\nContent-Length: 2\r\n\r\nno", 426),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 404 Odd\r\nContent-Length: 0\r\n\r\n", 404),
        (b"HTTP/1.1 200 Odd\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 200),
    ],
)
async def test_whatever_is_no_switch_is_an_answer_and_what_came_behind_is_never_a_request(
    tmp_path: Path, head: bytes, status: int
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(head)
        await exchange.reader.read()

    async with (
        raw(tmp_path, script) as (port, arrived),
        handshake(port, b"POST /sleep HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n") as client,
    ):
        answer = await client.response()
        assert (answer.status, answer.header(b"connection")) == (status, [b"close"])
        assert await within(client.reader.read()) == b""
        assert (await within(arrived.get())).target == b"/v1/realtime?model=m%2F1"
        assert arrived.empty()


async def test_an_early_hint_before_the_switch_is_left_out(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.head(103, [(b"Link", b"x")])
        await exchange.head(101, SWITCH)
        exchange.cut()

    async with raw(tmp_path, script) as (port, _), handshake(port) as client:
        assert await within(client.reader.read()) == SWITCHED


async def test_an_engine_that_is_away_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with (
        proxied(tmp_path, f"http://127.0.0.1:{port}") as up,
        handshake(int(up.data_url.rpartition(":")[2])) as client,
    ):
        assert (await client.response()).status == 502


@pytest.mark.parametrize("heard", [False, True], ids=["not told yet", "told before"])
async def test_a_client_that_left_in_the_moment_of_the_handover_ends_the_tunnel(heard: bool) -> None:
    """Whoever had the connection before may have been told that it is gone; nobody tells it twice."""
    loop = asyncio.get_running_loop()
    gone, behind = asyncio.Event(), asyncio.Queue[asyncio.StreamReader]()

    class Before(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            gone.set()

    class Handover:
        def take_over(self, protocol: asyncio.Protocol) -> tuple[asyncio.Transport, bytes]:
            client.set_protocol(protocol)
            return client, b"early"

        def connection_lost(self, exc: Exception | None) -> None:
            pass

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        behind.put_nowait(reader)

    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client, _ = await loop.create_connection(Before, "127.0.0.1", port)
    await within(behind.get())
    engine, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", port)
    far_engine = await within(behind.get())
    client.abort()
    if heard:
        await within(gone.wait())
    tunnel = Tunnel(Handover(), lambda: None)
    tunnel.begin(engine, b"HTTP/1.1 101 Switching\r\n\r\n", b"")
    await within(tunnel.run())
    assert await within(far_engine.read()) == b"", "the engine hears nothing but the end"
    for writer in writers:
        writer.close()
    server.close()


# -- books ------------------------------------------------------------------------------------------------


async def test_a_tunnel_counts_as_inference_that_is_not_followed_and_a_refusal_does_not(
    tmp_path: Path,
) -> None:
    granted = False

    async def script(exchange: Exchange) -> None:
        if exchange.target != b"/v1/realtime?model=m%2F1":
            await exchange.read_body()
            await exchange.respond_json({"data": [{"id": NAME}], "version": "1"})
        elif granted:
            await exchange.head(101, SWITCH)
            exchange.cut()
        else:
            await exchange.respond(403, b"no")

    async with whole_proxy(tmp_path, script=script, ready=False) as it:
        port = int(it.up.data_url.rpartition(":")[2])
        index = it.runtime.tracker.contexts.index
        async with handshake(port) as client:
            assert (await client.response()).status == 403
        it.runtime.tracking.untracked.note(Namespace(NAME, "later"), "a barrier")
        await it.until(lambda: index.last_untracked_ns(Namespace(NAME, "later")) is not None)
        assert index.last_untracked_ns(Namespace(NAME)) is None
        granted = True
        async with handshake(port) as client:
            await within(client.reader.read())
        await it.until(lambda: index.last_untracked_ns(Namespace(NAME)) is not None)
