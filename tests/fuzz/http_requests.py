"""What comes on a client's connection, in any cut: `python -m tests.fuzz.http_requests --seconds 60`.

Nothing that a client writes makes the server raise, and how the bytes were cut on their way changes neither
what is asked nor what is answered: two readers of one connection never see different requests.
"""

import asyncio
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from proxy.errors import ProxyError
from proxy.forward import Send
from proxy.http_server import HandoverProtocol
from proxy.request_body import Receive, Scope, read_body
from tests.fuzz.driver import run_for

TURNS = 40
"""Of the event loop after each piece: more than a request and its answer need."""

LAST_WORDS = re.compile(
    rb"HTTP/1.1 100 Continue\r\n\r\n|connection: close\r\n|HTTP/1.1 400 Bad Request\r\nconn(?s:.*)"
)
"""What depends on whether an answer was under way already when nonsense came: whether it says that it is the
last, or a refusal follows it; and whether a body is asked for that is there."""

lines = st.sampled_from(
    [
        b"GET /a HTTP/1.1",
        b"POST /b HTTP/1.1",
        b"POST /b HTTP/1.0",
        b"HEAD //%2F?q HTTP/1.1",
        b"CONNECT x:1 HTTP/1.1",
        b"Host: x",
        b"Content-Length: 3",
        b"Content-Length: 0",
        b"Content-Length: +3",
        b"Content-Length: 3, 3",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding:\tchunked",
        b"transfer-encoding : chunked",
        b"Connection: close",
        b"Connection: Upgrade",
        b"Upgrade: h2c",
        b"Expect: 100-continue",
        b"X: \xff",
        b" folded",
        b"3",
        b"abc",
        b"0",
        b"3;ext=1",
        b"ffffffffffffffffff",
        b"",
    ]
)
requests = st.sampled_from(
    [
        b"GET /whole HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /sized HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
        b"POST /chunked HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"POST /h2c HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc",
    ]
)
pieces = st.one_of(
    requests,
    lines.map(lambda line: line + b"\r\n"),
    st.tuples(lines, st.sampled_from([b"\n", b"\r", b"\r\n\r\n", b"\x00", b""])).map(b"".join),
    st.binary(max_size=6),
)
wires = st.lists(pieces, min_size=1, max_size=12).map(b"".join)
cuts = st.lists(st.integers(0, 400), max_size=8)


class Wire:
    """A transport that writes down what is said on it."""

    def __init__(self) -> None:
        self.said = bytearray()
        self.over = False

    def write(self, data: bytes) -> None:
        if not self.over:
            self.said += data

    def close(self) -> None:
        self.over = True

    write_eof = abort = close

    def is_closing(self) -> bool:
        return self.over

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def pause_reading(self) -> None:
        """A client that sends on all the same."""

    resume_reading = pause_reading


async def heard(wire: bytes, places: list[int]) -> tuple[list[tuple[Any, ...]], bytes, list[object]]:
    """What was asked, what was answered and what failed when the wire comes cut at these places."""
    asked: list[tuple[Any, ...]] = []
    failures: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        status = 200
        try:
            body = await read_body(scope, receive)
        except ProxyError as refusal:
            body, status = type(refusal).__name__.encode(), 400
        else:
            asked.append((scope["method"], scope["raw_path"], tuple(scope["headers"]), body))
        head = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, ws="none", server_header=False, date_header=False
    )
    config.load()
    state = ServerState()
    protocol = HandoverProtocol(config=config, server_state=state, app_state={})
    transport = Wire()
    protocol.connection_made(transport)  # type: ignore[arg-type]
    for start, end in pairwise(sorted({0, len(wire), *places})):
        if transport.over:
            break
        protocol.data_received(wire[start:end])
        for _ in range(TURNS):
            await asyncio.sleep(0)
    said = LAST_WORDS.sub(b"", bytes(transport.said))
    protocol.connection_lost(None)
    await asyncio.gather(*state.tasks)
    return asked, said, failures


@given(wires, cuts)
def no_cut_changes_what_is_asked(wire: bytes, cuts: list[int]) -> None:
    """Nor what is answered, so that nobody reads one answer in another's place."""
    at_once, answers, failures = asyncio.run(heard(wire, []))
    in_pieces, others, more_failures = asyncio.run(heard(wire, [cut % len(wire) for cut in cuts if wire]))
    assert (failures, more_failures) == ([], [])
    assert at_once == in_pieces
    assert answers == others


PROPERTIES: list[Callable[[], None]] = [no_cut_changes_what_is_asked]

if __name__ == "__main__":
    run_for(PROPERTIES)
