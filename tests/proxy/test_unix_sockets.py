"""An engine that listens on a Unix socket: forwarded to, followed, mapped and asked like any other."""

import asyncio
import contextlib
import socket
from pathlib import Path

import uvloop

from engine_bridge.drivers.lmcache_client import LmcacheClient
from engine_bridge.engine_address import EngineAddress
from proxy.doctor import examine
from proxy.upstream import PooledUpstream, UpstreamRequest, UpstreamTarget
from tests.lifecycle.fake_cache import FakeCache
from tests.proxy.scripted_upstream import ScriptedUpstream
from tests.proxy.toy_model import CHUNK, ToyEngine
from tests.proxy.whole_proxy import configured, lifecycle, system, user, whole_proxy

LIST = [system("a system prompt that fills a chunk or two by itself"), user("what is asked")]


async def test_calls_are_forwarded_followed_and_what_they_leave_is_freed(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, socket=tmp_path / "engine.sock") as it:
        answer = await it.chat(LIST, lifecycle(ctx="c", call="1"))
        assert answer.status_code == 200
        assert (await it.data.get("/v1/models")).json()["data"][0]["id"] == "toy"
        await it.until(lambda: it.cache.chunks)
        await it.ops({"op": "close", "seq": 1, "ctx": "c"})
        await it.until(lambda: not it.cache.chunks)
        findings = await examine(configured(tmp_path, it.engine.url))
        [found] = [f for f in findings if f.subject == "upstream"]
        assert found.ok, found
    findings = await examine(configured(tmp_path, it.engine.url))
    [found] = [f for f in findings if f.subject == "upstream"]
    assert it.engine.url in found.text, "whoever reads that must find the socket"


async def test_whoever_asks_the_cache_reaches_the_engine_too(tmp_path: Path) -> None:
    toys = [ToyEngine(FakeCache(chunk_size=CHUNK)) for _ in range(2)]
    async with (
        ScriptedUpstream(toys[0].script, tmp_path / "one.sock") as one,
        ScriptedUpstream(toys[1].script) as two,
    ):
        engines = [EngineAddress(one.url), EngineAddress(two.url)]
        client = LmcacheClient("http://127.0.0.1:9", engines=engines)
        for engine in engines:
            listing = await client.call("GET", f"{engine.base}/v1/models", dict)
            assert listing["data"]
        await client.close()


def test_a_socket_whose_queue_is_full_is_asked_again(tmp_path: Path) -> None:
    """On the loop of production: the kernel refuses at once what it would let wait at a port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await reader.read()
        writer.close()

    async def run(listener: socket.socket, path: str, others: contextlib.ExitStack) -> int:
        upstream = PooledUpstream(UpstreamTarget.parse(f"unix:{path}"))
        request = UpstreamRequest(method="GET", raw_target=b"/health", headers=[])
        asking = asyncio.ensure_future(upstream.open(request))
        await asyncio.wait([asking], timeout=0.1)
        assert not asking.done()
        server = await asyncio.start_unix_server(answer, sock=listener)
        response = await asking
        response.close()
        others.close()
        await upstream.close()
        server.close()
        await server.wait_closed()
        return response.status

    path = str(tmp_path / "engine.sock")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(path)
        listener.listen(1)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(path)
        listener.setblocking(False)
        assert uvloop.run(run(listener, path, stack)) == 204
