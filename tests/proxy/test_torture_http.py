"""HTTP/1.1 as it may be written: headers, targets, methods and framing, through the whole proxy."""

import asyncio
import json
import string
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.proxy.scripted_upstream import Exchange, chat_answer
from tests.proxy.torture import ROADS, Torture, chat

TOKEN = "!#$%&'*+-.^_`|~" + string.ascii_letters + string.digits
OF_OURS = (
    "x-kv-",
    "connection",
    "content-length",
    "transfer-encoding",
    "host",
    "expect",
    "upgrade",
    "te",
    "trailer",
)
HOP_BY_HOP = ("keep-alive", "proxy-")

names = st.text(TOKEN, min_size=1, max_size=12).filter(
    lambda name: not name.lower().startswith((*OF_OURS, *HOP_BY_HOP))
)
values = st.binary(max_size=20).map(
    lambda raw: bytes(byte for byte in raw if byte >= 0x20 and byte != 0x7F).strip(b" \t")
)
headers = st.lists(st.tuples(names.map(str.encode), values), max_size=6)


def lowered(pairs: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in pairs]


async def plain(exchange: Exchange) -> None:
    await exchange.read_body()
    await exchange.respond(200, b"" if exchange.method == "HEAD" else b"ok", [(b"Allow", b"GET, POST")])


def exchanged(
    torture: Torture, road: bytes, sent: list[tuple[bytes, bytes]], replied: list[tuple[bytes, bytes]]
):
    """The answer to a request with these headers, from an engine that answers with those."""

    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(200, b"ok", replied)

    async def ask():
        client = await torture.client()
        await client.request(b"POST", road, sent, chat())
        response = await client.response()
        client.close()
        return response

    torture.engine(script)
    return torture.run(ask())


@settings(max_examples=60)
@given(st.sampled_from(ROADS), headers, headers)
def test_any_headers_pass_both_ways_in_order(
    torture: Torture, road: bytes, sent: list[tuple[bytes, bytes]], replied: list[tuple[bytes, bytes]]
) -> None:
    response = exchanged(torture, road, sent, replied)
    arrived = lowered(torture.arrived.headers)
    assert [pair for pair in arrived if pair[0] not in (b"host", b"content-length")] == lowered(sent)
    assert response.body == b"ok"
    ours = [b"x-kv-context", b"x-kv-call", b"x-kv-mapping", b"server-timing", b"content-length"]
    if b"x-request-id" not in dict(lowered(replied)):
        ours.append(b"x-request-id")
    came = [pair for pair in lowered(response.headers) if pair[0] not in ours or pair in lowered(replied)]
    assert [pair for pair in came if pair[0] != b"content-length"] == lowered(replied)


segments = st.text(string.ascii_letters + string.digits + "-._~!$&'()*+,;=:@/", max_size=6) | st.sampled_from(
    ["%2F", "//", "..", ".", "%00", "%ff", "%E2%82%AC", "a%20b", ""]
)
queries = st.text(string.ascii_letters + string.digits + "-._~!$&'()*+,;=:@/?%", min_size=1, max_size=12)


@settings(max_examples=80)
@given(
    st.lists(segments, max_size=5).map("/".join),
    st.none() | queries,
    st.sampled_from(["GET", "DELETE", "PUT"]),
)
def test_any_target_arrives_as_it_was_written(
    torture: Torture, path: str, query: str | None, method: str
) -> None:
    target = ("/x/" + path + ("" if query is None else "?" + query)).encode()

    async def ask() -> int:
        client = await torture.client()
        await client.request(method.encode(), target)
        response = await client.response()
        client.close()
        return response.status

    torture.engine(plain)
    assert torture.run(ask()) == 200
    assert (torture.arrived.method, torture.arrived.target) == (method, target)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(
    "method", [b"HEAD", b"OPTIONS", b"GET", b"PUT", b"PATCH", b"DELETE", b"PURGE", b"QUERY"]
)
def test_every_method_passes_on_every_road_and_the_connection_goes_on(
    torture: Torture, road: bytes, method: bytes
) -> None:
    preflight = [(b"Origin", b"https://ui.example"), (b"Access-Control-Request-Method", b"POST")]

    async def ask() -> None:
        client = await torture.client()
        for _ in range(2):
            await client.request(method, road, preflight)
            response = await client.response(head_only=method == b"HEAD")
            assert (response.status, response.header(b"allow")) == (200, [b"GET, POST"])
            assert torture.arrived.header(b"origin") == [b"https://ui.example"]
        client.close()

    torture.engine(plain)
    torture.run(ask())
    assert torture.arrived.method == method.decode()


def test_pipelined_requests_of_every_road_are_answered_in_order(torture: Torture) -> None:
    """The first answers last: whoever asked behind it waits."""
    late = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        number = exchange.header(b"x-number")[0]
        await exchange.read_body()
        if number == b"0":
            await late.wait()
        await exchange.respond_json({**chat_answer("ok"), "number": int(number)})

    async def ask() -> None:
        client = await torture.client()
        for number in range(9):
            road = ROADS[number % len(ROADS)]
            await client.request(b"POST", road, [(b"X-Number", b"%d" % number)], chat())
        late.set()
        for number in range(9):
            assert json.loads((await client.response()).body)["number"] == number
        client.close()

    torture.engine(script)
    torture.run(ask())


