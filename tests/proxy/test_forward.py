"""What a client and an engine see of each other through the data path, over real sockets."""

import asyncio
import gzip
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from lifecycle.vocabulary import CallEnd
from proxy.answer_tap import AnswerFacts
from proxy.call_listener import ForwardOutcome
from proxy.errors import ProxyError
from proxy.forward import Send, forward_call, pipe
from proxy.problems import openai_error, send_response
from proxy.request_body import Receive, Scope, read_body
from proxy.upstream import AiohttpUpstream, Upstream, UpstreamCredentials, UpstreamTarget, UpstreamTimeouts
from tests.proxy.live_server import RawClient, RawResponse, fetch, serve
from tests.proxy.scripted_upstream import (
    DONE,
    Exchange,
    Script,
    ScriptedUpstream,
    chat_answer,
    chat_chunks,
    openai_like,
    sse,
)

CHAT = b"/v1/chat/completions"
JSON = [(b"content-type", b"application/json")]


@dataclass
class Ledger:
    """An observer that writes down what it is told."""

    told: list[str] = field(default_factory=list)
    facts: AnswerFacts | None = None
    reason: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    first_token: asyncio.Event = field(default_factory=asyncio.Event)

    def on_head(self, status: int) -> None:
        self.told.append(f"head {status}")

    def on_first_token(self) -> None:
        self.told.append("first token")
        self.first_token.set()

    def on_end(self, end: CallEnd, facts: AnswerFacts, reason: str) -> None:
        self.told.append(end.value)
        self.facts = facts
        self.reason = reason
        self.ended.set()


@dataclass
class Path:
    """A client port in front of a scripted engine, and what happened on the way."""

    port: int
    engine: ScriptedUpstream
    ledger: Ledger
    outcomes: asyncio.Queue[ForwardOutcome]

    async def outcome(self) -> ForwardOutcome:
        return await asyncio.wait_for(self.outcomes.get(), 10)


Handler = Callable[[Scope, Receive, Send, Upstream, Ledger], Awaitable[ForwardOutcome]]


async def piped(scope: Scope, receive: Receive, send: Send, up: Upstream, _: Ledger) -> ForwardOutcome:
    return await pipe(scope, receive, send, up, limit_bytes=10_000_000)


async def tracked(scope: Scope, receive: Receive, send: Send, up: Upstream, ledger: Ledger) -> ForwardOutcome:
    try:
        body = await read_body(scope, receive, 10_000_000)
    except ProxyError as error:
        await send_response(send, openai_error(error))
        return ForwardOutcome(CallEnd.FAILED, 0, str(error))
    return await forward_call(
        scope,
        receive,
        send,
        up,
        body,
        observer=ledger,
        response_headers=lambda: [(b"x-kv-context", b"c1")],
    )


async def cutting(scope: Scope, receive: Receive, send: Send, up: Upstream, ledger: Ledger) -> ForwardOutcome:
    body = await read_body(scope, receive)
    return await forward_call(scope, receive, send, up, body, observer=ledger, cut_ids=True)


BOTH = pytest.mark.parametrize("handler", [piped, tracked])


@asynccontextmanager
async def path(
    script: Script, handler: Handler = tracked, timeouts: UpstreamTimeouts | None = None
) -> AsyncIterator[Path]:
    async with ScriptedUpstream(script) as engine:
        upstream = AiohttpUpstream(UpstreamTarget.parse(engine.url), timeouts)
        ledger = Ledger()
        outcomes: asyncio.Queue[ForwardOutcome] = asyncio.Queue()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            outcomes.put_nowait(await handler(scope, receive, send, upstream, ledger))

        async with serve(app) as port:
            yield Path(port, engine, ledger, outcomes)
        await upstream.close()


def streaming(chunks: list[bytes]) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.start_stream()
        for chunk in chunks:
            await exchange.chunk(chunk)
        await exchange.end_stream()

    return script


