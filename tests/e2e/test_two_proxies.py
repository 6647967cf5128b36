"""Two proxies on one log before real engines and a real cache: replaced one after the other under agents that
talk, and the owner killed. No call fails that nobody was killed under, and what is dead is freed."""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai

from lifecycle.core.events import CallArrived, CallEnded, OperationApplied
from lifecycle.projections.contexts import Contexts
from lifecycle.store.opening import open_log
from tests.e2e.engine_cache import Cache
from tests.e2e.outside_proxy import Outside, nothing_proven_is_left
from tests.e2e.polling import SECONDS, polled
from tests.e2e.talking_agents import NUM_AGENTS, PAUSE_SECONDS, Talk
from tests.lifecycle.store.redis_process import RedisProcess
from tests.proxy.proxy_process import Balancer, readiness


class Member(Outside):
    """One of the proxies behind the address."""

    async def ready(self, http: httpx.AsyncClient) -> dict[str, Any]:
        return await readiness(self.admin_url, http)

    async def end(self) -> int:
        """SIGTERM to the proxy alone, as a platform sends it; its status."""
        child = self.process._child
        assert child is not None
        os.kill(child.pid, signal.SIGTERM)
        return await asyncio.to_thread(child.wait, SECONDS)


class Front(Outside):
    """The address, in the place of a proxy: agents talk to it."""

    def behind(self, url: str) -> None:
        self.data_url = url
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, http_client=http)


async def test_replaced_under_load_and_the_owner_killed(cache: Cache, tmp_path: Path) -> None:
    redis = RedisProcess(tmp_path / "redis").start()
    members: list[Member] = []

    async def start() -> Member:
        folder = tmp_path / f"proxy-{len(members)}"
        folder.mkdir()
        members.append(Member(cache, folder, log_url=redis.url))
        await members[-1].start()
        balancer.proxies.append(members[-1])  # type: ignore[arg-type]
        return members[-1]

    async def owned() -> bool:
        owners = [p for p in balancer.proxies if (await p.ready(balancer.http)).get("owns")]
        return len(owners) == 1

    front = Front(cache, tmp_path, log_url=redis.url)
    balancer = Balancer()
    try:
        async with balancer:
            front.behind(balancer.url)
            old = [await start(), await start()]
            await polled(owned)
            talk = Talk(front)
            async with talk:
                for each in old:
                    await start()
                    assert await each.end() == 0
                    balancer.proxies.remove(each)  # type: ignore[arg-type]
                    await polled(owned)
                    await talk.until_answered(NUM_AGENTS)
                assert talk.failed == [], "a rolling restart fails no call"
                for proxy in list(balancer.proxies):
                    if (await proxy.ready(balancer.http))["owns"]:
                        balancer.proxies.remove(proxy)
                        await proxy.process.kill()  # type: ignore[attr-defined]
                await polled(owned)
                await talk.until_answered(2 * NUM_AGENTS)
            await talk.close()
            await polled(lambda: nothing_proven_is_left(front, talk), PAUSE_SECONDS)
        await recounted(front.log_url)
    finally:
        for member in members:
            await member.close()
        await front.close()
        redis.kill()


async def recounted(log_url: str) -> None:
    """What the log says, against what may be true at the end."""
    event_log = (await open_log(log_url)).event_log
    told = [recorded async for recorded in event_log.read_all()]
    await event_log.close()
    contexts = Contexts()
    for recorded in told:
        contexts.apply(recorded)
    assert not any(state.flights or state.open for state in contexts.states.values())
    arrived = Counter(
        (r.stream, r.event.call_id, r.event.attempt) for r in told if isinstance(r.event, CallArrived)
    )
    ended = Counter(
        (r.stream, r.event.call_id, r.event.attempt) for r in told if isinstance(r.event, CallEnded)
    )
    assert arrived == ended
    assert set(arrived.values()) == {1}
    applied = Counter(
        (r.stream, r.event.source, r.event.operation.seq)
        for r in told
        if isinstance(r.event, OperationApplied)
    )
    assert set(applied.values()) == {1}
