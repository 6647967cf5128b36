"""The LMCache driver on the real stack: what a deployment would notice."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from engine_bridge.cache_events import BlocksStored, EventSubscriber
from engine_bridge.call_blocks import CallBlocks
from engine_bridge.drivers.lmcache_mp import LmcacheMp
from engine_bridge.engine_address import EngineAddress
from engine_bridge.errors import CacheUnavailable
from engine_bridge.stack.engine_stack import EngineStack
from lifecycle.core.directives import Demote, Pin, Reclaim, Unpin
from lifecycle.core.ids import Namespace
from lifecycle.vocabulary import DirectiveOutcome, Tier
from tests.conformance.test_cache_control import CacheControlSuite, always
from tests.e2e.engine_calls import EngineCalls, LmcacheSubject, StoredChain, announced_chunks, fresh_tokens

BOTH = frozenset({Tier.L1, Tier.L2})
TINY = Namespace(model="tiny")


@pytest.fixture
async def calls(engine_stack: EngineStack) -> AsyncIterator[EngineCalls]:
    calls = EngineCalls(engine_stack)
    yield calls
    await calls.close()


@pytest.fixture
async def driver(engine_stack: EngineStack) -> AsyncIterator[LmcacheMp]:
    driver = LmcacheMp(engine_stack.coordinator_url, engines(engine_stack), l2_pins=True)
    test = await driver.self_test()
    assert test.problems == ()
    yield driver
    await driver.release_all()
    await driver.close()


@pytest.fixture
async def subject(calls: EngineCalls, driver: LmcacheMp) -> LmcacheSubject:
    return LmcacheSubject(calls, driver, TINY)


def engines(stack: EngineStack) -> list[EngineAddress]:
    return [EngineAddress(stack.upstream_url)]


def reclaim(keys: list[bytes], namespace: Namespace = TINY) -> Reclaim:
    return Reclaim(directive_id="r", namespace=namespace, reason="test", keys=b"".join(keys))


class TestConformance(CacheControlSuite):
    """Everything the port promises, on stock LMCache."""


class TestSelfTest:
    async def test_a_sound_deployment_passes(self, engine_stack: EngineStack, driver: LmcacheMp) -> None:
        test = await driver.self_test()
        assert test.ok
        assert test.chunk_size == engine_stack.options.chunk_size
        # two layers, one KV head of 32 values, key and value, two bytes each
        assert test.bytes_per_token == 2 * 32 * 2 * 2
        assert {"reclaim", "demote", "admit"} <= driver.capabilities.supported
        assert driver.findings.save_decode_cache is True

    async def test_it_deletes_nothing(self, engine_stack: EngineStack, driver: LmcacheMp) -> None:
        logs = [engine_stack.log(name) for name in ("lmcache", "coordinator")]
        before = [log.read_text().count('"DELETE ') for log in logs]
        assert (await driver.self_test()).ok
        assert [log.read_text().count('"DELETE ') for log in logs] == before
        assert '"POST /directory/lookup' in logs[1].read_text(), "the log would show a delete"

    async def test_a_wrong_chunk_size_is_a_problem_that_names_the_right_one(
        self, engine_stack: EngineStack
    ) -> None:
        driver = LmcacheMp(engine_stack.coordinator_url, engines(engine_stack), chunk_size=256)
        test = await driver.self_test()
        assert not test.ok
        assert "set the chunk size to 64" in test.problems[0]
        await driver.close()

    async def test_another_tokenizer_is_a_problem(self, engine_stack: EngineStack) -> None:
        driver = LmcacheMp(
            engine_stack.coordinator_url,
            engines(engine_stack),
            tokenize=lambda text: list(text.encode()),
        )
        test = await driver.self_test()
        assert not test.ok
        assert any("tokenizer" in problem for problem in test.problems)
        await driver.close()

    async def test_the_engines_tokenizer_is_no_problem(self, engine_stack: EngineStack) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(f"{engine_stack.model_path}/tokenizer.json")
        driver = LmcacheMp(
            engine_stack.coordinator_url,
            engines(engine_stack),
            tokenize=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        )
        assert (await driver.self_test()).problems == ()
        await driver.close()

    async def test_without_a_self_test_nothing_is_deleted(
        self, engine_stack: EngineStack, subject: LmcacheSubject
    ) -> None:
        chain = await subject.store(2)
        untested = LmcacheMp(
            engine_stack.coordinator_url,
            engines(engine_stack),
            key_models={"tiny": engine_stack.model_path},
        )
        result = await untested.execute(reclaim(chain.keys), always, lambda: None)
        assert result.outcome is DirectiveOutcome.REJECTED
        assert [each.tiers for each in await untested.locate(TINY, chain.keys)] == [BOTH, BOTH]
        await untested.close()

    async def test_an_unreachable_coordinator_is_a_problem(self, engine_stack: EngineStack) -> None:
        driver = LmcacheMp("http://127.0.0.1:1", engines(engine_stack))
        assert not (await driver.self_test()).ok
        with pytest.raises(CacheUnavailable):
            await driver.locate(TINY, [bytes(32)])
        await driver.close()


class TestWhatTheNextCallFinds:
    async def test_after_reclaim_it_hits_exactly_the_kept_prefix(
        self, subject: LmcacheSubject, calls: EngineCalls, driver: LmcacheMp
    ) -> None:
        chain = await subject.store(6)
        result = await driver.execute(reclaim(chain.keys[2:]), always, lambda: None)
        assert result.applied == 4
        assert await calls.cached_tokens([*chain.token_ids, 1000]) == 2 * calls.stack.options.chunk_size

    async def test_after_demote_it_still_hits_everything(
        self, subject: LmcacheSubject, calls: EngineCalls, driver: LmcacheMp
    ) -> None:
        chain = await subject.store(4)
        directive = Demote(directive_id="d", namespace=TINY, reason="test", keys=b"".join(chain.keys))
        assert (await driver.execute(directive, always, lambda: None)).applied == 4
        assert await calls.cached_tokens([*chain.token_ids, 1000]) == len(chain.token_ids)

    async def test_reclaim_spares_the_same_tokens_under_another_salt(
        self, subject: LmcacheSubject, calls: EngineCalls, driver: LmcacheMp
    ) -> None:
        chain = await subject.store(3)
        salted = LmcacheSubject(calls, driver, Namespace(model="tiny", salt="tenant-b"))
        twin = await salted.store(3, after=chain)
        assert twin.keys == chain.keys
        assert (await driver.execute(reclaim(chain.keys), always, lambda: None)).applied == 3
        assert [each.tiers for each in await driver.locate(salted.namespace, twin.keys)] == [BOTH] * 3
        assert (await driver.execute(reclaim(twin.keys, salted.namespace), always, lambda: None)).applied == 3

    async def test_a_reclaim_right_behind_the_store_still_ends_with_nothing_left(
        self, subject: LmcacheSubject, calls: EngineCalls, driver: LmcacheMp
    ) -> None:
        chain = await calls.complete(fresh_tokens(20 * calls.stack.options.chunk_size))
        result = await driver.execute(reclaim(chain.keys), always, lambda: None)
        assert (result.outcome, result.applied) == (DirectiveOutcome.APPLIED, 20)
        await asyncio.sleep(2.0)  # the file adapter writes its copies within this time
        names = [path.name for path in calls.stack.l2_dir.rglob("*")]
        assert not [key for key in chain.keys if any(key.hex() in name for name in names)]

    async def test_the_bypass_hint_keeps_the_rest_out(self, calls: EngineCalls, driver: LmcacheMp) -> None:
        size = calls.stack.options.chunk_size
        hint = {"lmcache.max_offload_tokens": 2 * size}
        chain = await calls.complete(fresh_tokens(5 * size), kv_transfer_params=hint)
        subject = LmcacheSubject(calls, driver, TINY)
        await subject.await_tiers(chain.keys[:2], BOTH)
        assert [each.tiers for each in await driver.locate(TINY, chain.keys[2:])] == [frozenset()] * 3


class TestPins:
    def pin(self, chain: StoredChain, pin_id: str = "pin", lease: int = 1 << 62) -> Pin:
        return Pin(
            directive_id="p",
            namespace=TINY,
            reason="test",
            keys=b"".join(chain.keys),
            pin_id=pin_id,
            lease_until_ns=lease,
        )

    async def pin_counts(self, stack: EngineStack) -> dict[str, int]:
        async with httpx.AsyncClient(trust_env=False) as client:
            reply = (await client.get(f"{stack.coordinator_url}/cache/pins?limit=10000")).json()
        return {each["key"]["chunk_hash_hex"]: each["pin_count"] for each in reply["pins"]}

    async def test_a_repeated_pin_counts_once(
        self, engine_stack: EngineStack, subject: LmcacheSubject, driver: LmcacheMp
    ) -> None:
        chain = await subject.store(2)
        for _ in range(2):
            await driver.execute(self.pin(chain), always, lambda: chain.token_ids)
        counts = await self.pin_counts(engine_stack)
        assert [counts[key.hex()] for key in chain.keys] == [1, 1]
        await driver.execute(
            Unpin(directive_id="u", namespace=TINY, reason="test", keys=b"", pin_id="pin"),
            always,
            lambda: None,
        )
        assert not set(await self.pin_counts(engine_stack)) & {key.hex() for key in chain.keys}

    async def test_unknown_tokens_cannot_be_pinned(self, subject: LmcacheSubject, driver: LmcacheMp) -> None:
        chain = await subject.store(1)
        result = await driver.execute(self.pin(chain), always, lambda: None)
        assert result.outcome is DirectiveOutcome.REJECTED

    async def test_reconcile_ends_leases_and_restores_what_the_coordinator_forgot(
        self, engine_stack: EngineStack, subject: LmcacheSubject, driver: LmcacheMp
    ) -> None:
        kept, ended = await subject.store(2), await subject.store(1)
        await driver.execute(self.pin(kept, "kept"), always, lambda: kept.token_ids)
        await driver.execute(self.pin(ended, "ended", lease=5), always, lambda: ended.token_ids)
        forget = {"model_name": engine_stack.model_path, "world_size": 1, "token_ids": list(kept.token_ids)}
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.request("DELETE", f"{engine_stack.coordinator_url}/cache/pins", json=forget)
        outcome = await driver.reconcile(now_ns=6)
        assert (outcome.expired, outcome.restored, outcome.drifted) == (("ended",), ("kept",), ())
        counts = await self.pin_counts(engine_stack)
        assert [counts.get(key.hex(), 0) for key in kept.keys + ended.keys] == [1, 1, 0]
        assert [pin.pin_id for pin in driver.held_pins()] == ["kept"]

    async def test_pins_of_an_earlier_run_are_released_after_adoption(
        self, engine_stack: EngineStack, subject: LmcacheSubject, driver: LmcacheMp
    ) -> None:
        chain = await subject.store(2)
        earlier = LmcacheMp(engine_stack.coordinator_url, engines(engine_stack), l2_pins=True)
        await earlier.self_test()
        await earlier.execute(self.pin(chain, "old"), always, lambda: chain.token_ids)
        await earlier.close()
        driver.adopt_pins(earlier.held_pins())
        assert await driver.release_all() == 1
        assert not set(await self.pin_counts(engine_stack)) & {key.hex() for key in chain.keys}


class TestEvents:
    async def collect(self, calls: EngineCalls, wanted: set[bytes]) -> list[BlocksStored]:
        """Stored events until all wanted chunk keys were announced in L1.

        An idle engine keeps such reports until its next step, so it is given steps to make.
        """
        stack = calls.stack
        subscriber = EventSubscriber(stack.events_endpoint, replay_endpoint=stack.replay_endpoint, topic="kv")
        stored: list[BlocksStored] = []

        async def listen(wanted: set[bytes]) -> None:
            async for batch in subscriber.batches():
                stored.extend(event for event in batch.events if isinstance(event, BlocksStored))
                wanted = wanted - {key for event in stored if event.tier is Tier.L1 for key in event.keys}
                if not wanted:
                    return

        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            listening = group.create_task(listen(wanted))
            while not listening.done():
                await calls.complete(fresh_tokens(1))
                await asyncio.wait([listening], timeout=0.2)
        return stored

    async def test_stored_chunks_are_announced_under_our_keys_with_their_generated_tokens(
        self, engine_stack: EngineStack, calls: EngineCalls
    ) -> None:
        prompt = fresh_tokens(150)
        chain = await calls.complete(prompt, max_tokens=120, session_id="call-1")
        # the last sampled token has no KV yet
        computed = [*prompt, *chain.generated][:-1]
        keys = calls.keys(computed)
        stored = await self.collect(calls, set(keys))
        found = announced_chunks(b"".join(chain.keys), prompt[128:], stored)
        assert [chunk.key for chunk in found] == keys[2:]
        assert [token for chunk in found for token in chunk.token_ids] == computed[128 : 64 * len(keys)]
        of_call = [event for event in stored if event.session_id == "call-1"]
        assert {event.tier for event in of_call} == {Tier.GPU}
        seen = [token for event in of_call for token in event.token_ids]
        assert seen == computed[: len(seen)]
        assert len(computed) - len(seen) < engine_stack.options.block_size

    async def test_what_a_call_generated_is_known_when_it_ends_also_behind_a_cached_prompt(
        self, engine_stack: EngineStack, calls: EngineCalls, subject: LmcacheSubject
    ) -> None:
        subscriber = EventSubscriber(
            engine_stack.events_endpoint, replay_endpoint=engine_stack.replay_endpoint, topic="kv"
        )
        blocks = CallBlocks()

        async def follow() -> None:
            async for batch in subscriber.batches():
                blocks.take(batch)

        prompt = fresh_tokens(150)
        async with asyncio.TaskGroup() as group:
            following = group.create_task(follow())
            await calls.complete(prompt)
            for attempt in ("first", "second"):
                chain = await calls.complete(prompt, max_tokens=120, session_id=attempt)
                assert chain.reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
                expected = calls.keys([*prompt, *chain.generated][:-1])[len(chain.keys) :]
                found: list[bytes] = []
                for _ in range(50):
                    chunks = blocks.generated(attempt, b"".join(chain.keys), prompt[128:], 64)
                    found = [chunk.key for chunk in chunks]
                    if found == expected:
                        break
                    await asyncio.sleep(0.1)
                assert found == expected
                await subject.await_tiers(found, BOTH)
            following.cancel()

    async def test_several_choices_leave_a_tree(self, calls: EngineCalls) -> None:
        prompt = fresh_tokens(100)
        chain = await calls.complete(prompt, max_tokens=60, n=2)
        endings = [choice["token_ids"] for choice in chain.reply["choices"]]
        expected = {
            key for ending in endings for key in calls.keys([*prompt, *ending][:-1])[len(chain.keys) :]
        }
        stored = await self.collect(calls, expected)
        assert {
            chunk.key for chunk in announced_chunks(b"".join(chain.keys), prompt[64:], stored)
        } == expected

    async def test_the_live_stream_continues_the_replay_without_gap_or_repeat(
        self, engine_stack: EngineStack, calls: EngineCalls
    ) -> None:
        await calls.complete(fresh_tokens(100))
        subscriber = EventSubscriber(
            engine_stack.events_endpoint, replay_endpoint=engine_stack.replay_endpoint, topic="kv"
        )
        sequences: list[int] = []
        ready, last = asyncio.Event(), "the last call"

        async def listen() -> None:
            async for batch in subscriber.batches():
                sequences.append(batch.sequence)
                ready.set()
                if any(
                    isinstance(event, BlocksStored) and event.session_id == last for event in batch.events
                ):
                    return

        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(listen())
            await ready.wait()
            await calls.complete(fresh_tokens(100))
            await calls.complete(fresh_tokens(100), session_id=last)
        assert sequences == list(range(sequences[0], sequences[-1] + 1))


class TestRestarts:
    """Last: these take the stack's memory with them."""

    async def test_a_restarted_cache_server_is_another_incarnation_and_serves_again(
        self, engine_stack: EngineStack, subject: LmcacheSubject, driver: LmcacheMp
    ) -> None:
        chain = await subject.store(2)
        before = await driver.incarnations()
        await engine_stack.restart("lmcache")
        for _ in range(100):
            after = await driver.incarnations()
            if after.keys() == before.keys() and after != before:
                break
            await asyncio.sleep(0.2)
        assert after != before
        assert all(Tier.L1 not in each.tiers for each in await driver.locate(TINY, chain.keys))
        for _ in range(100):  # the engine registers again at its next heartbeat
            test = await driver.self_test()
            if test.ok:
                break
            await asyncio.sleep(0.5)
        assert test.problems == ()
        fresh = await subject.store(2)
        assert (await driver.execute(reclaim(fresh.keys), always, lambda: None)).applied == 2

    async def test_without_a_coordinator_a_reclaim_fails_and_says_so(
        self, engine_stack: EngineStack, subject: LmcacheSubject, driver: LmcacheMp
    ) -> None:
        chain = await subject.store(1)
        coordinator = engine_stack._processes["coordinator"]
        await coordinator.stop()
        try:
            result = await driver.execute(reclaim(chain.keys), always, lambda: None)
        finally:
            await engine_stack.restart("coordinator")
        assert result.outcome is DirectiveOutcome.FAILED
        assert "ConnectError" in result.reason
