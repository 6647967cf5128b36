"""What a client and an engine see of each other's requests and answers, over real sockets."""

import gzip
import hashlib
import json

import pytest

from lifecycle.vocabulary import CallEnd
from proxy.call_listener import ForwardOutcome
from proxy.forward import Send, pipe
from proxy.request_body import Receive, Scope
from proxy.upstream import Upstream, UpstreamCredentials
from tests.proxy.data_path import BOTH, CHAT, JSON, Handler, Ledger, answering, path, piped, tracked
from tests.proxy.live_server import RawClient, fetch
from tests.proxy.scripted_upstream import Exchange, chat_answer, openai_like

AWKWARD_BODIES = [
    b'{"a":1,"a":2 ,"n":1e400,"f":1.50,"s":"\\ud800\\u0000"}',
    b'\xef\xbb\xbf{"model":"m"}',
    '{"text":"é🦀"}'.encode("utf-16"),
    b"[" * 5000 + b"]" * 5000,
    b"not json at all \x00\xff",
    b"",
    b"x" * 3_000_000,
]


@BOTH
@pytest.mark.parametrize("body", AWKWARD_BODIES, ids=range(len(AWKWARD_BODIES)))
async def test_request_bodies_arrive_byte_for_byte(handler: Handler, body: bytes) -> None:
    async with path(openai_like, handler) as p:
        await fetch(p.port, b"POST", b"/anything", JSON, body)
        arrived = p.engine.exchanges[0].body
    assert hashlib.sha256(arrived).digest() == hashlib.sha256(body).digest()


@BOTH
async def test_a_chunked_request_arrives_whole(handler: Handler) -> None:
    async with path(openai_like, handler) as p:
        client = await RawClient.connect(p.port)
        await client.request(b"POST", b"/x", [(b"Transfer-Encoding", b"chunked")])
        await client.send(b"3\r\nabc\r\n")
        await client.send(b"2\r\nde\r\n0\r\n\r\n")
        await client.response()
        client.close()
        assert p.engine.exchanges[0].body == b"abcde"


async def test_a_streamed_request_reaches_the_engine_while_it_is_sent() -> None:
    async def script(exchange: Exchange) -> None:
        piece = await exchange.reader.readexactly(3)
        await exchange.respond(200, piece)
        exchange.cut()

    async with path(script, piped) as p:
        client = await RawClient.connect(p.port)
        await client.request(b"POST", b"/x", [(b"Content-Length", b"6")])
        await client.send(b"abc")
        assert (await client.response()).body == b"abc"
        client.close()


@BOTH
async def test_headers_both_ways(handler: Handler) -> None:
    reply = [
        (b"X-Request-Id", b"r1"),
        (b"Set-Cookie", b"a=1"),
        (b"Set-Cookie", b"b=2"),
        (b"X-Hop", b"dropped"),
        (b"Connection", b"X-Hop"),
        (b"Keep-Alive", b"timeout=5"),
    ]
    sent = [
        (b"X-Unknown", "é".encode()),
        (b"X-Many", b"1"),
        (b"X-Many", b"2"),
        (b"Accept-Encoding", b"gzip, br"),
        (b"Authorization", b"Bearer engine-key"),
        (b"User-Agent", b"agent/1"),
        (b"Connection", b"keep-alive, X-Secret-Hop"),
        (b"X-Secret-Hop", b"1"),
        (b"TE", b"trailers"),
        (b"x-kv-lifecycle", b'ctx="a"'),
        (b"X-KV-Session-Id", b"s"),
    ]
    async with path(answering(200, b"ok", reply), handler) as p:
        response = await fetch(p.port, b"POST", b"/x", sent, b"{}")
        engine_saw = [(name.lower(), value) for name, value in p.engine.exchanges[0].headers]
        authority = p.engine.url.removeprefix("http://").encode()
    kept = [(name.lower(), value) for name, value in sent[:6]]
    assert engine_saw == [(b"host", authority), *kept, (b"content-length", b"2")]
    assert response.header(b"set-cookie") == [b"a=1", b"b=2"]
    assert response.header(b"x-request-id") == [b"r1"]
    assert not response.header(b"x-hop")
    assert not response.header(b"keep-alive")


