"""What lives as long as the proxy: what stands in its way, what survives a restart, and how it ends."""

import asyncio
import multiprocessing
from pathlib import Path

from lifecycle.core.ids import Namespace
from lifecycle.core.observations import CloseRequested, ContextOpened
from lifecycle.ports import SelfTest
from lifecycle.store.opening import open_log
from lifecycle.vocabulary import DirectiveOutcome, IdentityRung, Mode
from proxy.config import CacheConfig
from proxy.runtime import open_runtime
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.lives import books, replayed, replayed_beside
from tests.lifecycle.store.redis_process import RedisProcess, place_in_shared_redis
from tests.proxy.scripted_upstream import Exchange, ScriptedUpstream
from tests.proxy.toy_model import CHUNK, NAME
from tests.proxy.whole_proxy import Whole, assistant, configured, lifecycle, system, user, whole_proxy

LIST = [system("you are a toy"), user("something that is long enough to fill some chunks")]


async def stored(it: Whole, name: str = "a") -> None:
    index = it.runtime.tracker.contexts.index
    run = b"".join(it.toy.keys(LIST))
    await it.until(lambda: index.verified_chunks(it.context(name).namespace, run) * 32 == len(run))


async def test_after_a_restart_contexts_go_on_and_the_dead_are_freed(tmp_path: Path) -> None:
    log_url = f"sqlite:///{tmp_path / 'log.db'}"
    cache = FakeCache(chunk_size=CHUNK)
    async with whole_proxy(tmp_path, cache=cache, log_url=log_url) as it:
        await it.chat(LIST, lifecycle(ctx="a", call="1"))
        await stored(it)
        cache.gate.clear()
        await it.ops({"op": "remove", "seq": 1, "ctx": "a", "span": [1, 2]})
        await asyncio.wait_for(cache.reached.wait(), 10)
        uid = it.context("a").uid
        (left,) = (d.directive_id for d in cache.asked[:1])
    cache.gate.set()
    async with whole_proxy(tmp_path, cache=cache, log_url=log_url, ready=False) as it:
        contexts = it.runtime.tracker.contexts
        assert it.context("a").uid == uid
        await it.until(lambda: contexts.directives[left].result is not None)
        result = contexts.directives[left].result
        assert result is not None
        assert result.outcome is DirectiveOutcome.EXPIRED
        await asyncio.wait_for(it.runtime.prepared.wait(), 10)
        await it.chat([LIST[0], user("new")], lifecycle(ctx="a", call="2"))
        assert set(it.context("a").attempts) == {"1", "2"}
        answer = await it.chat([*LIST, assistant("x")])
        assert answer.status_code == 200
        again = await replayed_beside(it.runtime.tracker, it.runtime.event_log)
        assert books(contexts) == books(again)


async def test_digests_of_messages_are_the_same_after_a_restart(tmp_path: Path) -> None:
    log_url = f"sqlite:///{tmp_path / 'log.db'}"
    shapes = []
    for _ in range(2):
        async with whole_proxy(tmp_path, log_url=log_url, ready=False) as it:
            shapes.append(it.runtime.hasher.shape(user("hi")))
    assert shapes[0] == shapes[1]
    async with whole_proxy(tmp_path, log_url="memory:", ready=False) as it:
        assert it.runtime.hasher.shape(user("hi")) != shapes[0]


async def test_nothing_is_planned_before_the_self_test_has_run(tmp_path: Path) -> None:
    told = asyncio.Event()

    class Slow(FakeCache):
        async def self_test(self) -> SelfTest:
            await told.wait()
            return self.tested

    cache = Slow(chunk_size=CHUNK)
    async with whole_proxy(tmp_path, cache=cache, ready=False) as it:
        assert not it.runtime.self_test.ok
        body = {"model": NAME, "messages": LIST}
        await it.data.post("/v1/chat/completions", json=body, headers=lifecycle(ctx="a"))
        await it.until(lambda: bool(it.runtime.tracker.contexts.states) and bool(it.context("a").flights))
        await it.runtime.tracker.observe(it.context("a").uid, CloseRequested(at_ns=1, reason="test"))
        assert not it.runtime.tracker.contexts.directives
        told.set()
        await asyncio.wait_for(it.runtime.prepared.wait(), 10)
        assert it.runtime.self_test.ok