requests = st.tuples(
    st.sampled_from(ROADS),
    st.binary(max_size=40),
    st.sampled_from(["none", "sized", "chunked", "expecting", "h2c"]),
    st.lists(st.integers(0, 40), max_size=3),
)


def on_the_wire(number: int, road: bytes, body: bytes, framing: str, cuts: list[int]) -> bytes:
    """A request in this framing; without one it has no body."""
    lines = [b"POST %b?%d HTTP/1.1" % (road, number), b"Host: x"]
    if framing == "none":
        return b"\r\n".join(lines) + b"\r\n\r\n"
    if framing == "chunked":
        places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
        pieces = [body[a:b] for a, b in pairwise(places)]
        framed = (
            b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nX-Count: 9\r\n\r\n"
        )
        return b"\r\n".join([*lines, b"Transfer-Encoding: chunked"]) + b"\r\n\r\n" + framed
    if framing == "expecting":
        lines.append(b"Expect: 100-continue")
    if framing == "h2c":
        lines += [b"Connection: Upgrade", b"Upgrade: h2c"]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body)]) + b"\r\n\r\n" + body


@settings(max_examples=40)
@given(st.lists(requests, min_size=1, max_size=6), st.lists(st.integers(0, 2000), max_size=8), st.booleans())
def test_any_requests_on_one_connection_cut_anywhere_are_answered_each_in_its_turn(
    torture: Torture,
    asked: list[tuple[bytes, bytes, str, list[int]]],
    cuts: list[int],
    nonsense: bool,
) -> None:
    """Also when what comes behind them is not HTTP."""
    wire = b"".join(on_the_wire(number, *request) for number, request in enumerate(asked))
    wire += b"nonsense\r\n\r\n" if nonsense else b""

    async def echo(exchange: Exchange) -> None:
        await exchange.respond(200, exchange.target + b" " + await exchange.read_body())

    async def ask() -> None:
        client = await torture.client()
        for start, end in pairwise(sorted({0, len(wire), *(cut % len(wire) for cut in cuts)})):
            await client.send(wire[start:end])
            await asyncio.sleep(0)
        for number, (road, body, framing, _) in enumerate(asked):
            response = await client.response()
            while response.status == 100:
                response = await client.response()
            assert response.status == 200
            said = b"" if framing == "none" else body
            assert response.body == b"%b?%d %b" % (road, number, said)
        if nonsense:
            rest = await client.reader.read()
            assert rest == b"" or rest.startswith(b"HTTP/1.1 400 ")
        client.close()

    torture.engine(echo)
    before = len(torture.it.engine.exchanges)
    torture.run(ask())
    assert len(torture.it.engine.exchanges) == before + len(asked)


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
REFUSED = {
    "length and chunks": HEAD
    + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "one length twice": HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a list of lengths": HEAD + b"Content-Length: 2, 2\r\n\r\n{}",
    "a signed length": HEAD + b"Content-Length: +2\r\n\r\n{}",
    "a coding that would be lost": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "another coding": HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
    "chunked twice": HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a bad chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "space before a colon": HEAD + b"X-A : 1\r\n\r\n",
    "a folded line": HEAD + b"X-A: 1\r\n 2\r\n\r\n",
    "NUL in a value": HEAD + b"X-A: a\x00b\r\n\r\n",
    "no method": b"FOO /x HTTP/1.1\r\nHost: x\r\n\r\n",
    "a tunnel": b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "bare line feeds": b"GET /x HTTP/1.1\nHost: x\n\n",
    "HTTP/2 without asking": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_two_readers_might_understand_differently_is_refused(torture: Torture, name: str) -> None:
    async def ask() -> None:
        client = await torture.client()
        await client.send(REFUSED[name])
        response = await client.response()
        assert response.status == 400
        assert json.loads(response.body)["error"]["type"] == "kvtether_invalid_request"
        assert response.header(b"connection") == [b"close"]
        assert await client.reader.read() == b""
        client.close()

    torture.engine(plain)
    before = len(torture.it.engine.exchanges)
    torture.run(ask())
    assert len(torture.it.engine.exchanges) == before


def test_an_expectation_is_met_on_every_road_before_the_body_is_sent(torture: Torture) -> None:
    async def ask(road: bytes) -> None:
        client = await torture.client()
        body = chat()
        expecting = [(b"Expect", b"100-continue"), (b"Content-Length", b"%d" % len(body))]
        await client.request(b"POST", road, expecting)
        assert (await client.read_head())[0] == 100
        await client.send(body)
        assert (await client.response()).status == 200
        client.close()

    torture.engine(plain)
    for road in ROADS:
        torture.run(ask(road))
        assert not torture.arrived.header(b"expect")


@pytest.mark.parametrize("road", ROADS)
def test_huge_and_many_headers_pass(torture: Torture, road: bytes) -> None:
    sent = [(b"x-huge", b"v" * 200_000), *((b"x-many", b"%d" % number) for number in range(500))]

    response = exchanged(torture, road, sent, sent)
    for name in (b"x-huge", b"x-many"):
        wanted = [value for key, value in sent if key == name]
        assert torture.arrived.header(name) == wanted
        assert response.header(name) == wanted
