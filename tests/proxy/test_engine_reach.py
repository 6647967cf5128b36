"""What is asked of engine and cache before control begins, and again when it comes to nothing."""

import asyncio
from pathlib import Path

from tests.proxy.scripted_upstream import Exchange
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import lifecycle, system, user, whole_proxy

LIST = [system("you are a toy"), user("something that is long enough to fill some chunks")]


async def test_an_engine_that_starts_later_is_found(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(503, b"starting")

    async with whole_proxy(tmp_path, script=script, ready=False) as it:
        body = {"model": NAME, "messages": LIST}
        answer = await it.data.post("/v1/chat/completions", json=body, headers=lifecycle(ctx="a"))
        assert answer.status_code == 503
        assert any("not been reached" in p for p in it.runtime.problems)
        it.engine.script = it.toy.script
        await asyncio.wait_for(it.runtime.prepared.wait(), 20)
        await it.chat(LIST, lifecycle(ctx="a"))
        assert it.context("a").namespace.fingerprint == it.runtime.models[NAME].fingerprint