async def test_calls_before_the_model_is_mapped_again_go_on_with_their_contexts(tmp_path: Path) -> None:
    log_url = f"sqlite:///{tmp_path / 'log.db'}"
    told = asyncio.Event()

    class Slow(FakeCache):
        async def self_test(self) -> SelfTest:
            await told.wait()
            return self.tested

    async with whole_proxy(tmp_path, log_url=log_url) as it:
        await it.chat(LIST, lifecycle(ctx="a", call="1"))
        await it.ops({"op": "waiting", "seq": 1, "ctx": "a", "kind": "tool"})
        uid = it.context("a").uid
    async with whole_proxy(tmp_path, cache=Slow(chunk_size=CHUNK), log_url=log_url, ready=False) as it:
        longer = [*LIST, assistant("ok"), user("more")]
        body = {"model": NAME, "messages": longer}
        headers = lifecycle(ctx="a", call="2")
        answer = await it.data.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, "nobody waits but the books"
        told.set()
        await asyncio.wait_for(it.runtime.prepared.wait(), 10)
        [applied] = await it.ops({"op": "waiting", "seq": 2, "ctx": "a", "kind": "human"})
        assert applied["status"] == "applied", "its operations go on where they were"
        index = it.runtime.tracker.contexts.index
        run = b"".join(it.toy.keys(longer))
        await it.until(lambda: index.verified_chunks(it.context("a").namespace, run) * 32 == len(run))
        await it.chat([*LIST, assistant("ok"), user("more")], lifecycle(ctx="a", call="3"))
        assert [s.uid for s in it.runtime.tracker.contexts.states.values()] == [uid]
        assert set(it.context("a").attempts) == {"1", "2", "3"}
        assert not it.context("a").unmapped


async def test_a_failed_self_test_means_observe_with_its_reason(tmp_path: Path) -> None:
    cache = FakeCache(chunk_size=CHUNK)
    cache.tested = SelfTest(ok=False, problems=("the chunk size is another one",), chunk_size=CHUNK)
    async with whole_proxy(tmp_path, cache=cache) as it:
        assert "the chunk size is another one" in it.runtime.problems
        await it.chat(LIST, lifecycle(ctx="a"))
        await stored(it)
        await it.ops({"op": "close", "seq": 1, "ctx": "a"})
        records = it.runtime.tracker.contexts.directives
        await it.until(lambda: bool(records) and all(r.result for r in records.values()))
        results = [r.result for r in records.values() if r.result]
        assert {(r.outcome, r.reason) for r in results} == {
            (DirectiveOutcome.SUPPRESSED, "the chunk size is another one")
        }
        assert cache.asked == []


async def test_a_context_mapped_by_another_template_than_now_only_observes(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        model = it.runtime.models[NAME]
        for uid, fingerprint in (("now", model.fingerprint), ("then", "old")):
            opened = ContextOpened(
                at_ns=1,
                uid=uid,
                tenant="default",
                context_id=uid,
                namespace=Namespace(NAME, "", fingerprint),
                rung=IdentityRung.EXPLICIT,
            )
            await it.runtime.tracker.open(opened, None)
        assert it.runtime.mode_of("now") is Mode.ENFORCE
        assert it.runtime.mode_of("then") is Mode.OBSERVE
        assert it.runtime.objection(Namespace("nobody", "", ""))


async def test_without_a_cache_everything_is_followed_and_nothing_controlled(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond_json({"data": [{"id": NAME}], "version": "1"})

    async with ScriptedUpstream(script) as engine:
        config = configured(tmp_path, engine.url, Mode.ENFORCE, cache=CacheConfig())
        async with open_runtime(config) as runtime:
            async with asyncio.timeout(20):
                await runtime.prepared.wait()
            assert runtime.cache.capabilities.level == 0
            assert not runtime.self_test.ok
            assert runtime.models[NAME].service is not None
            assert multiprocessing.active_children()
        assert not multiprocessing.active_children()


async def test_on_redis_contexts_and_digests_survive_a_restart(tmp_path: Path) -> None:
    log_url = await place_in_shared_redis(tmp_path)
    cache = FakeCache(chunk_size=CHUNK)
    shapes = []
    for call in ("1", "2"):
        async with whole_proxy(tmp_path, cache=cache, log_url=log_url) as it:
            await it.chat(LIST, lifecycle(ctx="a", call=call))
            await it.until(lambda call=call: call in it.context("a").attempts)
            await stored(it)
            shapes.append(it.runtime.hasher.shape(user("hi")))
            contexts = it.runtime.tracker.contexts
    assert shapes[0] == shapes[1]
    assert set(it.context("a").attempts) == {"1", "2"}
    log, *_ = await open_log(log_url)
    assert books(contexts) == books(await replayed(log))
    await log.close()


async def test_a_redis_that_dies_under_a_running_proxy_costs_no_call_and_no_event(tmp_path: Path) -> None:
    redis = RedisProcess(tmp_path / "redis").start()
    try:
        async with whole_proxy(tmp_path, cache=FakeCache(chunk_size=CHUNK), log_url=redis.url) as it:
            await it.chat(LIST, lifecycle(ctx="a", call="1"))
            await stored(it)
            await asyncio.to_thread(redis.kill)
            answer = await it.chat([*LIST, assistant("x"), user("y")], lifecycle(ctx="a", call="2"))
            assert answer.status_code == 200
            await it.until(lambda: bool(it.runtime.tracker.degraded))
            assert any("wait for the event log" in problem for problem in it.runtime.problems)
            await asyncio.to_thread(redis.start)
            await it.until(lambda: not it.runtime.tracker.degraded)
            assert set(it.context("a").attempts) == {"1", "2"}
            contexts = it.runtime.tracker.contexts
            again = await replayed_beside(it.runtime.tracker, it.runtime.event_log)
            assert books(contexts) == books(again)
    finally:
        redis.kill()
