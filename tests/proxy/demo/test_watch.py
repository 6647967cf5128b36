"""What the demo counts is what the cache itself shows."""

import asyncio

import httpx

from lifecycle.core.events import ChunksConfirmed
from lifecycle.core.ids import Namespace
from lifecycle.vocabulary import Mode
from proxy.demo.watch import Watch
from tests.proxy.demo.small import backend

LONG = " ".join(f"word{number}" for number in range(700))


async def test_resident_and_dead_are_the_cache_s_own_chunks() -> None:
    async with backend().deployed(Mode.OBSERVE, 100_000) as deployed:
        runtime = deployed.up.runtime
        await runtime.prepared.wait()
        namespace = Namespace(deployed.model_name)
        watch = Watch(runtime, namespace, deployed.seconds)
        confirmed = asyncio.Event()
        runtime.tracker.listeners.append(
            lambda batch: (
                confirmed.set() if any(isinstance(r.event, ChunksConfirmed) for r in batch) else None
            )
        )
        await watch.sample()
        async with httpx.AsyncClient(base_url=deployed.up.data_url, trust_env=False) as http:
            for closes in (False, True):
                body = {
                    "model": deployed.model_name,
                    "max_tokens": 1,
                    "messages": [{"role": "user", "content": LONG}],
                    "kv_lifecycle": {"ctx": "one", "close": closes},
                }
                (await http.post("/v1/chat/completions", json=body, timeout=60)).raise_for_status()
                await runtime.mailboxes.settled()
                await asyncio.wait_for(confirmed.wait(), 30)
                await watch.sample()
        watch.end()
    empty, alive, closed = watch.samples
    assert (empty.resident_tokens, empty.dead_tokens) == (0, 0)
    assert alive.resident_tokens > 0
    assert alive.dead_tokens == 0
    assert closed.dead_tokens == closed.resident_tokens == alive.resident_tokens
