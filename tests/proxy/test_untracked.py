"""Inference that is not followed holds reclaim back where it may have used the cache, and nowhere else."""

from pathlib import Path

from lifecycle.core.ids import Namespace
from tests.proxy.scripted_upstream import Exchange
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import whole_proxy


async def test_a_known_model_is_noted_in_its_own_cache_only(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        index = it.runtime.tracker.contexts.index
        it.runtime.tracking.untracked.note(Namespace(NAME, "salted"), "a test")
        await it.until(lambda: index.last_untracked_ns(Namespace(NAME, "salted")) is not None)
        assert index.last_untracked_ns(Namespace(NAME)) is None


async def test_what_may_be_any_model_is_noted_everywhere(tmp_path: Path) -> None:
    for namespace in (None, Namespace("somebody")):
        async with whole_proxy(tmp_path) as it:
            index = it.runtime.tracker.contexts.index
            it.runtime.tracking.untracked.note(namespace, "a test")
            await it.until(lambda index=index: index.last_untracked_ns(Namespace(NAME)) is not None)


async def test_a_name_that_the_engine_does_not_know_either_holds_nothing_back(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(404, b"no such model")

    async with whole_proxy(tmp_path, script=script, ready=False) as it:
        index = it.runtime.tracker.contexts.index
        answer = await it.data.post("/v1/score", json={"model": "typo", "input": "x"})
        assert answer.status_code == 404
        it.runtime.tracking.untracked.note(Namespace(NAME, "later"), "a barrier")
        await it.until(lambda: index.last_untracked_ns(Namespace(NAME, "later")) is not None)
        assert index.last_untracked_ns(Namespace(NAME)) is None
