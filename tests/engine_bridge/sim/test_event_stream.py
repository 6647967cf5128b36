"""The proxy's own subscriber reads the stream, its replay and its restarts."""

import asyncio
import typing
from collections.abc import AsyncIterator

import msgspec
import pytest

from engine_bridge.cache_events import (
    BlocksRemoved,
    BlocksStored,
    EventBatch,
    EventSubscriber,
    IncarnationChanged,
    TierCleared,
    decode_payload,
    short_hash,
)
from engine_bridge.sim.block_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineRestarted,
    KvEvent,
)
from engine_bridge.sim.event_stream import EventStream, encode_event
from lifecycle.vocabulary import Tier

ONE, TWO = b"\1" * 32, b"\2" * 32
STORED = BlockStored(
    block_hashes=(ONE, TWO),
    parent_block_hash=None,
    token_ids=(1, 2, 3, 4),
    block_size=2,
    medium="GPU",
    session_id="call",
    salt="tenant",
)
CHUNK = BlockStored(block_hashes=(TWO,), parent_block_hash=ONE, token_ids=(3, 4), block_size=2, medium="CPU")


def test_events_are_read_as_what_they_are():
    events = [STORED, CHUNK, BlockRemoved(block_hashes=(ONE,), medium="CPU"), AllBlocksCleared()]
    payload = msgspec.msgpack.encode([2.5, [encode_event(each) for each in events], 0])
    at_ns, read = decode_payload(payload)
    assert at_ns == 2_500_000_000
    assert read == [
        BlocksStored(
            tier=Tier.GPU,
            hashes=(short_hash(ONE), short_hash(TWO)),
            parent=None,
            token_ids=(1, 2, 3, 4),
            block_size=2,
            keys=(ONE, TWO),
            session_id="call",
            salt="tenant",
        ),
        BlocksStored(
            tier=Tier.L1,
            hashes=(short_hash(TWO),),
            parent=short_hash(ONE),
            token_ids=(3, 4),
            block_size=2,
            keys=(TWO,),
        ),
        BlocksRemoved(tier=Tier.L1, hashes=(short_hash(ONE),), keys=(ONE,)),
        TierCleared(tier=Tier.GPU),
    ]


@pytest.fixture
async def stream() -> AsyncIterator[EventStream]:
    async with EventStream() as stream:
        yield stream


async def first(count: int, subscriber: EventSubscriber) -> list[EventBatch]:
    batches: list[EventBatch] = []
    async with asyncio.timeout(10):
        async for batch in subscriber.batches():
            batches.append(batch)
            if len(batches) == count:
                break
    return batches


async def test_who_comes_late_gets_everything_from_the_replay(stream: EventStream):
    for at_ns in (1, 2, 3):
        stream.take(at_ns, [CHUNK])
    subscriber = EventSubscriber(stream.endpoint, replay_endpoint=stream.replay_endpoint, topic="kv")
    batches = await first(3, subscriber)
    assert [batch.sequence for batch in batches] == [0, 1, 2]


async def test_live_events_follow_and_a_new_process_begins_anew(stream: EventStream):
    subscriber = EventSubscriber(stream.endpoint, replay_endpoint=stream.replay_endpoint)
    heard: asyncio.Queue[EventBatch] = asyncio.Queue()

    async def listen() -> None:
        async for batch in subscriber.batches():
            heard.put_nowait(batch)

    async with asyncio.timeout(20):
        listening = asyncio.ensure_future(listen())
        at_ns = 10**9
        while heard.empty():  # a subscription that does not stand yet misses events
            at_ns += 10**9
            stream.take(at_ns, [STORED])
            await asyncio.sleep(0.02)
        stream.take(at_ns + 1, [STORED, EngineRestarted(incarnation=2)])
        stream.take(at_ns + 10**9, [CHUNK])
        batches = [await heard.get()]
        while batches[-1].incarnation == 1 or not batches[-1].at_ns:
            batches.append(await heard.get())
    listening.cancel()
    *before, changed, after = batches
    assert [batch.sequence for batch in before] == list(range(len(before)))
    assert changed.events == (IncarnationChanged(incarnation=2),)
    assert (after.incarnation, after.sequence) == (2, 0)
    assert [type(each).__name__ for each in after.events] == ["BlocksStored"]


async def test_nothing_is_sent_for_nothing(stream: EventStream):
    stream.take(1, [])
    stream.take(2, [EngineRestarted(incarnation=2)])
    stream.take(3, [CHUNK])
    [batch] = await first(1, EventSubscriber(stream.endpoint, replay_endpoint=stream.replay_endpoint))
    assert batch.sequence == 0


def test_every_event_but_a_restart_has_a_form_on_the_wire():
    sent = [STORED, BlockRemoved(block_hashes=(ONE,), medium="GPU"), AllBlocksCleared()]
    assert {type(each) for each in sent} | {EngineRestarted} == set(typing.get_args(KvEvent))
    assert [encode_event(each)["type"] for each in sent] == [type(each).__name__ for each in sent]
