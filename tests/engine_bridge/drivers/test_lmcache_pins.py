"""The ledger against a coordinator that counts; the real one is asked end to end."""

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.drivers.lmcache_client import LmcacheClient
from engine_bridge.drivers.lmcache_pins import HeldPin, PinLedger, expected_counts, missing
from engine_bridge.errors import CacheUnavailable
from lifecycle.core.ids import split_keys
from tests.engine_bridge.drivers.pin_counter import CHUNK, PinCounter, pin_counter

LEASE = 10
CHAINS = [(1,), (1, 2), (1, 2, 3), (1, 4), (5,), (5, 6)]
"""Chains of chunks that share prefixes."""


def pin(name: str, chain: Iterable[int] = (1, 2), world_size: int = 1) -> HeldPin:
    tokens = array("I", [token for chunk in chain for token in [chunk] * CHUNK])
    return HeldPin(
        pin_id=name,
        model_name="m",
        salt="",
        world_size=world_size,
        keys=chunk_keys(tokens, CHUNK),
        token_ids=tokens.tobytes(),
        lease_until_ns=LEASE,
    )


def keys_of(pins: Iterable[HeldPin]) -> Counter[bytes]:
    return Counter(key for each in pins for key in split_keys(each.keys))


@asynccontextmanager
async def ledger_of(*held: HeldPin) -> AsyncIterator[tuple[PinLedger, PinCounter]]:
    """A ledger that holds these, by a coordinator that counts them."""
    async with pin_counter() as counter:
        client = LmcacheClient(counter.url)
        ledger = PinLedger(client)
        for each in held:
            await ledger.hold(each)
        yield ledger, counter
        await client.close()


@given(st.lists(st.sampled_from(CHAINS), max_size=5), st.integers(1, 3))
def test_shared_prefixes_are_counted_once_a_pin_and_rank(chains: list[tuple[int]], world_size: int) -> None:
    pins = [pin(str(index), chain, world_size) for index, chain in enumerate(chains)]
    counts = expected_counts(pins)
    assert counts.total() == world_size * sum(map(len, chains))
    assert all(missing(each, counts, counts) == "none" for each in pins)


def test_a_pin_is_missing_in_whole_or_in_part() -> None:
    long, short = pin("long", (1, 2, 3)), pin("short", (1,))
    both = expected_counts([long, short])
    assert missing(long, {}, both) == "all"
    assert missing(long, expected_counts([long]), both) == "some"
    assert missing(short, expected_counts([long]), both) == "all"
    assert missing(short, both, both) == "none"


def test_tokens_survive_the_ledger() -> None:
    assert list(pin("p", (3, 4)).tokens()) == [3] * CHUNK + [4] * CHUNK


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(st.sampled_from(CHAINS), min_size=1, max_size=6))
def test_after_a_death_at_any_request_exactly_the_wanted_are_held(
    data: st.DataObject, chains: list[tuple[int]]
) -> None:
    pins = [pin(str(index), chain) for index, chain in enumerate(chains)]
    not_there = data.draw(st.none() | st.sampled_from(pins), label="kept, but not pinned or not any more")
    wanted = data.draw(st.sets(st.sampled_from([each.pin_id for each in pins])), label="wanted")

    async def scene() -> None:
        async with ledger_of(*(each for each in pins if each is not not_there)) as (earlier, counter):
            again = PinLedger(earlier._client)
            again.adopt(pins)
            done = await again.reconcile(0, lambda each: each.pin_id in wanted)
            kept = [each for each in pins if each.pin_id in wanted]
            assert list(again.held()) == kept
            assert +counter.counts == keys_of(kept)
            assert set(done.orphaned) == {each.pin_id for each in pins} - wanted
            assert done.drifted == ()
            calm = await again.reconcile(0, lambda each: each.pin_id in wanted)
            assert (calm.orphaned, calm.restored, calm.drifted) == ((), (), ())

    asyncio.run(scene())


async def test_leases_end_and_what_a_coordinator_forgot_is_held_again() -> None:
    async with ledger_of(pin("a", (1, 2)), pin("b", (1, 2, 3))) as (ledger, counter):
        counter.counts.clear()
        assert set((await ledger.reconcile(0)).restored) == {"a", "b"}
        assert counter.counts == keys_of(ledger.held())
        assert set((await ledger.reconcile(LEASE)).expired) == {"a", "b"}
        assert not +counter.counts
        assert ledger.held() == ()


