"""Who hangs up ends what was computed for them; who is failed by the engine is told."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from engine_bridge.sim.embedded import EmbeddedEngine, EmbeddedOptions
from engine_bridge.sim.hardware import INSTANT, EngineConfig

SLOW = EngineConfig(hardware=msgspec.structs.replace(INSTANT, step_ns=20_000_000))
BODY = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 5000, "ignore_eos": True}
POLLS = 1000


@pytest.fixture
async def engine() -> AsyncIterator[EmbeddedEngine]:
    """One that takes 20 ms for a token: an answer takes 100 seconds."""
    async with EmbeddedEngine(EmbeddedOptions(engine=SLOW)) as engine:
        yield engine


@pytest.fixture
async def http(engine: EmbeddedEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False, timeout=20) as http:
        yield http


async def until_running(engine: EmbeddedEngine, count: int) -> None:
    for _ in range(POLLS):
        if engine.runner.stats().num_running == count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{engine.runner.stats().num_running} requests run, not {count}")


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stream": True}, {"stream": True, "n": 2}], ids=str)
async def test_hanging_up_stops_the_engine(
    engine: EmbeddedEngine, http: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    call = asyncio.ensure_future(http.post("/v1/chat/completions", json={**BODY, **fields}))
    await until_running(engine, fields.get("n", 1))
    call.cancel()
    await until_running(engine, 0)
    assert engine.runner.stats().num_waiting == 0


async def test_an_engine_that_starts_anew_fails_what_runs(
    engine: EmbeddedEngine, http: httpx.AsyncClient
) -> None:
    whole = asyncio.ensure_future(http.post("/v1/chat/completions", json=BODY))
    streamed = asyncio.ensure_future(http.post("/v1/chat/completions", json={**BODY, "stream": True}))
    await until_running(engine, 2)
    engine.runner.restart_engine()
    answer = await whole
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalServerError")
    assert "restarted" in answer.json()["error"]["message"]
    events = (await streamed).text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert "restarted" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
