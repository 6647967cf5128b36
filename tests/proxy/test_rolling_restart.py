"""Two proxies behind one address, under load: replaced one after the other nobody notices; killed, a client
that tries again is served. Nothing is lost, nothing live is deleted, and what is dead goes."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from lifecycle.core.events import CallArrived, CallEnded, ChunksConfirmed, DirectiveProposed, DirectiveSettled
from lifecycle.core.ids import split_keys
from lifecycle.projections.contexts import Contexts
from lifecycle.store.opening import open_log
from lifecycle.vocabulary import CallEnd
from proxy.config import Config, DrainConfig
from tests.lifecycle.store.redis_process import place_in_shared_redis
from tests.proxy.proxy_process import Balancer, ProxyProcess
from tests.proxy.scripted_upstream import Exchange, ScriptedUpstream
from tests.proxy.test_crashes import FarSide, assert_dead
from tests.proxy.toy_model import NAME, ToyEngine
from tests.proxy.whole_proxy import Message, assistant, configured, lifecycle, system, user

LEASE_SECONDS = 2.0
AGENTS = 3
ENGINE_SECONDS = 0.1
PATIENCE = 60.0
"""Bound of every wait."""


class Scene:
    """Proxies behind one address, an engine that takes a while, and a cache that outlives them all."""

    def __init__(self, config: Config, cache_port: int, far: FarSide, balancer: Balancer) -> None:
        self.config = config
        self.cache_port = cache_port
        self.far = far
        self.balancer = balancer
        self.done: list[tuple[str, str]] = []
        self.enough = asyncio.Event()
        self.turned = asyncio.Event()
        self.flowing = asyncio.Event()
        self.agents: list[asyncio.Task[None]] = []

    async def start(self) -> ProxyProcess:
        """One more. Nobody calls meanwhile: on a busy machine it takes long enough for a thousand calls."""
        self.flowing.clear()
        proxy = ProxyProcess(self.config, self.cache_port, LEASE_SECONDS)
        await proxy.up()
        self.balancer.proxies.append(proxy)
        self.flowing.set()
        return proxy

    async def owner(self) -> ProxyProcess:
        """Whoever owns the log, as soon as somebody does."""
        async with asyncio.timeout(PATIENCE):
            while True:
                for proxy in self.balancer.proxies:
                    if (await proxy.ready(self.balancer.http)).get("owns"):
                        return proxy
                await asyncio.sleep(0.02)

    async def more(self, turns: int = AGENTS) -> None:
        """Until so many more calls were answered."""
        until = len(self.done) + turns
        async with asyncio.timeout(PATIENCE):
            while len(self.done) < until:
                self.turned.clear()
                await self.turned.wait()
                for agent in self.agents:
                    if agent.done():
                        agent.result()

    async def agent(self, name: str, http: httpx.AsyncClient, *, patient: bool) -> None:
        """Contexts one after the other, each with a few turns, an edit and an end, until it is enough."""
        for life in count():
            ctx = f"{name}-{life}"
            messages: list[Message] = [system(f"you are {ctx}, one of several toys"), user("do this, please")]
            for turn in range(4):
                await self.call(http, ctx, f"{turn}", messages, stream=turn % 2 == 1, patient=patient)
                messages = [*messages, assistant("ok"), user(f"and then number {turn} of these things")]
            await self.op(http, {"op": "replace", "seq": 1, "ctx": ctx, "span": [1, 5], "n": 1}, patient)
            short = [messages[0], user("all of it, in short")]
            await self.call(http, ctx, "short", short, stream=True, patient=patient)
            await self.op(http, {"op": "close", "seq": 2, "ctx": ctx}, patient)
            if self.enough.is_set():
                return

    async def call(
        self,
        http: httpx.AsyncClient,
        ctx: str,
        call: str,
        messages: list[Message],
        *,
        stream: bool,
        patient: bool,
    ) -> None:
        body = {"model": NAME, "messages": messages, "stream": stream}
        await self.flowing.wait()
        url, headers = f"{self.balancer.url}/v1/chat/completions", lifecycle(ctx=ctx, call=call)
        answer = await self.persist(lambda: http.post(url, json=body, headers=headers), patient)
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n") if stream else answer.json()["choices"]
        self.done.append((ctx, call))
        self.turned.set()

    async def op(self, http: httpx.AsyncClient, operation: dict[str, object], patient: bool) -> None:
        body = {"source": "agent", "ops": [operation]}
        answer = await self.persist(lambda: http.post(f"{self.balancer.url}/kv/v1/ops", json=body), patient)
        assert answer.status_code == 200, answer.text
        (result,) = answer.json()["results"]
        assert result["status"] in ("applied", "duplicate"), result

    async def persist(self, attempt: Any, patient: bool) -> httpx.Response:
        """Once, or as a client does that tries again where the connection broke."""
        while True:
            try:
                answer: httpx.Response = await attempt()
            except httpx.TransportError:
                if not patient:
                    raise
            else:
                return answer


@asynccontextmanager
async def scene(tmp_path: Path, url: str) -> AsyncIterator[Scene]:
    far = FarSide()
    toy = ToyEngine(far)

    async def script(exchange: Exchange) -> None:
        if exchange.target == b"/v1/chat/completions":
            await asyncio.sleep(ENGINE_SECONDS)
        await toy.script(exchange)

    server = await asyncio.start_server(far.serve, "127.0.0.1", 0)
    async with server, ScriptedUpstream(script) as engine, Balancer() as balancer:
        drain = DrainConfig(settle_seconds=0.5, finish_seconds=PATIENCE)
        config = configured(tmp_path, engine.url, log_url=url, drain=drain)
        it = Scene(config, server.sockets[0].getsockname()[1], far, balancer)
        try:
            yield it
        finally:
            for proxy in it.balancer.proxies:
                if proxy.process.is_alive():
                    await proxy.ended(signal.SIGKILL)


@asynccontextmanager
async def load(it: Scene, *, patient: bool) -> AsyncIterator[None]:
    """Agents at work as long as the block runs, each to the end of what it began."""
    async with httpx.AsyncClient(timeout=PATIENCE) as http:
        it.agents = [asyncio.ensure_future(it.agent(f"a{n}", http, patient=patient)) for n in range(AGENTS)]
        for agent in it.agents:
            agent.add_done_callback(lambda _: it.turned.set())
        try:
            yield
            it.enough.set()
            await asyncio.wait_for(asyncio.gather(*it.agents), PATIENCE)
        finally:
            for agent in it.agents:
                agent.cancel()
            await asyncio.gather(*it.agents, return_exceptions=True)


async def what_is_proven_is_gone(it: Scene, url: str) -> list[Any]:
    """Until every call is over, all that was asked of the cache is answered, and no chunk is left that was
    proven ours; answers everything recorded."""
    event_log = (await open_log(url)).event_log
    try:
        async with asyncio.timeout(PATIENCE):
            while True:
                told = [r async for r in event_log.read_all()]
                confirmed = [r.event for r in told if isinstance(r.event, ChunksConfirmed) and r.event.stored]
                proven = {key for event in confirmed for key in split_keys(event.keys)}
                asked = {
                    e.directive.directive_id for r in told if isinstance(e := r.event, DirectiveProposed)
                }
                answered = {r.event.directive_id for r in told if isinstance(r.event, DirectiveSettled)}
                states = replayed(told).states.values()
                over = bool(asked) and asked == answered and not any(s.flights or s.open for s in states)
                if over and not proven & set(it.far.chunks):
                    return told
                await asyncio.sleep(0.1)
    finally:
        await event_log.close()


def replayed(told: list[Any]) -> Contexts:
    contexts = Contexts()
    for recorded in told:
        contexts.apply(recorded)
    return contexts


def recounted(it: Scene, told: list[Any]) -> Contexts:
    """The books by the log alone; nothing was deleted that something referred to."""
    contexts = Contexts()
    deletions = sorted(it.far.deleted)
    for recorded in told:
        while deletions and deletions[0][0] < recorded.position:
            assert_dead(contexts, deletions.pop(0)[1])
        contexts.apply(recorded)
    for _, key in deletions:
        assert_dead(contexts, key)
    assert it.far.deleted
    return contexts


def calls(told: list[Any], kind: type[Any], uids: dict[str, str]) -> Counter[tuple[str, str]]:
    found = (r for r in told if isinstance(r.event, kind))
    return Counter((uids[r.stream.removeprefix("ctx/")], r.event.call_id) for r in found)


@pytest.mark.long
async def test_a_rolling_restart_fails_no_call_and_loses_no_event(tmp_path: Path) -> None:
    url = await place_in_shared_redis(tmp_path)
    async with scene(tmp_path, url) as it:
        old = [await it.start(), await it.start()]
        async with load(it, patient=False):
            await it.more()
            for each in old:
                await it.start()
                await it.more()
                assert await each.ended(signal.SIGTERM) == 0
                it.balancer.proxies.remove(each)
                await it.owner()
                await it.more()
        told = await what_is_proven_is_gone(it, url)
        contexts = recounted(it, told)
        uids = {uid: state.key.context_id for uid, state in contexts.states.items()}
        made = Counter(it.done)
        assert set(made.values()) == {1}
        assert calls(told, CallArrived, uids) == calls(told, CallEnded, uids) == made
        assert {r.event.end for r in told if isinstance(r.event, CallEnded)} == {CallEnd.COMPLETED}
        # Connections are kept, so one that was there for moments only may have been asked nothing.
        assert len({r.event.proxy for r in told if isinstance(r.event, CallArrived)}) >= 3


async def test_a_killed_owner_is_replaced_and_its_calls_are_ended(tmp_path: Path) -> None:
    url = await place_in_shared_redis(tmp_path)
    async with scene(tmp_path, url) as it:
        await it.start()
        await it.start()
        async with load(it, patient=True):
            await it.more()
            owner = await it.owner()
            assert await owner.ended(signal.SIGKILL) == -signal.SIGKILL
            it.balancer.proxies.remove(owner)
            assert await it.owner() is not owner
            answered = len(it.done)
            await it.more()
        told = await what_is_proven_is_gone(it, url)
        contexts = recounted(it, told)
        uids = {uid: state.key.context_id for uid, state in contexts.states.items()}
        # What a killed proxy had not recorded yet is lost; what the other one took in is not.
        assert set(it.done[answered:]) <= set(calls(told, CallEnded, uids))