def answering(status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(status, body, headers)

    return script


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
        assert outcome == ForwardOutcome(
            CallEnd.FAILED, 429, json.loads(error)["error"] if b"plain" in error else "m"
        )
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


CRAB = "🦀".encode()
TORTURE: dict[str, list[bytes]] = {
    "plain": chat_chunks(["Hel", "lo"]),
    "crlf": [chunk.replace(b"\n", b"\r\n") for chunk in chat_chunks(["a"])],
    "comments": [b": keep-alive\n\n", b"event: x\nid: 7\nretry: 10\ndata: {}\n\n", *chat_chunks(["a"])],
    "split utf-8": [
        b'data: {"choices":[{"index":0,"delta":{"content":"' + CRAB[:2],
        CRAB[2:] + b'"}}]}\n\n',
        DONE,
    ],
    "multi-line": [b'data: {"choices":\ndata: []}\n\n', DONE],
    "five megabytes": [b"data: " + b"x" * 2_500_000, b"y" * 2_500_000 + b"\n\n", DONE],
    "no final newline": [b"data: {}\n\n", b"data: [DONE]"],
    "no done": chat_chunks(["a"])[:-1],
    "two dones": [*chat_chunks(["a"]), DONE],
    "garbage": [b"\x00\xff\n\r\n\r", b"data: nonsense\n\n"],
    "one byte at a time": [bytes([byte]) for byte in b"".join(chat_chunks(["a"])[:2])],
}


@BOTH
@pytest.mark.parametrize("name", TORTURE)
async def test_streams_pass_byte_for_byte(handler: Handler, name: str) -> None:
    async with path(streaming(TORTURE[name]), handler) as p:
        response = await fetch(p.port, b"POST", CHAT, JSON, b"{}")
        assert (await p.outcome()).end is CallEnd.COMPLETED
    assert response.complete
    assert response.body == b"".join(TORTURE[name])


async def test_the_observer_hears_everything_of_a_stream_in_order() -> None:
    async with path(streaming(chat_chunks(["Hel", "lo"], cached_tokens=4))) as p:
        response = await fetch(p.port, b"POST", CHAT, JSON, b"{}")
        await p.outcome()
    assert p.ledger.told == ["head 200", "first token", "completed"]
    assert p.ledger.facts is not None
    assert p.ledger.facts.choices[0].content == "Hello"
    assert p.ledger.facts.usage.cached_tokens == 4
    assert response.header(b"x-kv-context") == [b"c1"]


async def test_a_whole_answer_has_no_first_token_of_its_own() -> None:
    async with path(openai_like) as p:
        response = await fetch(p.port, b"POST", CHAT, JSON, b'{"stream": false}')
        await p.outcome()
    assert json.loads(response.body) == chat_answer("Hello")
    assert p.ledger.told == ["head 200", "completed"]


async def test_events_arrive_while_the_engine_still_generates() -> None:
    go_on = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.start_stream()
        await exchange.chunk(chat_chunks(["a"])[1])
        await go_on.wait()
        await exchange.chunk(DONE)
        await exchange.end_stream()

    async with path(script) as p:
        client = await RawClient.connect(p.port)
        await client.request(b"POST", CHAT, JSON, b"{}")
        await client.read_head()
        assert await client.read_chunk() == chat_chunks(["a"])[1]
        assert p.ledger.told == ["head 200", "first token"]
        go_on.set()
        assert await client.read_chunk() == DONE
        # Whoever has read the end finds it already on the books.
        assert p.ledger.told[-1] == "completed"
        client.close()


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
        (UpstreamCredentials(keep=False, authorization=b"Bearer engine"), [b"Bearer engine"]),
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


async def test_token_ids_we_asked_for_do_not_reach_the_client() -> None:
    def with_ids(text: str) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        return sse({"id": "c", "prompt_token_ids": [1, 2], "choices": [{**choice, "token_ids": [3]}]})

    plain = sse({"id": "c", "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})
    whole = b": ping\n\n" + with_ids("a") + DONE
    async with path(streaming([whole[:25], whole[25:60], whole[60:]]), cutting) as p:
        response = await fetch(p.port, b"POST", CHAT, [*JSON, (b"accept-encoding", b"gzip")], b"{}")
        await p.outcome()
        assert p.engine.exchanges[0].header(b"accept-encoding") == []
    assert response.body == b": ping\n\n" + plain + DONE
    assert p.ledger.facts is not None
    assert p.ledger.facts.prompt_token_ids == (1, 2)
    assert p.ledger.facts.choices[0].token_ids == (3,)


async def test_token_ids_leave_a_whole_answer_and_its_length_fits() -> None:
    answer = chat_answer("Hi")
    with_ids = {**answer, "prompt_token_ids": [1], "choices": [{**answer["choices"][0], "token_ids": [2]}]}
    body = json.dumps(with_ids).encode()
    async with path(answering(200, body, JSON), cutting) as p:
        response = await fetch(p.port, b"POST", CHAT, JSON, b"{}")
    assert response.complete
    assert json.loads(response.body) == answer


class Saboteur(Ledger):
    """An observer that fails whenever it can."""

    def on_head(self, status: int) -> None:
        raise RuntimeError("head")

    def on_first_token(self) -> None:
        raise RuntimeError("first token")

    def on_end(self, end: CallEnd, facts: AnswerFacts, reason: str) -> None:
        raise RuntimeError("end")


async def test_a_broken_observer_harms_no_answer() -> None:
    def broken_headers() -> list[tuple[bytes, bytes]]:
        raise RuntimeError("headers")

    async def sabotaged(
        scope: Scope, receive: Receive, send: Send, upstream: Upstream, _: Ledger
    ) -> ForwardOutcome:
        body = await read_body(scope, receive)
        return await forward_call(
            scope, receive, send, upstream, body, observer=Saboteur(), response_headers=broken_headers
        )

    async with path(streaming(chat_chunks(["a"])), sabotaged) as p:
        response = await fetch(p.port, b"POST", CHAT, JSON, b"{}")
        assert (await p.outcome()).end is CallEnd.COMPLETED
    assert response.body == b"".join(chat_chunks(["a"]))
