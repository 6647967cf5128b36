"""Addresses, pooling and the only repeats that are safe."""

import asyncio

import pytest

from proxy.errors import ConnectFailed, UpstreamBroken
from proxy.upstream import PooledUpstream, UpstreamRequest, UpstreamTarget, end_to_end
from tests.proxy.scripted_upstream import Exchange, ScriptedUpstream, openai_like


@pytest.mark.parametrize(
    ("base", "authority", "chat"),
    [
        ("http://h", "h", b"/v1/chat"),
        ("http://h/", "h", b"/v1/chat"),
        ("http://h:80/v1", "h", b"/v1/chat"),
        ("http://h/v1/", "h", b"/v1/chat"),
        ("https://h:8443/x/v1", "h:8443", b"/x/v1/chat"),
        ("https://h:443", "h", b"/v1/chat"),
        ("http://h/x", "h", b"/x/v1/chat"),
        ("http://[::1]:8000/v1", "[::1]:8000", b"/v1/chat"),
        ("unix:/run/engine.sock", "localhost", b"/v1/chat"),
        (" unix:///run/engine.sock ", "localhost", b"/v1/chat"),
    ],
)
def test_every_form_of_a_base_url_means_the_same(base: str, authority: str, chat: bytes) -> None:
    target = UpstreamTarget.parse(base)
    assert target.authority == authority
    assert target.path(b"/v1/chat") == chat


@pytest.mark.parametrize(
    "base", ["h:8000", "ftp://h", "http://", "http://u:p@h", "http://h/?q=1", "http://h/#f"]
)
def test_what_is_no_base_url_is_refused(base: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        UpstreamTarget.parse(base)


@pytest.mark.parametrize(
    "base", ["unix:", "unix:engine.sock", "unix://engine.sock", "unix:/run/", "unix:/a\0b"]
)
def test_what_is_no_path_of_a_socket_is_refused(base: str) -> None:
    with pytest.raises(ValueError, match="whole path of a Unix socket"):
        UpstreamTarget.parse(base)


def test_hop_by_hop_headers_and_those_that_connection_names_go() -> None:
    headers = [
        (b"Connection", b"close, X-One"),
        (b"connection", b"x-two"),
        (b"X-One", b"1"),
        (b"x-two", b"2"),
        (b"X-Three", b"3"),
        (b"Trailer", b"t"),
        (b"Upgrade", b"h2c"),
        (b"x-three", b"4"),
    ]
    assert end_to_end(headers) == [(b"x-three", b"3"), (b"x-three", b"4")]


def post(body: bytes = b"{}") -> UpstreamRequest:
    return UpstreamRequest(method="POST", raw_target=b"/x", headers=[], body=body)


async def finish(upstream: PooledUpstream, request: UpstreamRequest) -> tuple[int, bytes]:
    response = await upstream.open(request)
    body = b""
    while piece := await response.read():
        body += piece
    response.close()
    return response.status, body


async def test_a_connection_is_used_again() -> None:
    async with ScriptedUpstream(openai_like) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
        for _ in range(3):
            assert (await finish(upstream, post()))[0] == 404
        assert engine.num_connections == 1
        await upstream.close()


async def test_an_answer_given_up_closes_its_connection_only() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.head(200, [(b"Content-Length", b"10")])
        await exchange.write(b"12345")
        await asyncio.Event().wait()

    async with ScriptedUpstream(script) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
        first = await upstream.open(post())
        second = await upstream.open(post())
        assert await first.read() == b"12345"
        first.close()
        await asyncio.wait_for(engine.exchanges[0].hung_up.wait(), 10)
        assert not engine.exchanges[1].hung_up.is_set()
        second.close()
        await upstream.close()


async def test_an_idle_connection_that_the_engine_closed_costs_no_request() -> None:
    async def one_answer_a_connection(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(200, b"ok")
        exchange.cut()

    async with ScriptedUpstream(one_answer_a_connection) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
        for _ in range(20):
            assert await finish(upstream, post()) == (200, b"ok")
            # the engine's close is on the wire already; these turns of the loop take notice of it
            for _ in range(3):
                await asyncio.sleep(0)
        assert len(engine.exchanges) == 20
        await upstream.close()


@pytest.mark.parametrize("method", ["POST", "GET", "PUT", "DELETE"])
async def test_a_request_whose_bytes_went_out_is_never_repeated(method: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        if len(engine.exchanges) == 1:
            await exchange.respond(200, b"ok")
        else:
            exchange.cut()

    async with ScriptedUpstream(script) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
        await finish(upstream, post())
        with pytest.raises(UpstreamBroken):
            await upstream.open(UpstreamRequest(method=method, raw_target=b"/x", headers=[]))
        assert len(engine.exchanges) == 2
        await upstream.close()


async def test_no_engine_is_a_failed_connect() -> None:
    async with ScriptedUpstream(openai_like) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
    with pytest.raises(ConnectFailed):
        await upstream.open(post())
    await upstream.close()


async def test_a_large_body_is_sent_with_its_length() -> None:
    body = bytes(range(256)) * 20_000
    async with ScriptedUpstream(openai_like) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url))
        await finish(upstream, post(body))
        (exchange,) = engine.exchanges
        assert exchange.body == body
        assert exchange.header(b"content-length") == [str(len(body)).encode()]
        assert exchange.header(b"transfer-encoding") == []
        await upstream.close()
