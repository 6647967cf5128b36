"""What goes with an engine stands in the log, once, and the report knows what follows from it."""

import asyncio
from pathlib import Path

import pytest

from engine_bridge.cache_events import BlocksRemoved, EventBatch, IncarnationChanged
from lifecycle.core.events import BackendLost, ChunksGone
from lifecycle.vocabulary import Tier
from proxy.backend_loss import BackendLoss
from tests.proxy.several_engines import Several, several_engines
from tests.proxy.whole_proxy import assistant, lifecycle, system, user

LIST = [system("you are a toy"), user("something that is long enough to fill some chunks")]


def anew(incarnation: int = 2) -> EventBatch:
    events = (IncarnationChanged(incarnation=incarnation),)
    return EventBatch(incarnation=incarnation, sequence=0, at_ns=0, events=events)


def tokens(it: Several) -> dict[str, int]:
    total = it.runtime.reporting.report.since(0, it.runtime.clock.now_ns()).total()
    return {"lost": total.lost_tokens, "moved": total.moved_tokens, "avoidable": total.avoidable_tokens}


async def lost(it: Several, number: int) -> list[BackendLost]:
    """Losses that the log holds, once there are so many."""
    await it.until(lambda: it.runtime.tracker.contexts.position >= 0)
    found: list[BackendLost] = []
    while len(found) < number:
        position = it.runtime.tracker.contexts.position
        found = await it.events(BackendLost)
        if len(found) < number:
            await it.until(lambda at=position: it.runtime.tracker.contexts.position > at)
    return found


async def test_a_crash_is_recorded_and_its_contexts_are_computed_elsewhere(tmp_path: Path) -> None:
    async with several_engines(tmp_path, mapped=True) as it:
        place = await it.served(LIST, lifecycle(ctx="c", call="1"))
        await it.engines[place].kill()
        (event,) = await lost(it, 1)
        assert event.backend == place
        assert event.namespace == it.context("c").namespace.cache
        assert event.reason
        longer = [*LIST, assistant("ok"), user("more")]
        other = await it.served(longer, lifecycle(ctx="c", call="2"))
        assert other != place
        assert len(await it.events(BackendLost)) == 1
        assert tokens(it)["lost"] == len(it.toy.tokens(LIST))


async def test_what_only_it_held_is_gone_by_the_caches_own_word(tmp_path: Path) -> None:
    async with several_engines(tmp_path, mapped=True) as it:
        place = await it.served(LIST, lifecycle(ctx="c", call="1"))
        index, run = it.runtime.tracker.contexts.index, b"".join(it.toy.keys(LIST))
        await it.until(lambda: not index.unverified(it.context("c").namespace, run))
        it.cache.chunks.clear()
        await it.engines[place].kill()
        await it.until(lambda: bool(index.unverified(it.context("c").namespace, run)))
        reasons = {e.reason for e in await it.events(ChunksGone)}
        assert any(f"engine {place} is gone" in reason for reason in reasons)


async def test_an_engine_that_starts_anew_unseen_tells_by_its_own_events(tmp_path: Path) -> None:
    async with several_engines(tmp_path, mapped=True) as it:
        place = await it.served(LIST, lifecycle(ctx="c", call="1"))
        backend = it.backend(place)
        nothing = BlocksRemoved(tier=Tier.GPU, hashes=(1,))
        it.runtime.losses.heard(backend, EventBatch(incarnation=1, sequence=0, at_ns=0, events=(nothing,)))
        it.runtime.losses.heard(backend, anew())
        (event,) = await lost(it, 1)
        assert event.reason == "it started anew"


async def test_a_crash_that_was_seen_is_not_told_again_by_the_events_of_its_next_life(tmp_path: Path) -> None:
    async with several_engines(tmp_path, mapped=True) as it:
        place = await it.served(LIST, lifecycle(ctx="c", call="1"))
        backend = it.backend(place)
        it.runtime.backends.take_down(backend, "gone")
        await lost(it, 1)
        it.runtime.losses.heard(backend, anew())
        it.runtime.losses.heard(backend, anew(3))
        assert [e.reason for e in await lost(it, 2)] == ["gone", "it started anew"]
        assert tokens(it)["lost"] == len(it.toy.tokens(LIST)), "lost once"


async def test_the_end_of_an_engine_that_was_only_silent_before_is_told(tmp_path: Path) -> None:
    async with several_engines(tmp_path, mapped=True) as it:
        backend = it.backend(await it.served(LIST, lifecycle(ctx="c", call="1")))
        it.runtime.backends.take_down(backend, "silent")
        await lost(it, 1)
        it.runtime.backends.bring_back(backend)
        nothing = BlocksRemoved(tier=Tier.GPU, hashes=(1,))
        it.runtime.losses.heard(backend, EventBatch(incarnation=1, sequence=0, at_ns=0, events=(nothing,)))
        it.runtime.losses.heard(backend, anew())
        assert [e.reason for e in await lost(it, 2)] == ["silent", "it started anew"]


def beside(it: Several) -> BackendLoss:
    """What another proxy on the same log would have, one that does not own it."""
    return BackendLoss(it.runtime.tracker, it.runtime.placement, lambda: False)


async def test_what_died_with_the_owner_is_told_by_its_successor(tmp_path: Path) -> None:
    async with several_engines(tmp_path, mapped=True) as it:
        place = await it.served(LIST, lifecycle(ctx="c", call="1"))
        successor = beside(it)
        successor.gone(it.backend(place), "died with the owner")
        await it.runtime.tracker.flushed()
        assert await it.events(BackendLost) == []
        in_office = asyncio.create_task(successor.run())
        assert [(e.backend, e.reason) for e in await lost(it, 1)] == [(place, "died with the owner")]
        in_office.cancel()


@pytest.mark.parametrize("reads_first", [True, False])
async def test_what_the_owner_told_is_not_told_again_by_its_successor(
    tmp_path: Path, reads_first: bool
) -> None:
    async with several_engines(tmp_path, mapped=True) as it:
        place = await it.served(LIST, lifecycle(ctx="c", call="1"))
        backend, successor = it.backend(place), beside(it)
        if not reads_first:
            successor.gone(backend, "the same")
        it.runtime.losses.gone(backend, "seen by the owner")
        await lost(it, 1)
        if reads_first:
            successor.gone(backend, "the same")
        in_office = asyncio.create_task(successor.run())
        successor.back(backend)
        await asyncio.sleep(0)
        successor.gone(backend, "again")
        assert [e.reason for e in await lost(it, 2)] == ["seen by the owner", "again"]
        in_office.cancel()


async def test_an_engine_that_served_nobody_loses_nothing(tmp_path: Path) -> None:
    async with several_engines(tmp_path, mapped=True) as it:
        place = await it.served(LIST, lifecycle(ctx="c", call="1"))
        other = "b" if place == "a" else "a"
        await it.engines[other].kill()
        await it.until_seen(lambda: bool(it.backend(other).down))
        assert await it.events(BackendLost) == []
