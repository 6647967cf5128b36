"""What a cache holds for us is given back, whoever died in between; a new cache server is noticed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter

from engine_bridge.drivers.lmcache_pins import Reconciled
from engine_bridge.drivers.noop import NoCacheControl
from engine_bridge.pin_holder import packed
from lifecycle.store.database import open_database
from lifecycle.store.memory import MemoryEventLog
from lifecycle.store.pin_vault import PinVault
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import DirectiveOutcome
from proxy.hold_watch import HoldWatch
from tests.lifecycle.lives import ManualClock
from tests.proxy.holding_cache import HoldingCache, held_pin
from tests.proxy.whole_proxy import SECONDS, Whole, lifecycle, system, user, whole_proxy

LIST = [system("you are a toy"), user("something that is long enough to fill some chunks")]
PIN = {"op": "pin", "seq": 1, "ctx": "a", "span": [0, 2], "ttl": 600}
UNPIN = {"op": "unpin", "seq": 2, "ctx": "a", "span": [0, 2]}


@asynccontextmanager
async def running(tmp_path: Path, cache: HoldingCache, **changes: object) -> AsyncIterator[Whole]:
    """One run of the proxy on the same log, compared once with the cache."""
    fields = {"log_url": f"sqlite:///{tmp_path / 'log.db'}", **changes}
    async with whole_proxy(tmp_path, cache=cache, **fields) as it:  # type: ignore[arg-type]
        async with asyncio.timeout(SECONDS):
            while not cache.compared.is_set() and cache.pins:
                await cache.compared.wait()
        yield it


async def pinned(it: Whole) -> None:
    await it.chat(LIST, lifecycle(ctx="a"))
    await it.ops(PIN)
    await settled(it, 1)


async def settled(it: Whole, count: int) -> None:
    """Until so many pins and unpins came to an end."""
    directives = it.runtime.tracker.contexts.directives
    await it.until(
        lambda: (
            count
            <= sum(
                r.result is not None and type(r.directive).__name__ in ("Pin", "Unpin")
                for r in directives.values()
            )
        )
    )


async def kept(tmp_path: Path) -> set[str]:
    """Pins in the vault at rest."""
    engine = await open_database(f"sqlite:///{tmp_path / 'log.db'}")
    found = await (await PinVault.open(engine)).load()
    await engine.dispose()
    return set(found)


async def keep(tmp_path: Path, *pin_ids: str) -> None:
    engine = await open_database(f"sqlite:///{tmp_path / 'log.db'}")
    await (await PinVault.open(engine)).replace(packed(held_pin(each) for each in pin_ids))
    await engine.dispose()


async def released(it: Whole) -> dict[str, int]:
    answer = await it.admin.post("/kv/v1/release-all")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_release_all_gives_back_what_an_earlier_run_pinned(tmp_path: Path) -> None:
    far: dict[str, bytes] = {}
    async with running(tmp_path, HoldingCache(far)) as it:
        await pinned(it)
    assert len(far) == 1
    assert await kept(tmp_path) == far.keys()
    async with running(tmp_path, HoldingCache(far)) as it:
        assert len(far) == 1, "a restart alone gives nothing back"
        assert await released(it) == {"pins": 1, "cache_holds": 1}
        assert far == {}
    assert await kept(tmp_path) == set()


async def test_a_pin_of_an_earlier_run_is_renewed_moved_on_and_unpinned(tmp_path: Path) -> None:
    far: dict[str, bytes] = {}
    async with running(tmp_path, HoldingCache(far)) as it:
        await pinned(it)
    cache = HoldingCache(far)
    async with running(tmp_path, cache) as it:
        before = cache.held_pins()
        await it.ops({**PIN, "ttl": 3000}, source="t")
        await it.until(lambda: cache.held_pins()[0].lease_until_ns > before[0].lease_until_ns)
        assert len(far) == 1
        await it.ops({**UNPIN, "seq": 2}, source="t")
        await it.until(lambda: not far)
        await it.runtime.pins.settled()
        assert not it.runtime.pins.changing(it.context("a").uid)
    assert await kept(tmp_path) == set()


async def test_a_process_that_died_while_it_pinned_leaves_nothing_unknown(tmp_path: Path) -> None:
    for dies in ("dies_before_send", "dies_after_send"):
        folder = tmp_path / dies
        folder.mkdir()
        far: dict[str, bytes] = {}
        cache = HoldingCache(far)
        setattr(cache, dies, True)
        async with running(folder, cache) as it:
            await it.chat(LIST, lifecycle(ctx="a"))
            await it.ops(PIN)
            async with asyncio.timeout(SECONDS):
                await cache.dying.wait()
            assert len(await kept(folder)) == 1
        async with running(folder, HoldingCache(far)) as it:
            assert len(far) == 1, "its context has the pin: it is held"
            assert await released(it) == {"pins": 1, "cache_holds": 1}
        assert far == {}


async def test_holds_that_no_context_has_are_let_go(tmp_path: Path) -> None:
    far: dict[str, bytes] = {}
    async with running(tmp_path, HoldingCache(far)) as it:
        await pinned(it)
        uid = it.context("a").uid
    ours = dict(far)
    strays = ["gone:p1", f"{uid}:p99", *(f"{pin_id}-left" for pin_id in ours)]
    far |= dict.fromkeys(strays, b"")
    cache = HoldingCache(far)
    cache.adopt_pins([held_pin(*item) for item in far.items()])
    engine = await open_database(f"sqlite:///{tmp_path / 'log.db'}")
    await (await PinVault.open(engine)).replace(packed(cache.held_pins()))
    await engine.dispose()
    async with running(tmp_path, cache) as it:
        async with asyncio.timeout(SECONDS):
            while far != ours:
                cache.compared.clear()
                await cache.compared.wait()
        text = (await it.admin.get("/metrics")).text
        assert f'kvtether_pin_repairs_total{{what="orphaned"}} {len(strays)}.0' in text
    assert await kept(tmp_path) == ours.keys()


async def test_with_pins_switched_off_nothing_stays_held(tmp_path: Path) -> None:
    far: dict[str, bytes] = {}
    async with running(tmp_path, HoldingCache(far)) as it:
        await pinned(it)

    class Without(HoldingCache):
        def __init__(self) -> None:
            super().__init__(far)
            self._supported = frozenset({"reclaim", "demote", "admit"})

    async with running(tmp_path, Without()):
        assert far == {}


async def test_a_lost_key_does_not_stop_the_start(tmp_path: Path) -> None:
    await keep(tmp_path, "a:p1")
    for damage in (b"x" * 32, b"short"):
        (tmp_path / "log.db.pinkey").write_bytes(damage)
        async with running(tmp_path, HoldingCache({})) as it:
            assert it.runtime.self_test.ok
            assert await released(it) == {"pins": 0, "cache_holds": 0}


async def test_without_a_cache_that_holds_pins_they_wait_for_one(tmp_path: Path) -> None:
    await keep(tmp_path, "a:p1")
    async with whole_proxy(
        tmp_path, control=NoCacheControl(), log_url=f"sqlite:///{tmp_path / 'log.db'}"
    ) as it:
        assert (await released(it))["cache_holds"] == 0
    assert await kept(tmp_path) == {"a:p1"}


async def test_a_failed_release_keeps_what_is_still_held(tmp_path: Path) -> None:
    far: dict[str, bytes] = {}
    cache = HoldingCache(far)
    async with running(tmp_path, cache) as it:
        await pinned(it)
        cache.unreachable = True
        answer = await it.admin.post("/kv/v1/release-all")
        assert answer.status_code >= 500
        assert await kept(tmp_path) == far.keys()


async def test_a_log_in_memory_keeps_nothing_and_pins_all_the_same(tmp_path: Path) -> None:
    far: dict[str, bytes] = {}
    async with running(tmp_path, HoldingCache(far), log_url="memory:") as it:
        await pinned(it)
        assert len(far) == 1
        assert (await released(it))["pins"] == 1
        assert far == {}


async def test_a_pin_that_cannot_be_kept_is_not_asked_for(tmp_path: Path) -> None:
    far: dict[str, bytes] = {}
    async with running(tmp_path, HoldingCache(far)) as it:
        await it.chat(LIST, lifecycle(ctx="a"))
        engine = await open_database(f"sqlite:///{tmp_path / 'log.db'}")
        async with engine.connect() as connection:
            await connection.exec_driver_sql("DROP TABLE held_pins")
        await engine.dispose()
        await it.ops(PIN)
        await settled(it, 1)
        results = [r.result for r in it.runtime.tracker.contexts.directives.values() if r.result]
        assert [r.outcome for r in results] == [DirectiveOutcome.FAILED]
        assert "held_pins" in results[0].reason
        assert far == {}


class Watched:
    """The loop alone, with a short pause, and what it said."""

    def __init__(self, cache: HoldingCache) -> None:
        self.cache = cache
        self.doubts: list[str] = []
        self.said = asyncio.Event()
        self.registry = CollectorRegistry()
        self.repairs = Counter("repairs", "Repairs.", ["what"], registry=self.registry)
        tracker = Tracker(MemoryEventLog(), ManualClock())
        self.watch = HoldWatch(
            cache, tracker, lambda uid: True, lambda: True, self._doubt, self.repairs, look_seconds=0.001
        )

    def _doubt(self, reason: str) -> None:
        self.doubts.append(reason)
        self.said.set()

    async def looks(self, rounds: int = 2) -> None:
        """Until so many comparisons more are done."""
        async with asyncio.timeout(SECONDS):
            for _ in range(rounds):
                self.cache.compared.clear()
                await self.cache.compared.wait()

    def counted(self, what: str) -> float:
        return self.registry.get_sample_value("repairs_total", {"what": what}) or 0.0


@asynccontextmanager
async def watching(change: Callable[[HoldingCache], None] = lambda cache: None) -> AsyncIterator[Watched]:
    cache = HoldingCache({})
    cache.adopt_pins([held_pin("u:p1")])
    change(cache)
    it = Watched(cache)
    task = asyncio.ensure_future(it.watch.run())
    try:
        await it.looks()
        yield it
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_cache_server_that_starts_anew_or_goes_away_is_doubted_once() -> None:
    async with watching() as it:
        assert it.doubts == []
        for servers, doubted in (
            ({"one": 2}, "cache server one is gone or started anew"),
            ({"one": 2, "two": 7}, ""),
            ({"two": 7}, "cache server one is gone or started anew"),
            ({"two": 8}, "cache server two is gone or started anew"),
        ):
            it.doubts.clear()
            it.cache.servers = servers
            await it.looks()
            assert it.doubts == ([doubted] if doubted else [])


async def test_a_cache_that_does_not_answer_is_asked_again_and_not_doubted() -> None:
    async with watching() as it:
        it.cache.asleep = it.cache.unreachable = True
        await it.looks()
        it.cache.asleep = it.cache.unreachable = False
        await it.looks()
        assert it.doubts == []
        it.cache.far.clear()
        await it.looks()
        assert it.cache.far.keys() == {"u:p1"}
        assert it.counted("restored") == 2, "once when it began, once now"


async def test_a_coordinator_that_starts_anew_is_compared_at_once() -> None:
    class Young(HoldingCache):
        began_ns = 1

        async def directory_began_ns(self) -> int:
            return self.began_ns

    cache = Young({})
    cache.adopt_pins([held_pin("u:p1")])
    it = Watched(cache)
    it.watch._look_seconds = SECONDS  # nothing but a reason makes it compare twice
    task = asyncio.ensure_future(it.watch.run())
    try:
        await it.looks(1)
        cache.began_ns = 2
        cache.far.clear()
        it.watch._wake.set()
        await it.looks(1)
        assert cache.far.keys() == {"u:p1"}
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_pin_that_stays_drifted_is_counted_once() -> None:
    async with watching() as it:
        it.cache.found = Reconciled(drifted=("u:p1",))
        await it.looks(4)
        assert it.counted("drifted") == 1
        it.cache.found = None
        await it.looks()
        it.cache.found = Reconciled(drifted=("u:p1",))
        await it.looks()
        assert it.counted("drifted") == 2


async def test_a_surplus_is_counted_and_pins_of_others_are_told() -> None:
    async with watching() as it:
        it.cache.found = Reconciled(surplus=("u:p1", "u:p1"), foreign=3)
        await it.looks(1)
        it.cache.found = Reconciled(foreign=2)
        await it.looks()
        assert it.counted("surplus") == 2
        assert it.watch.num_foreign == 2
