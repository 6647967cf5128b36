"""A body leaves for the engine before it is known whose call it is; its answer waits until it is."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import proxy.data_app
from lifecycle.vocabulary import CallEnd, Mode
from proxy.call_listener import CallObserver, ForwardOutcome
from proxy.call_readers import read_calls
from proxy.forward import Send, forward_call
from proxy.request_body import Receive, Scope, read_body
from proxy.upstream import PooledUpstream, Upstream, UpstreamTarget
from tests.proxy.data_path import CHAT, JSON, Handler, Ledger, answering, path
from tests.proxy.live_server import RawClient, fetch
from tests.proxy.scripted_upstream import Exchange
from tests.proxy.whole_proxy import Whole, lifecycle, system, user, whole_proxy

LIST = [system("a system prompt that fills a chunk or two by itself"), user("the first thing that is asked")]


def when(listener: Callable[[Ledger], Awaitable[CallObserver | None]]) -> Handler:
    """Forward to whoever `listener` finds."""

    async def handler(
        scope: Scope, receive: Receive, send: Send, upstream: Upstream, ledger: Ledger
    ) -> ForwardOutcome:
        body = await read_body(scope, receive)
        return await forward_call(scope, receive, send, upstream, body, listener=lambda: listener(ledger))

    return handler


async def test_the_body_does_not_wait_for_a_listener_and_the_answer_does() -> None:
    known = asyncio.Event()

    async def late(ledger: Ledger) -> CallObserver:
        await known.wait()
        return ledger

    async with path(answering(200, b"{}", JSON), when(late)) as p:
        asked = asyncio.create_task(fetch(p.port, b"POST", CHAT, JSON, b'{"a":1}'))
        exchange = await p.engine.arrived()
        await asyncio.wait_for(exchange.body_read.wait(), 10)
        assert exchange.body == b'{"a":1}'
        assert not p.ledger.told
        assert not asked.done()
        known.set()
        assert (await asyncio.wait_for(asked, 10)).body == b"{}"
        assert p.ledger.told == ["head 200", "completed"]


async def test_an_engine_that_cannot_be_reached_is_told_to_whoever_listens() -> None:
    nowhere = PooledUpstream(UpstreamTarget.parse("http://127.0.0.1:1"))

    async def handler(
        scope: Scope, receive: Receive, send: Send, upstream: Upstream, ledger: Ledger
    ) -> ForwardOutcome:
        body = await read_body(scope, receive)

        async def late() -> CallObserver:
            await asyncio.sleep(0)
            return ledger

        return await forward_call(scope, receive, send, nowhere, body, listener=late)

    async with path(answering(200, b"{}", JSON), handler) as p:
        assert (await fetch(p.port, b"POST", CHAT, JSON, b"{}")).status == 502
        assert p.ledger.told == ["failed"]


async def test_nobody_to_listen_harms_no_answer() -> None:
    async def broken(_: Ledger) -> CallObserver:
        raise RuntimeError("nobody knows")

    async with path(answering(200, b"{}", JSON), when(broken)) as p:
        assert (await fetch(p.port, b"POST", CHAT, JSON, b"{}")).body == b"{}"
        assert (await p.outcome()).end is CallEnd.COMPLETED


async def test_who_hangs_up_before_it_is_known_who_listens_stops_the_engine() -> None:
    known = asyncio.Event()

    async def late(ledger: Ledger) -> CallObserver:
        await known.wait()
        return ledger

    async def silent(exchange: Any) -> None:
        await exchange.read_body()
        await exchange.hung_up.wait()

    async with path(silent, when(late)) as p:
        client = await RawClient.connect(p.port)
        await client.send(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}" % CHAT)
        exchange = await p.engine.arrived()
        await asyncio.wait_for(exchange.body_read.wait(), 10)
        client.hang_up()
        known.set()
        assert (await p.outcome()).end is CallEnd.ABORTED
        assert p.ledger.told == ["aborted"]
        await asyncio.wait_for(exchange.hung_up.wait(), 10)


async def _next_chat(it: Whole) -> Exchange:
    """The engine is asked for other things, too."""
    while (exchange := await it.engine.arrived()).target != CHAT:
        pass
    return exchange


async def test_in_observe_a_call_leaves_unknown_and_nothing_is_freed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = asyncio.Event()

    async def late(*arguments: Any) -> Any:
        await known.wait()
        return await read_calls(*arguments)

    async with whole_proxy(tmp_path, Mode.OBSERVE) as it:
        await it.chat(LIST, lifecycle(ctx="a", call="1"))
        namespace, tracker = it.context("a").namespace, it.runtime.tracker
        assert tracker.oldest_arriving_ns(namespace) is None
        await _next_chat(it)
        monkeypatch.setattr(proxy.data_app, "read_calls", late)
        asked = asyncio.create_task(it.chat(LIST, lifecycle(ctx="a", call="2")))
        async with it.patience():
            await (await _next_chat(it)).body_read.wait()
        assert tracker.oldest_arriving_ns(namespace) is not None
        assert not asked.done()
        known.set()
        async with it.patience():
            answer = await asked
        assert answer.headers["x-kv-context"] == "a"
        assert set(it.context("a").attempts) == {"1", "2"}
        assert tracker.oldest_arriving_ns(namespace) is None
