"""Connections that break, stall or crawl in every phase: who is told, who is stopped, what the books say."""

import asyncio
import hashlib
import json
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle.vocabulary import CallEnd
from tests.proxy.live_server import RawClient, RawResponse
from tests.proxy.scripted_upstream import DONE, Exchange, Script, chat_chunks
from tests.proxy.torture import CHAT, ROADS, Torture, chat, named, unlabelled
from tests.proxy.whole_proxy import SECONDS

EVENTS = chat_chunks(["a", "b"])


async def asked(torture: Torture, road: bytes, call: str) -> RawResponse:
    client = await torture.client()
    await client.request(b"POST", road, named("ends", call), chat(stream=True))
    response = await client.response()
    client.close()
    return response


async def healthy(torture: Torture) -> None:
    """Whatever happened, the next call is served."""

    async def script(exchange: Exchange) -> None:
        await exchange.respond(200, await exchange.read_body())

    torture.engine(script)
    assert (await asked(torture, ROADS[-1], "next")).body == chat(stream=True)


def stopping(way: str, *said: bytes, reads: bool = True) -> Script:
    """The engine says this, and then its connection ends in this way."""

    async def script(exchange: Exchange) -> None:
        if reads:
            await exchange.read_body()
        for piece in said:
            await exchange.write(piece)
            await asyncio.sleep(0)
        if way == "half-close":
            exchange.writer.write_eof()
            exchange.keep_alive = False
            await exchange.hung_up.wait()
        else:
            getattr(exchange, way)()

    return script


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
SIZED_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


