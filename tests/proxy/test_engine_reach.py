"""What is asked of engine and cache before control begins, and again when it comes to nothing."""

import asyncio
from pathlib import Path

from lifecycle.ports import SelfTest
from tests.lifecycle.fake_cache import FakeCache
from tests.proxy.scripted_upstream import Exchange
from tests.proxy.several_engines import several_engines
from tests.proxy.toy_model import CHUNK, NAME
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


async def test_one_of_several_that_is_away_is_a_warning_and_proven_when_it_is_back(tmp_path: Path) -> None:
    tests = 0

    class Counting(FakeCache):
        async def self_test(self) -> SelfTest:
            nonlocal tests
            tests += 1
            return self.tested

    async with several_engines(tmp_path, cache=Counting(chunk_size=CHUNK)) as it:
        assert it.runtime.warnings == ()
        await it.engines["b"].kill()
        await it.until_seen(lambda: bool(it.backend("b").down))
        (warning,) = it.runtime.warnings
        assert warning.startswith("engine b takes no calls")
        assert it.runtime.self_test.ok
        before = tests
        await it.engines["b"].revive()
        await it.until_seen(lambda: tests > before)
        await it.until_seen(lambda: it.runtime.warnings == ())


async def test_engines_of_different_versions_are_a_warning(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:

        async def newer(exchange: Exchange) -> None:
            if exchange.target == b"/version":
                await exchange.read_body()
                await exchange.respond_json({"version": "9.9"})
            else:
                await it.engines["b"].answer(exchange)

        it.engines["b"].script = newer
        it.runtime.backends.take_down(it.backend("b"), "being replaced")
        it.backend("b").suspected.set()
        await it.until_seen(lambda: any("9.9" in text for text in it.runtime.warnings))
