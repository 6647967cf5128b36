"""A proxy that ends: not ready, still serving, then deaf, then gone, and nobody's call fails."""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from proxy.config import DrainConfig
from proxy.drain import Closing, Drain
from tests.proxy.live_server import RawClient
from tests.proxy.scripted_upstream import Exchange
from tests.proxy.whole_proxy import lifecycle, user, whole_proxy

CHAT = b"/v1/chat/completions"


async def called(client: RawClient) -> Any:
    body = b'{"model": "toy", "messages": [{"role": "user", "content": "hi"}]}'
    await client.request(b"POST", CHAT, [(b"Content-Type", b"application/json")], body)
    return await client.response()


def port(url: str) -> int:
    return int(url.rpartition(":")[2])


async def test_while_it_settles_calls_are_served_each_as_the_last_of_its_connection(tmp_path: Path) -> None:
    long = DrainConfig(settle_seconds=600)
    async with whole_proxy(tmp_path, drain=long) as it:
        kept = await RawClient.connect(port(it.up.data_url))
        before = await called(kept)
        assert before.status == 200
        assert not before.header(b"connection")
        ready = await it.admin.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")

        draining = asyncio.ensure_future(it.up.drain(at_once=False))
        while (ready := await it.admin.get("/readyz")).status_code == 200:
            pass
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        assert (await it.admin.get("/livez")).status_code == 200
        fresh = await RawClient.connect(port(it.up.data_url))
        for client in (kept, fresh):
            answer = await called(client)
            assert answer.status == 200
            assert answer.header(b"connection") == [b"close"]
            assert await asyncio.wait_for(client.reader.read(), 10) == b"", "the connection is over"
            client.close()
        it.up.hurry()
        await asyncio.wait_for(draining, 10)


async def test_what_has_not_begun_to_be_answered_in_time_is_refused_so_that_it_is_tried_again(
    tmp_path: Path,
) -> None:
    asked = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        if exchange.target != CHAT:
            await exchange.respond_json({"data": [{"id": "toy"}], "version": "1"})
            return
        asked.set()
        await exchange.hung_up.wait()

    answers = []

    async def call(url: str, name: str) -> None:
        async with httpx.AsyncClient(timeout=20) as client:
            body = {"model": "toy", "messages": [user("hi")]}
            answers.append(
                await client.post(f"{url}/v1/chat/completions", json=body, headers=lifecycle(ctx=name))
            )

    async with whole_proxy(tmp_path, script=script, drain=DrainConfig(finish_seconds=0.2)) as it:
        calling = asyncio.ensure_future(call(it.up.data_url, "a"))
        await asyncio.wait_for(asked.wait(), 10)
    await asyncio.wait_for(calling, 10)
    (refused,) = answers
    assert refused.status_code == 503
    assert refused.json()["error"]["type"] == "kvtether_draining"
    assert refused.headers["retry-after"]
    assert refused.headers["connection"] == "close"


async def test_before_the_end_begins_a_call_that_is_cut_off_is_no_refusal() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise asyncio.CancelledError

    async def send(message: Any) -> None:
        sent.append(message)

    drain = Drain(DrainConfig(settle_seconds=0))
    for began in (False, True):
        try:
            await Closing(app, drain)({"type": "http", "path": "/v1/x"}, None, send)  # type: ignore[arg-type]
        except asyncio.CancelledError:
            assert not began
        else:
            assert sent[0]["status"] == 503
        await drain.settle(at_once=False)
