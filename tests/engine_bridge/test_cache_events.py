"""The gate for KV events: order, duplicates, gaps, restarts."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.cache_events import (
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    EventBatch,
    EventGate,
    EventsMissed,
    EventSubscriber,
    IncarnationChanged,
    TierCleared,
    decode_payload,
    short_hash,
)
from engine_bridge.chunk_keys import chunk_keys
from lifecycle.core.ids import split_keys
from lifecycle.vocabulary import Tier

CHUNK = 4


def stored(**fields: Any) -> dict[str, Any]:
    """A store event as the engine packs it: defaults are left out."""
    event = {"type": "BlockStored", "block_hashes": [], "parent_block_hash": None, "token_ids": []}
    return event | {"block_size": CHUNK, "lora_id": None, "medium": "CPU", "lora_name": None} | fields


def payload(*events: dict[str, Any], at: float = 1.0) -> bytes:
    return msgspec.msgpack.encode([at, list(events), 0])


def chunk_events(token_ids: list[int], full: bool = True) -> list[dict[str, Any]]:
    """Events of all full chunks of a sequence, as LMCache announces them."""
    parent: bytes | int | None = None
    events = []
    for index, key in enumerate(keys_of(token_ids)):
        name = key if full else short_hash(key)
        tokens = token_ids[index * CHUNK : (index + 1) * CHUNK]
        events.append(stored(block_hashes=[name], parent_block_hash=parent, token_ids=tokens))
        parent = name
    return events


def keys_of(token_ids: list[int]) -> list[bytes]:
    from array import array

    return split_keys(chunk_keys(array("I", token_ids), CHUNK))


def decoded(*events: dict[str, Any]) -> list[CacheEvent]:
    return decode_payload(payload(*events))[1]


class TestDecoding:
    def test_a_call_of_the_engine_names_session_salt_and_tokens(self) -> None:
        (event,) = decoded(
            stored(
                block_hashes=[b"\1" * 32, b"\2" * 32],
                token_ids=list(range(8)),
                medium="GPU",
                extra_keys=[["tenant"], None],
                group_idx=0,
                session_id="call-1",
            )
        )
        assert isinstance(event, BlocksStored)
        assert (event.tier, event.session_id, event.salt) == (Tier.GPU, "call-1", "tenant")
        assert event.keys == (b"\1" * 32, b"\2" * 32)
        assert event.token_ids == tuple(range(8))

    def test_short_and_whole_hashes_name_the_same_chunk(self) -> None:
        tokens = list(range(12))
        whole, short = decoded(*chunk_events(tokens)), decoded(*chunk_events(tokens, full=False))
        for a, b in zip(whole, short, strict=True):
            assert isinstance(a, BlocksStored)
            assert isinstance(b, BlocksStored)
            assert (a.hashes, a.parent, a.token_ids) == (b.hashes, b.parent, b.token_ids)
            assert (len(a.keys), b.keys) == (1, ())

    def test_removals_and_resets(self) -> None:
        removed, cleared = decoded(
            {"type": "BlockRemoved", "block_hashes": [b"\1" * 32, 7], "medium": "CPU"},
            {"type": "AllBlocksCleared"},
        )
        assert removed == BlocksRemoved(tier=Tier.L1, hashes=(short_hash(b"\1" * 32), 7), keys=(b"\1" * 32,))
        assert cleared == TierCleared(tier=Tier.GPU)

    def test_unknown_kinds_and_media_are_left_out(self) -> None:
        assert decoded({"type": "Novelty"}, stored(medium="STORAGE")) == []

    @pytest.mark.parametrize("bad", [{}, [1.0], [1.0, {}], [1.0, ["event"]], 3])
    def test_another_shape_is_an_error(self, bad: object) -> None:
        with pytest.raises(ValueError):
            decode_payload(msgspec.msgpack.encode(bad))


class TestGate:
    @given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=40))
    def test_every_number_is_passed_once_in_order_and_every_hole_is_told(
        self, offers: list[tuple[int, bool]]
    ) -> None:
        gate = EventGate()
        passed: list[int] = []
        missed: list[int] = []
        for sequence, _ in offers:
            for batch in gate.offer(sequence, payload(at=1.0 + sequence)):
                for event in batch.events:
                    assert isinstance(event, EventsMissed)
                    missed += range(event.first, event.last + 1)
                if not batch.events:
                    passed.append(batch.sequence)
        if passed:
            assert sorted(passed + missed) == list(range(passed[0], passed[-1] + 1))
            assert passed == sorted(set(passed))
        assert gate.incarnation == 1

    @given(st.integers(1, 50), st.integers(0, 50))
    def test_a_younger_batch_with_an_older_number_is_a_new_engine(self, length: int, first: int) -> None:
        gate = EventGate()
        for sequence in range(length):
            gate.offer(sequence, payload(at=1.0 + sequence))
        first = min(first, length - 1)
        fresh = payload(at=1000.0)
        assert gate.first_missing(first, fresh) == (0 if first else None)
        batches = gate.offer(first, fresh)
        assert batches[0].events == (IncarnationChanged(incarnation=2),)
        assert [event for batch in batches[1:] for event in batch.events] == (
            [EventsMissed(first=0, last=first - 1)] if first else []
        )
        assert {batch.incarnation for batch in batches} == {2}

    def test_what_cannot_be_decoded_is_a_gap_of_one(self) -> None:
        gate = EventGate()
        gate.offer(0, payload())
        (batch,) = gate.offer(1, b"\xc1")
        assert batch.events == (EventsMissed(first=1, last=1),)
        assert gate.offer(2, payload(at=2.0))[0].events == ()


@contextmanager
def engine(
    replayable: list[tuple[int, bytes]], drops: Sequence[set[int]] = ()
) -> Iterator[tuple[zmq.Socket[bytes], str, str]]:
    """A publisher and a replay socket as vLLM has them; answers replays from the list, in a thread.

    `drops` are the numbers that the engine's full queue drops of its first answers, -1 for the end's mark.
    """
    import threading

    with zmq.Context() as context:
        publisher, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        stop = context.socket(zmq.PAIR)
        stop.bind("inproc://stop")
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (publisher, replay)]

        dropping = list(drops)

        def serve() -> None:
            halt = context.socket(zmq.PAIR)
            halt.connect("inproc://stop")
            poller = zmq.Poller()
            poller.register(replay, zmq.POLLIN)
            poller.register(halt, zmq.POLLIN)
            while halt not in dict(poller.poll()):
                client, empty, first = replay.recv_multipart()
                dropped = dropping.pop(0) if dropping else set()
                for sequence, body in [*replayable, (-1, b"")]:
                    if (
                        sequence == -1 or sequence >= int.from_bytes(first, "big")
                    ) and sequence not in dropped:
                        number = sequence.to_bytes(8, "big", signed=True)
                        replay.send_multipart((client, empty, b"kv" if body else b"", number, body))
            halt.close(0)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield publisher, f"tcp://*:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}"
        finally:
            stop.send(b"")
            thread.join()
            for socket in (publisher, replay, stop):
                socket.close(0)


async def read(subscriber: EventSubscriber, into: list[EventBatch], count: int, seen: asyncio.Event) -> None:
    async for batch in subscriber.batches():
        into.append(batch)
        seen.set()
        if len(into) >= count:
            return


async def wait(event: asyncio.Event) -> None:
    await event.wait()


async def publish_until(
    publisher: "zmq.Socket[bytes]", frames: list[tuple[int, bytes]], done: "asyncio.Task[None]"
) -> None:
    """Send the frames over and over: a subscriber that joins late would miss a single round."""
    async with asyncio.timeout(20):
        while not done.done():
            for sequence, body in frames:
                publisher.send_multipart((b"kv", sequence.to_bytes(8, "big"), body))
            await asyncio.sleep(0.02)


class TestSubscriber:
    async def test_it_starts_with_what_is_remembered_and_fills_holes(self) -> None:
        frames = [(sequence, payload(at=1.0 + sequence)) for sequence in range(6)]
        with engine(frames) as (publisher, events, replay):
            subscriber = EventSubscriber(events, replay_endpoint=replay, topic="kv")
            got: list[EventBatch] = []
            live = [(9, payload(at=10.0))]
            async with asyncio.TaskGroup() as group:
                seen = asyncio.Event()
                task = group.create_task(read(subscriber, got, 10, seen))
                await seen.wait()
                frames += [(sequence, payload(at=1.0 + sequence)) for sequence in range(6, 10)]
                await publish_until(publisher, live, task)
        assert [batch.sequence for batch in got] == list(range(10))
        assert not any(batch.events for batch in got)

    async def test_what_the_engines_queue_dropped_of_a_replay_is_asked_for(self) -> None:
        frames = [(sequence, payload(at=1.0 + sequence)) for sequence in range(9)]
        with engine(frames, [{3, 4}, {7, 8, -1}, {-1}]) as (_, events, replay):
            subscriber = EventSubscriber(events, replay_endpoint=replay, topic="kv")
            got: list[EventBatch] = []
            async with asyncio.timeout(20):
                await read(subscriber, got, len(frames), asyncio.Event())
        assert [batch.sequence for batch in got] == list(range(9))
        assert not any(batch.events for batch in got)

    async def test_without_a_replay_a_hole_is_told(self) -> None:
        with engine([]) as (publisher, events, _):
            subscriber = EventSubscriber(events)
            got: list[EventBatch] = []
            seen = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                task = group.create_task(read(subscriber, got, 3, seen))
                waiting = group.create_task(wait(seen))
                await publish_until(publisher, [(3, payload(at=3.0))], waiting)
                await publish_until(publisher, [(6, payload(at=6.0))], task)
        assert [batch.events for batch in got] == [(), (EventsMissed(first=4, last=5),), ()]
        assert [batch.sequence for batch in got] == [3, 6, 6]
