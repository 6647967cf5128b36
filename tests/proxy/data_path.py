"""A client in front of the data path in front of a scripted engine, and what each of them was told."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from lifecycle.vocabulary import CallEnd
from proxy.answer_facts import AnswerFacts
from proxy.call_listener import CallObserver, ForwardOutcome
from proxy.errors import ProxyError
from proxy.forward import Send, forward_call, pipe
from proxy.problems import openai_error, send_response
from proxy.request_body import Receive, Scope, read_body
from proxy.upstream import PooledUpstream, Upstream, UpstreamTarget, UpstreamTimeouts
from tests.proxy.live_server import serve
from tests.proxy.scripted_upstream import (
    Exchange,
    Script,
    ScriptedUpstream,
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


def found(observer: CallObserver) -> Callable[[], Awaitable[CallObserver | None]]:
    """A listener that is known at once."""

    async def at_once() -> CallObserver:
        return observer

    return at_once


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
        listener=found(ledger),
        response_headers=lambda: [(b"x-kv-context", b"c1")],
    )


async def cutting(scope: Scope, receive: Receive, send: Send, up: Upstream, ledger: Ledger) -> ForwardOutcome:
    body = await read_body(scope, receive)
    return await forward_call(scope, receive, send, up, body, listener=found(ledger), cut_ids=True)


BOTH = pytest.mark.parametrize("handler", [piped, tracked])


@asynccontextmanager
async def path(
    script: Script,
    handler: Handler = tracked,
    timeouts: UpstreamTimeouts | None = None,
) -> AsyncIterator[Path]:
    async with ScriptedUpstream(script) as engine:
        upstream = PooledUpstream(UpstreamTarget.parse(engine.url), timeouts)
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
