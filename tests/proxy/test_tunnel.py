"""WebSockets through the proxy: a real client and a real server that must not notice it, and raw bytes."""

import asyncio
import datetime
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from lifecycle.core.ids import Namespace
from proxy.app import Serving, create_data_app, serving
from proxy.config import Config
from proxy.http_server import HandoverProtocol
from tests.proxy.api_keys import KEYS, bearer, keys
from tests.proxy.live_server import RawClient
from tests.proxy.live_server import serve as serve_app
from tests.proxy.scripted_upstream import Exchange, Script, ScriptedUpstream
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import configured, whole_proxy

PATH = "/v1/realtime"
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
MEGABYTES = os.urandom(5_000_000)

T = TypeVar("T")
Handler = Callable[[ServerConnection], Awaitable[None]]


async def echo(peer: ServerConnection) -> None:
    async for message in peer:
        await peer.send(message)


@asynccontextmanager
async def proxied(tmp_path: Path, url: str, **changes: Any) -> AsyncIterator[Serving]:
    async with serving(configured(tmp_path, url, models=(), **changes)) as up:
        yield up


@asynccontextmanager
async def engine(tmp_path: Path, handler: Handler = echo, **options: Any) -> AsyncIterator[str]:
    """A WebSocket server behind the proxy; gives the proxy's URL. `proxy_changes` configure the proxy."""
    changes = options.pop("proxy_changes", {})
    async with serve(handler, "127.0.0.1", 0, max_size=None, ping_interval=None, **options) as server:
        port = server.sockets[0].getsockname()[1]
        async with proxied(tmp_path, f"http://127.0.0.1:{port}", **changes) as up:
            yield up.data_url.replace("http:", "ws:") + PATH


def dial(url: str, **options: Any) -> connect:
    return connect(url, max_size=None, ping_interval=None, proxy=None, **options)


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


async def within(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, 20)


# -- a client and a server that speak WebSocket -----------------------------------------------------------


async def test_messages_of_every_kind_arrive_as_they_were_sent(tmp_path: Path) -> None:
    messages: list[str | bytes] = ["", "é😀", "x" * 200_000, b"", bytes(range(256)), MEGABYTES, "last"]
    async with engine(tmp_path) as url, dial(url, compression=None) as client:
        for message in messages:
            await client.send(message)
            assert await within(client.recv()) == message


async def test_fragments_stay_fragments(tmp_path: Path) -> None:
    fragments: list[list[str | bytes]] = [["a", "", "bc"], [b"1", MEGABYTES, b"3"]]
    heard: list[list[str | bytes]] = []

    async def handler(peer: ServerConnection) -> None:
        for _ in fragments:
            heard.append([piece async for piece in peer.recv_streaming()])
            await peer.send(heard[-1][:-1])

    async with engine(tmp_path, handler) as url, dial(url, compression=None) as client:
        for each in fragments:
            await client.send(each)
            assert [piece async for piece in client.recv_streaming()] == heard[-1]
        # This library ends a message that is sent in pieces with an empty one.
        assert heard == [[*each, each[0][:0]] for each in fragments]


async def test_pings_and_pongs_pass_both_ways(tmp_path: Path) -> None:
    pinged = asyncio.Event()

    async def handler(peer: ServerConnection) -> None:
        await (await peer.ping(b"from the engine"))
        pinged.set()
        await echo(peer)

    async with engine(tmp_path, handler) as url, dial(url) as client:
        await within(await client.ping(b"from the client"))
        await within(pinged.wait())


@pytest.mark.parametrize("code", [CloseCode.NORMAL_CLOSURE, CloseCode.TRY_AGAIN_LATER, 4321])
async def test_close_codes_and_reasons_pass_both_ways(tmp_path: Path, code: int) -> None:
    told: asyncio.Future[tuple[int | None, str | None]] = asyncio.get_running_loop().create_future()

    async def handler(peer: ServerConnection) -> None:
        if await peer.recv() == "you":
            await peer.close(code, "the engine's word")
        else:
            await peer.wait_closed()
            told.set_result((peer.close_code, peer.close_reason))

    async with engine(tmp_path, handler) as url:
        async with dial(url) as client:
            await client.send("you")
            with pytest.raises(ConnectionClosed):
                await within(client.recv())
            assert (client.close_code, client.close_reason) == (code, "the engine's word")
        async with dial(url) as client:
            await client.send("I")
            await client.close(code, "the client's word")
        assert await within(told) == (code, "the client's word")


async def test_compression_is_agreed_on_between_the_two(tmp_path: Path) -> None:
    async with engine(tmp_path, compression="deflate") as url:
        async with dial(url, compression="deflate") as client:
            assert client.response is not None
            assert "permessage-deflate" in client.response.headers["Sec-WebSocket-Extensions"]
            for message in ("again " * 50_000, "again " * 50_000, MEGABYTES):
                await client.send(message)
                assert await within(client.recv()) == message
        async with dial(url, compression=None) as client:
            assert client.response is not None
            assert "Sec-WebSocket-Extensions" not in client.response.headers


async def test_a_subprotocol_is_agreed_on_between_the_two(tmp_path: Path) -> None:
    async with (
        engine(tmp_path, subprotocols=["realtime", "other"]) as url,
        dial(url, subprotocols=["unknown", "other"]) as client,
    ):
        assert client.subprotocol == "other"