@BOTH
@pytest.mark.parametrize(
    "target",
    [b"/a%2Fb//c/../d?x=%2F&y=a+b&z", b"//double", b"/q?", b"/v1/models?a=?b", b"/%E2%82%AC%ff", b"/;p=1,2"],
)
async def test_path_and_query_arrive_as_written(handler: Handler, target: bytes) -> None:
    async with path(openai_like, handler) as p:
        await fetch(p.port, b"GET", target)
        # uvicorn does not tell an empty query from none
        assert p.engine.exchanges[0].target == target.removesuffix(b"?")


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"PATCH"])
async def test_every_method_passes(method: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.head(200, [(b"Content-Length", b"4"), (b"Allow", b"GET")])
        if exchange.method != "HEAD":
            await exchange.write(b"body")

    async with path(script, piped) as p:
        response = await fetch(p.port, method, b"/x")
        assert p.engine.exchanges[0].method == method.decode()
        assert p.engine.exchanges[0].header(b"content-length") in ([], [b"0"])
    assert response.header(b"content-length") == [b"4"]
    assert response.body == (b"" if method == b"HEAD" else b"body")


@BOTH
@pytest.mark.parametrize("status", [204, 304])
async def test_answers_without_a_body(handler: Handler, status: int) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.head(status, [(b"ETag", b'"x"')])

    async with path(script, handler) as p:
        client = await RawClient.connect(p.port)
        for _ in range(2):
            await client.request(b"GET", b"/x")
            assert (await client.response()).status == status
        client.close()


@BOTH
@pytest.mark.parametrize("error", [b'{"error":"plain"}', b'{"error":{"message":"m","code":429}} '])
async def test_engine_errors_pass_verbatim(handler: Handler, error: bytes) -> None:
    headers = [(b"Retry-After", b"7"), (b"X-Request-Id", b"abc"), (b"Content-Type", b"application/json")]
    async with path(answering(429, error, headers), handler) as p:
        response = await fetch(p.port, b"POST", CHAT, JSON, b"{}")
        outcome = await p.outcome()
        assert len(p.engine.exchanges) == 1
    assert (response.status, response.body) == (429, error)
    assert response.header(b"retry-after") == [b"7"]
    assert response.header(b"x-request-id") == [b"abc"]
    if handler is tracked:
        # In our words: an engine's may quote the prompt.
        assert outcome == ForwardOutcome(CallEnd.FAILED, 429, "the engine answered 429")
        assert p.ledger.told == ["head 429", "failed"]


@BOTH
async def test_a_redirect_is_the_clients_business(handler: Handler) -> None:
    async with path(answering(307, b"", [(b"Location", b"/elsewhere")]), handler) as p:
        response = await fetch(p.port, b"POST", b"/x", JSON, b"{}")
        assert (response.status, response.header(b"location")) == (307, [b"/elsewhere"])
        assert len(p.engine.exchanges) == 1


@BOTH
async def test_a_compressed_answer_stays_compressed_and_is_still_understood(handler: Handler) -> None:
    packed = gzip.compress(json.dumps(chat_answer("Hello")).encode())
    headers = [(b"Content-Encoding", b"gzip"), (b"Content-Type", b"application/json")]
    async with path(answering(200, packed, headers), handler) as p:
        response = await fetch(p.port, b"POST", CHAT, [(b"accept-encoding", b"gzip")], b"{}")
        await p.outcome()
    assert response.body == packed
    assert response.header(b"content-encoding") == [b"gzip"]
    if handler is tracked:
        assert p.ledger.facts is not None
        assert p.ledger.facts.choices[0].content == "Hello"


async def test_expect_continue_is_answered_and_not_passed_on() -> None:
    async with path(openai_like, piped) as p:
        client = await RawClient.connect(p.port)
        await client.request(b"POST", b"/x", [(b"Content-Length", b"2"), (b"Expect", b"100-continue")])
        assert (await client.read_head())[0] == 100
        await client.send(b"{}")
        assert (await client.response()).status == 404
        client.close()
        assert p.engine.exchanges[0].header(b"expect") == []


@pytest.mark.parametrize(
    ("credentials", "seen"),
    [
        (UpstreamCredentials(), [b"Bearer mine"]),
        (UpstreamCredentials(keep=False), []),
    ],
)
async def test_the_engine_sees_the_key_it_shall_see(
    credentials: UpstreamCredentials, seen: list[bytes]
) -> None:
    async def swapping(
        scope: Scope, receive: Receive, send: Send, upstream: Upstream, _: Ledger
    ) -> ForwardOutcome:
        return await pipe(scope, receive, send, upstream, credentials=credentials)

    async with path(openai_like, swapping) as p:
        keys = [(b"Authorization", b"Bearer mine"), (b"x-api-key", b"mine")]
        await fetch(p.port, b"GET", b"/v1/models", keys)
        exchange = p.engine.exchanges[0]
    assert exchange.header(b"authorization") == seen
    assert exchange.header(b"x-api-key") == ([b"mine"] if credentials.keep else [])


@BOTH
@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
async def test_an_answer_that_ends_with_its_connection(handler: Handler, version: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.write(version + b" 200 OK\r\nContent-Type: text/plain\r\n\r\nall there is")
        exchange.cut()

    async with path(script, handler) as p:
        response = await fetch(p.port, b"POST", b"/x", JSON, b"{}")
        assert (await p.outcome()).end is CallEnd.COMPLETED
    assert (response.body, response.complete) == (b"all there is", True)


@BOTH
async def test_pipelined_requests_are_answered_in_order(handler: Handler) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.respond(200, await exchange.read_body())

    async with path(script, handler) as p:
        client = await RawClient.connect(p.port)
        for number in range(3):
            await client.request(b"POST", b"/x", JSON, b"%d" % number)
        assert [(await client.response()).body for _ in range(3)] == [b"0", b"1", b"2"]
        client.close()


@BOTH
async def test_large_headers_pass(handler: Handler) -> None:
    large = b"v" * 20_000
    async with path(answering(200, b"", [(b"X-Large", large)]), handler) as p:
        response = await fetch(p.port, b"POST", b"/x", [(b"x-large", large)], b"{}")
        assert p.engine.exchanges[0].header(b"x-large") == [large]
    assert response.header(b"x-large") == [large]