BEFORE_AN_ANSWER = {
    "before the body was read": ((), False),
    "before the head": ((), True),
    "in the status line": ((b"HTTP/1.1 20",), True),
    "in the head": ((b"HTTP/1.1 200 OK\r\nContent-Type: te",), True),
    "behind an interim answer": ((b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n",), True),
    "in nonsense": ((b"SSH-2.0-OpenSSH_9.6\r\n\r\n",), True),
    "behind a status that there is not": ((b"HTTP/1.1 600 Odd\r\nContent-Length: 0\r\n\r\n",), True),
    "behind a status below all": ((b"HTTP/1.1 042 Odd\r\nContent-Length: 0\r\n\r\n",), True),
    "behind a coding that would be lost": (
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",),
        True,
    ),
    "behind two framings": (
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\nab\r\n0\r\n\r\n",),
        True,
    ),
}


@pytest.mark.parametrize(
    ("phase", "way"),
    [
        (p, w)
        for p in BEFORE_AN_ANSWER
        for w in ("cut", "reset", "half-close")
        if BEFORE_AN_ANSWER[p][1] or w != "half-close"
    ],
)
def test_an_engine_that_ends_before_it_answered_is_a_502_of_ours(
    torture: Torture, phase: str, way: str
) -> None:
    said, reads = BEFORE_AN_ANSWER[phase]
    for road in ROADS:
        torture.engine(stopping(way, *said, reads=reads))
        call = f"{phase}, {way}"
        response = torture.run(asked(torture, road, call))
        assert (response.status, response.complete) == (502, True)
        assert json.loads(response.body)["error"]["type"] == "kvtether_upstream_broken"
        if road == CHAT:
            assert torture.run(torture.end_of(call)) is CallEnd.FAILED
    torture.run(healthy(torture))


IN_AN_ANSWER = {
    "behind the head": ((STREAM_HEAD,), b""),
    "behind an event": ((STREAM_HEAD, chunk(EVENTS[0])), EVENTS[0]),
    "in a chunk's size": ((STREAM_HEAD, chunk(EVENTS[0]), b"1"), EVENTS[0]),
    "in a chunk": ((STREAM_HEAD, chunk(EVENTS[0])[:-9]), EVENTS[0][:-7]),
    "in a sized body": ((SIZED_HEAD, b'{"choices": ['), b'{"choices": ['),
    "in the last chunk": ((STREAM_HEAD, chunk(EVENTS[0]), b"0\r\n"), EVENTS[0]),
}


@pytest.mark.parametrize("way", ["cut", "half-close"])
@pytest.mark.parametrize("phase", IN_AN_ANSWER)
def test_an_engine_that_ends_in_its_answer_breaks_the_transfer(
    torture: Torture, phase: str, way: str
) -> None:
    said, heard = IN_AN_ANSWER[phase]
    for road in ROADS:
        torture.engine(stopping(way, *said))
        call = f"{phase}, {way}"
        response = torture.run(asked(torture, road, call))
        assert (response.status, response.body, response.complete) == (200, heard, False)
        if road == CHAT:
            assert torture.run(torture.end_of(call)) is CallEnd.FAILED
    torture.run(healthy(torture))


def test_an_answer_that_said_done_was_whole_though_its_transfer_broke(torture: Torture) -> None:
    torture.engine(stopping("cut", STREAM_HEAD, *map(chunk, EVENTS)))
    response = torture.run(asked(torture, CHAT, "done, then cut"))
    assert response.body == b"".join(EVENTS)
    assert response.body.endswith(DONE)
    assert not response.complete
    assert torture.run(torture.end_of("done, then cut")) is CallEnd.COMPLETED


WHOLE_ANSWERS = {
    "chunked": STREAM_HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n",
    "sized": SIZED_HEAD + b"{" + b" " * 98 + b"}",
    "early hints": b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + SIZED_HEAD + b"{" + b" " * 98 + b"}",
}


@settings(max_examples=60)
@given(
    st.sampled_from(ROADS),
    st.sampled_from(sorted(WHOLE_ANSWERS)),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["cut", "reset", "half-close"]),
)
def test_an_engine_that_ends_anywhere_in_its_answer_is_never_taken_for_one_that_ended_it(
    torture: Torture, road: bytes, framing: str, share: float, way: str
) -> None:
    wire = WHOLE_ANSWERS[framing]
    said = wire[: int(len(wire) * share)]
    torture.engine(stopping(way, said))
    response = torture.run(asked(torture, road, "anywhere"))
    if response.status == 502:
        # With a reset also what was said before it may be lost.
        assert way == "reset" or not said.partition(b"200 OK")[2].partition(b"\r\n\r\n")[1]
        assert json.loads(response.body)["error"]["type"] == "kvtether_upstream_broken"
    else:
        whole = b"".join(EVENTS) if framing == "chunked" else wire.partition(b"{")[1] + b" " * 98
        assert (response.status, response.complete) == (200, False)
        assert whole.startswith(response.body)


# -- clients that go --------------------------------------------------------------------------------------


def leave(client: RawClient, way: str) -> None:
    if way == "half-close":
        client.writer.write_eof()
        return
    if way == "reset":
        sock: socket.socket = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.hang_up()


async def silent(exchange: Exchange) -> None:
    await exchange.read_body()
    await asyncio.Event().wait()


async def streaming(exchange: Exchange) -> None:
    await exchange.read_body()
    await exchange.start_stream()
    await exchange.chunk(EVENTS[0])
    await asyncio.Event().wait()


@pytest.mark.parametrize("way", ["end", "reset", "half-close"])
@pytest.mark.parametrize("num_pipelined", [1, 3])
@pytest.mark.parametrize("script", [silent, streaming])
def test_a_client_that_goes_stops_the_engine_also_with_requests_behind(
    torture: Torture, script: Script, num_pipelined: int, way: str
) -> None:
    async def goes(road: bytes, call: str) -> None:
        engine = torture.it.engine
        before = len(engine.exchanges)
        client = await torture.client()
        for number in range(num_pipelined):
            await client.request(b"POST", road, named("gone", f"{call}{number}"), chat(stream=True))
        async with asyncio.timeout(SECONDS):
            while len(engine.exchanges) == before:
                await engine.arrived()
            exchange = engine.exchanges[before]
            await exchange.body_read.wait()
            if script is streaming:
                await client.read_head()
            leave(client, way)
            await exchange.hung_up.wait()
        client.hang_up()
        assert len(engine.exchanges) == before + 1

    torture.engine(script)
    for road in ROADS:
        call = f"{script.__name__} {num_pipelined} {way} "
        torture.run(goes(road, call))
        if road == CHAT:
            assert torture.run(torture.end_of(f"{call}0")) is CallEnd.ABORTED


@pytest.mark.parametrize("way", ["end", "reset", "half-close"])
def test_a_client_that_goes_while_it_sends_leaves_nothing_behind(torture: Torture, way: str) -> None:
    async def deaf(exchange: Exchange) -> None:
        await asyncio.Event().wait()

    async def goes(road: bytes) -> None:
        client = await torture.client()
        await client.request(b"POST", road, [(b"Content-Length", b"1000")], None)
        await client.send(b"x" * 500)
        await torture.until_in_flight(1)
        leave(client, way)
        await torture.until_in_flight(0)
        client.hang_up()

    torture.engine(deaf)
    for road in ROADS:
        torture.run(goes(road))
    torture.run(healthy(torture))


@settings(max_examples=60)
@given(
    st.sampled_from(ROADS),
    st.booleans(),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["end", "reset", "half-close"]),
)
def test_a_client_that_goes_anywhere_in_its_request_leaves_nothing_behind(
    torture: Torture, road: bytes, chunked: bool, share: float, way: str
) -> None:
    """What was not asked to its end is not run: the engine never sees it whole."""
    body = chat(stream=True)
    head = b"POST %b HTTP/1.1\r\nHost: x\r\n" % road
    if chunked:
        wire = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(body[:9]) + chunk(body[9:]) + b"0\r\n\r\n"
    else:
        wire = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    taken: list[Exchange] = []

    async def takes(exchange: Exchange) -> None:
        await exchange.read_body()
        taken.append(exchange)
        await exchange.respond(200)

    async def goes() -> None:
        client = await torture.client()
        await client.send(wire[: int(len(wire) * share)])
        leave(client, way)
        await torture.until_in_flight(0)
        client.hang_up()

    torture.engine(takes)
    torture.run(goes())
    torture.run(healthy(torture))
    assert taken == []


