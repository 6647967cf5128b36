"""The embedded engine's KV events on ZMQ, as vLLM 0.32.0 publishes them (`distributed/kv_events.py`).

Frames are `[topic, sequence number as 8 bytes big-endian, msgpack payload]`; a replay socket answers a start
number with every batch that is still remembered, and an end mark. Hashes are sent whole.
"""

import asyncio
import shutil
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from engine_bridge.cache_events import END_OF_REPLAY
from engine_bridge.sim.block_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineRestarted,
    KvEvent,
)

TOPIC = b"kv"
REMEMBERED = 10_000
"""Batches for a replay, as in vLLM."""

QUEUED = 100_000
NANOSECONDS = 1e9


class EventStream:
    """Publishes what `take` is told. Use as an async context manager; sockets lie in a private directory."""

    def __init__(self) -> None:
        self._folder = ""
        self._sequence = 0
        self._remembered: deque[tuple[int, bytes]] = deque(maxlen=REMEMBERED)
        self._publisher: zmq.Socket[bytes] | None = None
        self._exit = AsyncExitStack()

    @property
    def endpoint(self) -> str:
        """Connect a subscriber here."""
        return f"ipc://{self._folder}/events"

    @property
    def replay_endpoint(self) -> str:
        return f"ipc://{self._folder}/replay"

    def take(self, at_ns: int, events: Sequence[KvEvent]) -> None:
        """A listener for the engine: one batch, or several if it started anew in between."""
        batch: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, EngineRestarted):
                self._publish(at_ns, batch)
                batch = []
                self._sequence = 0
                self._remembered.clear()
            else:
                batch.append(encode_event(event))
        self._publish(at_ns, batch)

    def _publish(self, at_ns: int, batch: list[dict[str, Any]]) -> None:
        if not batch:
            return
        payload = msgspec.msgpack.encode([at_ns / NANOSECONDS, batch, 0])
        self._remembered.append((self._sequence, payload))
        if self._publisher is not None:
            self._publisher.send_multipart([TOPIC, self._sequence.to_bytes(8, "big"), payload], zmq.DONTWAIT)
        self._sequence += 1

    async def __aenter__(self) -> "EventStream":
        self._folder = tempfile.mkdtemp(prefix="kvtether-")
        self._exit.callback(shutil.rmtree, self._folder, ignore_errors=True)
        context = self._exit.enter_context(zmq.asyncio.Context())
        # Publishing never waits: who is too slow misses batches, and asks for a replay.
        self._publisher = self._exit.enter_context(zmq.Context(context).socket(zmq.PUB))
        self._publisher.linger = 0
        self._publisher.sndhwm = QUEUED
        self._publisher.bind(self.endpoint)
        replay = self._exit.enter_context(context.socket(zmq.ROUTER))
        replay.linger = 0
        replay.sndhwm = QUEUED
        replay.bind(self.replay_endpoint)
        tasks = await self._exit.enter_async_context(asyncio.TaskGroup())
        answering = tasks.create_task(self._answer(replay))
        self._exit.callback(answering.cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._publisher = None
        await self._exit.aclose()

    async def _answer(self, replay: zmq.asyncio.Socket) -> None:
        end = END_OF_REPLAY.to_bytes(8, "big", signed=True)
        while True:
            frames = await replay.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, first = frames
            start = int.from_bytes(first, "big")
            for sequence, payload in list(self._remembered):
                if sequence >= start:
                    await replay.send_multipart([client, b"", TOPIC, sequence.to_bytes(8, "big"), payload])
            await replay.send_multipart([client, b"", b"", end, b""])


def encode_event(event: BlockStored | BlockRemoved | AllBlocksCleared) -> dict[str, Any]:
    """One event as vLLM's msgspec structs encode it: tagged maps without their defaults."""
    match event:
        case BlockStored():
            wire: dict[str, Any] = {
                "type": "BlockStored",
                "block_hashes": event.block_hashes,
                "parent_block_hash": event.parent_block_hash,
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": event.medium,
                "lora_name": None,
            }
            if event.salt:
                # The salt is part of the first block's hash alone.
                first = [event.salt] if event.parent_block_hash is None else None
                wire["extra_keys"] = [first, *[None] * (len(event.block_hashes) - 1)]
            if event.session_id is not None:
                wire["session_id"] = event.session_id
            return wire
        case BlockRemoved():
            return {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": event.medium}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}