async def test_a_refusal_comes_back_with_its_status_headers_and_body(tmp_path: Path) -> None:
    def refuse(peer: ServerConnection, request: Request) -> Response:
        response = peer.respond(HTTPStatus.FORBIDDEN, "not you: é\n")
        response.headers["X-Why"] = "a reason"
        return response

    async with engine(tmp_path, process_request=refuse) as url:
        with pytest.raises(InvalidStatus) as refused:
            await within(_open(url))
        answer = refused.value.response
        assert (answer.status_code, answer.body) == (403, "not you: é\n".encode())
        assert answer.headers["X-Why"] == "a reason"


async def _open(url: str, **options: Any) -> ClientConnection:
    return await dial(url, **options)


async def test_many_at_once_do_not_mix(tmp_path: Path) -> None:
    async def talk(url: str, number: int) -> None:
        async with dial(url) as client:
            for turn in range(5):
                message = f"{number}/{turn} ".encode() * (1000 * (number % 7) + 1)
                await client.send(message)
                assert await client.recv() == message

    async with engine(tmp_path) as url, asyncio.TaskGroup() as group:
        for number in range(100):
            group.create_task(within(talk(url, number)))
        await within(asyncio.gather(*list(group._tasks)))


async def test_an_engine_behind_tls_is_reached_and_both_ends_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    gone = asyncio.Event()

    async def handler(peer: ServerConnection) -> None:
        try:
            await echo(peer)
        finally:
            gone.set()

    async with serve(handler, "127.0.0.1", 0, max_size=None, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        async with proxied(tmp_path, f"https://127.0.0.1:{port}") as up:
            url = up.data_url.replace("http:", "ws:") + PATH
            async with dial(url) as client:
                for message in ("x", MEGABYTES):
                    await client.send(message)
                    assert await within(client.recv()) == message
            assert client.close_code == CloseCode.NORMAL_CLOSURE
            await within(gone.wait())
            gone.clear()
            vanishing = await _open(url)
            vanishing.transport.abort()
            await within(gone.wait())


def self_signed(directory: Path) -> Path:
    """Key and certificate of 127.0.0.1 in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    serial = x509.random_serial_number()
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), serial, now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    path = directory / "engine.pem"
    path.write_bytes(pem + certificate.public_bytes(serialization.Encoding.PEM))
    return path


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


# -- keys, books, the end ---------------------------------------------------------------------------------


async def test_a_key_is_needed_and_stays_between_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    seen: list[str | None] = []

    async def handler(peer: ServerConnection) -> None:
        assert peer.request is not None
        seen.append(peer.request.headers.get("Authorization"))
        await echo(peer)

    async with engine(tmp_path, handler, proxy_changes={"api_keys": keys()}) as url:
        with pytest.raises(InvalidStatus) as refused:
            await _open(url)
        assert refused.value.response.status_code == 401
        with pytest.raises(InvalidStatus) as refused:
            await _open(url.replace(PATH, "/sleep"), additional_headers=bearer("a"))
        assert refused.value.response.status_code == 403
        async with dial(url, additional_headers=bearer("a")) as client:
            await client.send("x")
            assert await within(client.recv()) == "x"
        assert seen == [None]


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


async def test_a_shutdown_waits_for_tunnels_and_takes_no_new_ones(tmp_path: Path) -> None:
    async with serve(echo, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        config = configured(tmp_path, f"http://127.0.0.1:{port}", models=())
        client, ending, url = await _dialled_and_stopping(config)
        with pytest.raises(OSError):
            await _open(url)
        await client.send("still served")
        assert await within(client.recv()) == "still served"
        await client.close()
        assert client.close_code == CloseCode.NORMAL_CLOSURE
        await within(ending)


async def _dialled_and_stopping(config: Config) -> tuple[ClientConnection, asyncio.Future[None], str]:
    """A client whose proxy stops, and takes nobody new any more."""
    urls: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()

    async def run() -> None:
        async with serving(config) as up:
            urls.set_result(up.data_url.replace("http:", "ws:") + PATH)
            await stop.wait()

    ending = asyncio.ensure_future(run())
    url = await urls
    client = await dial(url)
    await client.send("hello")
    assert await client.recv() == "hello"
    stop.set()
    async with asyncio.timeout(20):
        while True:  # the listener is closed a moment after the stop was called
            try:
                (await RawClient.connect(int(url.split(":")[2].split("/")[0]))).close()
            except OSError:
                break
            await asyncio.sleep(0.05)
    return client, ending, url


async def test_a_tunnel_that_outlasts_the_drain_is_cut_on_both_sides(tmp_path: Path) -> None:
    gone = asyncio.Event()

    async def handler(peer: ServerConnection) -> None:
        try:
            await echo(peer)
        finally:
            gone.set()

    async with serve(handler, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with proxied(tmp_path, f"http://127.0.0.1:{port}") as up:
            # This server does not wait: it cancels what is under way, as ours does when the drain is over.
            async with serve_app(create_data_app(up.runtime), http=HandoverProtocol) as own_port:
                client = await _open(f"ws://127.0.0.1:{own_port}{PATH}")
                await client.send("hello")
                assert await within(client.recv()) == "hello"
            with pytest.raises(ConnectionClosedError):
                await within(client.recv())
            await within(gone.wait())
