"""Requests that ask for an upgrade: a WebSocket is offered to the application, any other wish is ignored."""

import asyncio
from typing import Any

import pytest

from proxy.forward import Send
from proxy.http_server import HandoverProtocol
from proxy.request_body import Receive, Scope, read_body
from proxy.tunnel import HANDOVER
from tests.proxy.live_server import RawClient, serve

WEBSOCKET = b"Connection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAI\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


class App:
    """Answers with method, path and body length; remembers what it was asked, and offered."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bytes, bool]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive)
        self.asked.append((scope["method"], scope["path"], body, HANDOVER in scope.get("extensions", {})))
        answer = f"{scope['method']} {scope['path']} {len(body)}".encode()
        await send({"type": "http.response.start", "status": 200, "headers": _length(answer)})
        await send({"type": "http.response.body", "body": answer, "more_body": False})


def _length(body: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-length", str(len(body)).encode())]


async def talk(app: Any, *pieces: bytes) -> bytes:
    """Everything the server says on one connection, up to its end of it or ours."""
    async with serve(app, http=HandoverProtocol) as port:
        client = await RawClient.connect(port)
        try:
            for piece in pieces:
                await client.send(piece)
                await asyncio.sleep(0)
            said = b""
            while b"GET /last" not in said:
                data = await asyncio.wait_for(client.reader.read(65536), 10)
                said += data
                if not data:
                    break
            return said
        finally:
            client.hang_up()


LAST = b"GET /last HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("framing", "on_the_wire", "body"),
    [
        (b"Content-Length: 5\r\n", b"hello", b"hello"),
        (b"Transfer-Encoding: chunked\r\n", b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", b"hello"),
        (b"Content-Length: 200000\r\n", b"x" * 200_000, b"x" * 200_000),
    ],
)
async def test_a_post_that_asks_for_http_2_is_answered_with_its_body_read(
    framing: bytes, on_the_wire: bytes, body: bytes, split: bool
) -> None:
    app = App()
    request = b"POST /v1/x HTTP/1.1\r\nHost: x\r\n" + H2C + framing + b"\r\n" + on_the_wire
    pieces = [request[:100], request[100:150], *([bytes((b,)) for b in request[150:260]]), request[260:]]
    said = await talk(app, *(pieces if split else [request]), LAST)
    assert app.asked == [("POST", "/v1/x", body, False), ("GET", "/last", b"", False)]
    assert said.count(b"HTTP/1.1 200 OK") == 2


async def test_requests_behind_an_ignored_wish_are_requests() -> None:
    app = App()
    one = b"GET /one HTTP/1.1\r\nHost: x\r\n" + H2C + b"\r\n"
    await talk(app, one * 1500 + LAST)
    assert app.asked == [("GET", "/one", b"", False)] * 1500 + [("GET", "/last", b"", False)]


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /x HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: x\r\n" + WEBSOCKET + b"Content-Length: 3\r\n\r\nabc",
        b"GET /x HTTP/1.1\r\nHost: x\r\n" + WEBSOCKET + b"Upgrade: h2c\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket, h2c\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: x\r\n" + WEBSOCKET + b"\r\n",
    ],
)
async def test_what_is_no_proper_handshake_is_a_request_like_any_other(request_: bytes) -> None:
    app = App()
    # HTTP/1.0 ends the connection with the answer.
    await talk(app, request_ if b"HTTP/1.0" in request_ else request_ + LAST)
    assert [(path, offered) for _, path, _, offered in app.asked][:1] == [("/x", False)]
    assert all(path in ("/x", "/last") for _, path, _, _ in app.asked)


@pytest.mark.parametrize("split", [False, True])
async def test_a_handshake_is_offered_and_what_is_behind_it_never_read_as_http(split: bool) -> None:
    app = App()
    handshake = b"GET /ws HTTP/1.1\r\nHost: x\r\n" + WEBSOCKET + b"\r"
    pieces = [bytes((b,)) for b in handshake] if split else [handshake]
    said = await talk(app, *pieces, b"\n" + SMUGGLED)
    assert app.asked == [("GET", "/ws", b"", True)]
    assert b"connection: close" in said
    assert said.endswith(b"GET /ws 0")


async def test_a_handshake_behind_other_requests_waits_for_its_turn() -> None:
    app = App()
    first = b"POST /first HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi"
    said = await talk(app, first + b"GET /ws HTTP/1.1\r\nHost: x\r\n" + WEBSOCKET + b"\r\n" + SMUGGLED)
    assert app.asked == [("POST", "/first", b"hi", False), ("GET", "/ws", b"", True)]
    assert said.endswith(b"GET /ws 0")


@pytest.mark.parametrize(
    "nonsense",
    [
        b"CONNECT engine:8000 HTTP/1.1\r\nHost: engine:8000\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
    ],
)
async def test_what_nobody_can_answer_is_refused(nonsense: bytes) -> None:
    app = App()
    said = await talk(app, nonsense)
    assert said.startswith(b"HTTP/1.1 400 Bad Request")
    assert app.asked == []


async def test_what_nobody_can_answer_behind_an_ignored_wish_ends_the_connection_behind_its_answer() -> None:
    app = App()
    said = await talk(app, b"GET /one HTTP/1.1\r\nHost: x\r\n" + H2C + b"\r\nnot HTTP\r\n\r\n" + LAST)
    assert [path for _, path, _, _ in app.asked] == ["/one"]
    assert said.startswith(b"HTTP/1.1 200 OK")
    assert said.endswith(b"GET /one 0")
    assert b"connection: close" in said


async def test_whoever_takes_over_gets_what_came_early_and_everything_after() -> None:
    heard = bytearray()
    told = asyncio.Event()

    class Taker(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            heard.extend(data)
            if heard.endswith(b"."):
                told.set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        handover = scope["extensions"][HANDOVER]
        transport, early = handover.take_over(Taker())
        heard[:0] = early
        transport.write(b"taken")
        await told.wait()
        transport.close()

    async with serve(app, http=HandoverProtocol) as port:
        client = await RawClient.connect(port)
        await client.send(b"GET /ws HTTP/1.1\r\nHost: x\r\n" + WEBSOCKET + b"\r\n" + b"early " * 50_000)
        assert await asyncio.wait_for(client.reader.readexactly(5), 10) == b"taken"
        await client.send(b"late.")
        assert await asyncio.wait_for(client.reader.read(), 10) == b""
        client.close()
    assert bytes(heard) == b"early " * 50_000 + b"late."