async def test_a_pin_held_in_part_and_pins_of_others_are_only_told() -> None:
    held, theirs = pin("a", (1, 2)), pin("x", (5,))
    async with ledger_of(held) as (ledger, counter):
        counter.counts = Counter(split_keys(held.keys)[:1]) + keys_of([theirs])
        before = counter.counts.copy()
        done = await ledger.reconcile(0)
        assert (done.drifted, done.restored, done.foreign) == (("a",), (), 1)
        assert counter.counts == before


@given(st.lists(st.sampled_from(CHAINS), min_size=1, max_size=4, unique=True), st.data())
@settings(max_examples=40, deadline=None)
def test_what_is_held_more_often_than_asked_for_is_let_go(
    chains: list[tuple[int]], data: st.DataObject
) -> None:
    held = [pin(str(index), chain) for index, chain in enumerate(chains)]
    again = data.draw(st.lists(st.sampled_from(held), max_size=3), label="pinned again in our name")

    async def scene() -> None:
        async with ledger_of(*held) as (ledger, counter):
            counter.counts += keys_of(again)
            first = await ledger.reconcile(0)
            assert first.surplus == ()
            assert counter.counts == keys_of([*held, *again])
            second = await ledger.reconcile(0)
            assert len(second.surplus) == len(again)
            assert +counter.counts == keys_of(held)
            assert second.foreign == 0

    asyncio.run(scene())


async def test_a_surplus_stays_where_somebody_else_pins_too() -> None:
    async with ledger_of(pin("a", (1, 2))) as (ledger, counter):
        theirs = keys_of([pin("x", (1, 2, 3))])
        counter.counts += theirs
        for _ in range(3):
            done = await ledger.reconcile(0)
            assert (done.surplus, done.foreign) == ((), 3)
        assert counter.counts == keys_of(ledger.held()) + theirs


async def test_a_pin_is_kept_before_it_is_sent() -> None:
    async with ledger_of(pin("a", (1,))) as (ledger, counter):
        kept: list[set[str]] = []

        async def keep() -> None:
            kept.append({each.pin_id for each in ledger.held()})
            assert counter.counts == keys_of([pin("a", (1,))])

        ledger.before_pin = keep
        await ledger.hold(pin("b", (5, 6)))
        assert kept == [{"a", "b"}]
        await ledger.hold(pin("b", (5, 6)))
        assert len(kept) == 1, "nothing is sent, so nothing is kept first"


async def test_what_cannot_be_kept_is_not_sent() -> None:
    async def refuse() -> None:
        raise OSError("no room")

    async with ledger_of(pin("a", (1, 2))) as (ledger, counter):
        ledger.before_pin = refuse
        for other in (pin("a", (1, 4)), pin("b", (5,))):
            with pytest.raises(OSError, match="no room"):
                await ledger.hold(other)
        assert ledger.held() == (pin("a", (1, 2)),)
        assert counter.counts == keys_of(ledger.held())


@pytest.mark.parametrize("too_late", [False, True])
async def test_a_request_without_an_answer_leaves_nothing_behind(too_late: bool) -> None:
    old, moved, fresh = pin("a", (1, 2)), pin("a", (1, 4)), pin("b", (5,))
    async with ledger_of(old) as (ledger, counter):
        counter.failing, counter.too_late = True, too_late
        for each in (moved, fresh):
            with pytest.raises(CacheUnavailable):
                await ledger.hold(each)
        assert ledger.find("a") == old
        assert ledger.find("b") is None
        counter.failing = False
        await ledger.reconcile(0, lambda each: each.pin_id in "ab")
        assert ledger.held() == (old,)
        assert +counter.counts == keys_of([old])


async def test_a_pin_that_moved_lets_its_old_chain_go() -> None:
    async with ledger_of(pin("a", (1, 2)), pin("a", (1, 4))) as (ledger, counter):
        assert ledger.held() == (pin("a", (1, 4)),)
        assert +counter.counts == keys_of(ledger.held())
        assert await ledger.release("a", pin("a", (1, 2)).keys) == 0
        assert await ledger.release_all() == 1
        assert not +counter.counts
