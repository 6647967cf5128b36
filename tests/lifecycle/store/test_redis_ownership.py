"""One of several processes owns a log: by the server's word, and by its own clock before that."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lifecycle.core.directives import Admit, DirectiveResult, Pin, Reclaim
from lifecycle.core.events import DirectiveProposed, DirectiveSettled, UntrackedForwarded
from lifecycle.core.ids import Namespace
from lifecycle.errors import Deposed
from lifecycle.ports import StoredSnapshot
from lifecycle.store.redis_ownership import SURE_SHARE, RedisOwnership
from lifecycle.store.redis_streams import RedisEventLog
from lifecycle.store.snapshots import RedisSnapshots
from lifecycle.vocabulary import DirectiveOutcome
from tests.lifecycle.store.redis_process import place_in_shared_redis, shared_redis

SPACE = Namespace("m")
LONG, SHORT = 60.0, 0.3
KEY = b"k" * 32


class Process:
    """One process's log and its part in the ownership, with a clock set by hand."""

    def __init__(self, log: RedisEventLog, name: str) -> None:
        self.log = log
        self.now = 100.0
        self.own = RedisOwnership(log, name, LONG, lambda: self.now)
        self.snapshots = RedisSnapshots(log.server)

    async def say(self, *events: object) -> None:
        """Behind whatever the stream holds."""
        stream = SPACE.stream()
        version = max([r.version async for r in self.log.read_stream(stream)], default=0)
        await self.log.append(stream, events, version)  # type: ignore[arg-type]


def reclaim(name: str) -> DirectiveProposed:
    directive = Reclaim(directive_id=name, namespace=SPACE, reason="", keys=KEY)
    return DirectiveProposed(at_ns=1, directive=directive, as_of=0)


@asynccontextmanager
async def processes(place: Path, *names: str) -> AsyncIterator[list[Process]]:
    url = await place_in_shared_redis(place)
    everybody = [Process(await RedisEventLog.open(url), name) for name in names]
    try:
        yield everybody
    finally:
        for process in everybody:
            await process.log.close()


async def lapse(place: Path, *names: str) -> None:
    """What the server does when the time of the owner's lease, and of those who said they live, is over."""
    prefix = (await place_in_shared_redis(place)).rpartition("=")[2]
    keys = [f"{{{prefix}}}:lease:owner", *(f"{{{prefix}}}:proxy:{name}" for name in names)]
    for key in keys:
        assert shared_redis().run("PTTL", key) > 0, "it would end by itself"
        shared_redis().run("DEL", key)


async def test_the_first_owns_the_log_until_it_lets_go(tmp_path: Path) -> None:
    async with processes(tmp_path, "one", "two") as (one, two):
        assert not one.own.holds
        for process in (one, two, two, one):
            await process.own.beat()
        assert one.own.holds
        assert not two.own.holds
        assert one.own.owner == two.own.owner == "one"
        await one.own.resign()
        assert not one.own.holds
        await one.own.beat()  # it lives, and wants it no more
        await two.own.beat()
        await one.own.beat()
        assert two.own.holds
        assert one.own.owner == "two"


async def test_a_resignation_that_a_beat_overtook_is_heard_with_the_next_one(tmp_path: Path) -> None:
    async with processes(tmp_path, "one", "two") as (one, two):
        await one.own.beat()
        await one.own.resign()
        await RedisOwnership(one.log, "one", LONG).beat()  # asked before that, and arrived late
        await two.own.beat()
        assert two.own.owner == "one"
        await one.own.beat()
        assert one.own.owner == ""
        await two.own.beat()
        assert two.own.holds
        await one.own.beat()
        assert one.own.owner == "two", "what is another one's stays his"
        await two.own.beat()
        assert two.own.holds


async def test_an_owner_that_stood_still_knows_by_its_own_clock(tmp_path: Path) -> None:
    async with processes(tmp_path, "one") as (one,):
        await one.own.beat()
        one.now += SURE_SHARE * LONG - 1
        assert one.own.holds
        one.now += 2
        assert not one.own.holds
        await one.own.beat()
        assert one.own.holds


async def test_what_a_deposed_owner_says_is_refused_and_facts_are_taken(tmp_path: Path) -> None:
    async with processes(tmp_path, "one", "two") as (one, two):
        await one.own.beat()
        await one.say(reclaim("by one"))
        await lapse(tmp_path)
        await two.own.beat()
        assert two.own.holds
        assert one.own.holds, "its clock stands still: it does not know yet"
        pin = Pin(directive_id="p", namespace=SPACE, reason="", pin_id="p", keys=KEY, lease_until_ns=1)
        for event in (reclaim("late"), DirectiveProposed(at_ns=1, directive=pin, as_of=0)):
            with pytest.raises(Deposed):
                await one.say(event)
        with pytest.raises(Deposed):
            await one.snapshots.commit(StoredSnapshot(1, b""), None, ())
        admit = Admit(directive_id="a", namespace=SPACE, reason="", call_id="c", bypass_from_token=0)
        await one.say(DirectiveProposed(at_ns=1, directive=admit, as_of=0))
        await one.say(UntrackedForwarded(at_ns=1, namespace=SPACE, reason="somebody did"))
        done = DirectiveResult(outcome=DirectiveOutcome.APPLIED)
        await one.say(DirectiveSettled(at_ns=1, directive_id="by one", namespace=SPACE, result=done))
        await two.say(reclaim("by two"))
        with pytest.raises(Deposed):
            await one.log.trim(2, (SPACE.stream(),))
        told = [r.event async for r in two.log.read_all()]
        proposed = [e.directive.directive_id for e in told if isinstance(e, DirectiveProposed)]
        assert proposed == ["by one", "a", "by two"]
        await two.snapshots.commit(StoredSnapshot(1, b""), None, ())
        assert [s.position for s in await two.snapshots.newest_first()] == [1]
        assert await two.log.trim(2, (SPACE.stream(),)) > 1


async def test_who_is_silent_is_told_from_who_lives_and_who_left(tmp_path: Path) -> None:
    async with processes(tmp_path, "one", "two") as (one, two):
        await one.own.beat()
        await two.own.beat()
        await two.own.leave()
        await two.own.beat()  # one that was under way
        assert await one.own.silent(["one", "two", "nobody"]) == {"two", "nobody"}
        await lapse(tmp_path, "one")
        await two.own.beat()
        assert not two.own.holds, "who left does not come back"
        assert await one.own.silent(["one"]) == {"one"}
        assert await one.own.silent([]) == frozenset()


async def test_news_is_what_anybody_recorded_behind_a_position(tmp_path: Path) -> None:
    async with processes(tmp_path, "one", "two") as (one, two):
        waiting = asyncio.ensure_future(one.own.news(0))
        await two.say(*(UntrackedForwarded(at_ns=n, namespace=SPACE, reason="") for n in range(3)))
        assert await asyncio.wait_for(waiting, 10) == 3
        assert await one.own.news(2) == 3
        hasty = RedisOwnership(one.log, "hasty", SHORT)
        assert await hasty.news(3) == 3, "nothing new after a while"