# -- slow ones --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("road", ROADS)
def test_a_client_that_does_not_read_stalls_its_own_call_only_and_loses_nothing(
    torture: Torture, road: bytes
) -> None:
    piece = b"data: " + b"x" * 100_000 + b"\n\n"
    num_pieces = 200
    stuck = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.start_stream()
        for _ in range(num_pieces):
            exchange.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if exchange.writer.transport.get_write_buffer_size() > 10 * len(piece):
                # More than the sockets hold waits here: nobody reads it.
                stuck.set()
                await exchange.writer.drain()
        await exchange.end_stream()

    async def slow() -> None:
        client = await torture.client()
        await client.request(b"POST", road, (), chat(stream=True))
        await asyncio.wait_for(stuck.wait(), SECONDS)
        await healthy(torture)
        response = await client.response()
        client.close()
        assert response.complete
        assert hashlib.sha256(response.body).digest() == hashlib.sha256(piece * num_pieces).digest()

    torture.engine(script)
    torture.run(slow())


@pytest.mark.parametrize("road", ROADS)
def test_a_client_that_sends_byte_by_byte_is_served_and_so_is_everybody_else(
    torture: Torture, road: bytes
) -> None:
    body = chat(stream=True)

    async def slow() -> None:
        client = await torture.client()
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % road
        wire = head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        for at in range(len(wire)):
            await client.send(wire[at : at + 1])
            if at % 50 == 0:
                await asyncio.sleep(0)
        response = await client.response()
        client.close()
        assert response.complete
        assert unlabelled(response.body) == body

    async def beside() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(slow())
            for _ in range(5):
                group.create_task(healthy(torture))

    torture.run(beside())


def test_an_engine_that_answers_byte_by_byte(torture: Torture) -> None:
    wire = STREAM_HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"

    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        for at in range(len(wire)):
            await exchange.write(wire[at : at + 1])
            await asyncio.sleep(0)

    for road in ROADS:
        torture.engine(script)
        response = torture.run(asked(torture, road, "byte by byte"))
        assert (response.body, response.complete) == (b"".join(EVENTS), True)
