"""The one gate for KV events: vLLM's event stream in, typed and ordered events out.

What vLLM 0.32.0 with LMCache 0.5.6 sends, as seen on the wire: frames `[topic, sequence number as 8 bytes
big-endian, msgpack payload]`, the payload `[timestamp, events, data-parallel rank]`, each event a map with a
`type`. `BlockStored` of medium GPU carries the engine's block hashes, the tokens of its blocks and, if the
call had one, its `session_id`; generated tokens appear block by block. `BlockStored` of medium CPU is one
LMCache chunk in L1: its hash is the chunk key (or its low 64 bits), with parent, the chunk's own tokens and
neither session nor salt. L2 never appears. Removals of medium CPU are reported only with the engine's next
step, so confirm them in the directory.

The gate keeps the order, drops what was seen, notices what was missed, and notices that the engine started
anew, which makes everything said of its memory void.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeAlias

import msgspec
import zmq
import zmq.asyncio

from lifecycle.core.ids import KEY_BYTES
from lifecycle.vocabulary import Tier

SHORT_HASH_MASK = (1 << 64) - 1
REPLAY_MILLISECONDS = 10_000
"""How long to wait for the first piece of a replay: the engine serves it between its other work."""

REPLAY_GAP_MILLISECONDS = 500
"""How long to wait for a further piece: the engine sends them all at once."""

MAX_WAITING = 100_000
"""Frames that may queue up while we read a replay; the engine keeps as many on its side."""

END_OF_REPLAY = -1
UNDECODABLE = (msgspec.DecodeError, ValueError, KeyError, TypeError)

_TIERS = {"GPU": Tier.GPU, "CPU": Tier.L1, None: Tier.GPU}


class BlocksStored(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks or chunks entered a tier, in chain order.

    `hashes` and `parent` are the low 64 bits of chunk keys (tier L1) or of the engine's block hashes (tier
    GPU); `keys` are the whole keys, empty if the engine sends short hashes. `token_ids` are the tokens of
    these blocks alone, `len(hashes) * block_size` of them. `salt` is known for the GPU only.
    """

    tier: Tier
    hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]
    block_size: int
    keys: tuple[bytes, ...] = ()
    session_id: str | None = None
    salt: str | None = None
    lora_name: str | None = None


class BlocksRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks or chunks left a tier. Another copy may live: confirm with a lookup."""

    tier: Tier
    hashes: tuple[int, ...]
    keys: tuple[bytes, ...] = ()


class TierCleared(msgspec.Struct, frozen=True, kw_only=True):
    """Everything left the engine's own cache."""

    tier: Tier


class EventsMissed(msgspec.Struct, frozen=True, kw_only=True):
    """Batches `[first, last]` were lost and could not be replayed: what is believed may be wrong."""

    first: int
    last: int


class IncarnationChanged(msgspec.Struct, frozen=True, kw_only=True):
    """The engine started anew; nothing that was in its memory is there any more."""

    incarnation: int


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | TierCleared | EventsMissed | IncarnationChanged


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one accepted frame, or its absence, means. `at_ns` is the engine's clock, 0 for a gap."""

    incarnation: int
    sequence: int
    at_ns: int
    events: tuple[CacheEvent, ...]


def short_hash(block_hash: bytes | int) -> int:
    """The low 64 bits, which is what engines send by default."""
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    return block_hash & SHORT_HASH_MASK


def decode_payload(payload: bytes) -> tuple[int, list[CacheEvent]]:
    """Engine time in nanoseconds and the events of one batch; unknown kinds and media are left out.

    Raises `msgspec.DecodeError` for what is not msgpack, `ValueError` for another shape.
    """
    batch = msgspec.msgpack.decode(payload)
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError("a KV event batch is [timestamp, events, ...]")
    events = [event for each in batch[1] if (event := _decode_event(each)) is not None]
    return int(float(batch[0]) * 1e9), events


def _decode_event(event: Any) -> CacheEvent | None:
    if not isinstance(event, dict):
        raise ValueError("a KV event is a map")
    kind = event.get("type")
    if kind == "AllBlocksCleared":
        return TierCleared(tier=Tier.GPU)
    tier = _TIERS.get(event.get("medium"))
    if tier is None or kind not in ("BlockStored", "BlockRemoved"):
        return None
    raw = event["block_hashes"]
    hashes = tuple(short_hash(each) for each in raw)
    keys = tuple(each for each in raw if isinstance(each, bytes) and len(each) == KEY_BYTES)
    if kind == "BlockRemoved":
        return BlocksRemoved(tier=tier, hashes=hashes, keys=keys)
    parent = event.get("parent_block_hash")
    first_extra = next(iter(event.get("extra_keys") or ()), None) or ()
    return BlocksStored(
        tier=tier,
        hashes=hashes,
        parent=None if parent is None else short_hash(parent),
        token_ids=tuple(event["token_ids"]),
        block_size=event["block_size"],
        keys=keys,
        session_id=event.get("session_id"),
        salt=next((each for each in first_extra if isinstance(each, str)), None),
        lora_name=event.get("lora_name"),
    )


class EventGate:
    """Fence, order and duplicates for one engine's stream. Pure: frames go in, batches come out.

    Sequence numbers count from 0 in every engine process. A number that was there before is a duplicate if
    its batch is not younger than the last one, and the sign of a new process if it is.
    """

    def __init__(self) -> None:
        self._incarnation = 1
        self._next: int | None = None
        self._last_at_ns = 0

    @property
    def incarnation(self) -> int:
        """Counts engine starts seen from here, from 1."""
        return self._incarnation

    def first_missing(self, sequence: int, payload: bytes) -> int | None:
        """Number from which the stream must be replayed before this frame, None if it follows directly."""
        if self._next is None or self._is_restart(sequence, payload):
            return 0 if sequence else None
        return self._next if sequence > self._next else None

    def offer(self, sequence: int, payload: bytes) -> list[EventBatch]:
        """Accept one frame; a repeated one answers nothing, one after a gap says so first."""
        batches: list[EventBatch] = []
        if self._is_restart(sequence, payload):
            self._incarnation += 1
            self._next = 0
            batches.append(self._batch(0, 0, [IncarnationChanged(incarnation=self._incarnation)]))
        if self._next is not None:
            if sequence < self._next:
                return []
            if sequence > self._next:
                lost = EventsMissed(first=self._next, last=sequence - 1)
                batches.append(self._batch(sequence, 0, [lost]))
        self._next = sequence + 1
        try:
            at_ns, events = decode_payload(payload)
            self._last_at_ns = at_ns
        except UNDECODABLE:
            at_ns, events = 0, [EventsMissed(first=sequence, last=sequence)]
        batches.append(self._batch(sequence, at_ns, events))
        return batches

    def _is_restart(self, sequence: int, payload: bytes) -> bool:
        if self._next is None or sequence >= self._next:
            return False
        try:
            return decode_payload(payload)[0] > self._last_at_ns
        except UNDECODABLE:
            return False

    def _batch(self, sequence: int, at_ns: int, events: Sequence[CacheEvent]) -> EventBatch:
        return EventBatch(incarnation=self._incarnation, sequence=sequence, at_ns=at_ns, events=tuple(events))


class EventSubscriber:
    """Reads one engine's stream into a gate and fetches what it missed, if the engine keeps a replay.

    vLLM binds a wildcard or ipc endpoint and then is connected to (`bind=False`); any other endpoint it
    connects to itself, so the subscriber must bind it.
    """

    def __init__(
        self, endpoint: str, *, replay_endpoint: str | None = None, topic: str = "", bind: bool = False
    ) -> None:
        self.gate = EventGate()
        self._endpoint = endpoint.replace("tcp://*", "tcp://127.0.0.1") if not bind else endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic.encode()
        self._bind = bind

    async def batches(self) -> AsyncIterator[EventBatch]:
        """Batches as they come, for ever; cancel the task to end it. Sockets close with the iterator.

        With a replay endpoint the iterator starts with everything the engine still remembers.
        """
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.rcvhwm = MAX_WAITING
            socket.subscribe(self._topic)
            if self._bind:
                socket.bind(self._endpoint)
            else:
                socket.connect(self._endpoint)
            for batch in await self._catch_up(context, 0):
                yield batch
            while True:
                frames = await socket.recv_multipart()
                if len(frames) != 3 or len(frames[1]) != 8:
                    continue
                sequence = int.from_bytes(frames[1], "big")
                first = self.gate.first_missing(sequence, frames[2])
                if first is not None:
                    for batch in await self._catch_up(context, first):
                        yield batch
                for batch in self.gate.offer(sequence, frames[2]):
                    yield batch

    async def _catch_up(self, context: zmq.asyncio.Context, first: int) -> list[EventBatch]:
        """Batches from `first` on by the replay socket; empty if there is none or it does not answer.

        The engine's queue takes a thousand messages and drops those that come while it is full, be they in
        the middle or the mark of the end: then the rest is asked for.
        """
        batches: list[EventBatch] = []
        following: int | None = first
        while following is not None:
            following = await self._replay(context, following, batches)
        return batches

    async def _replay(
        self, context: zmq.asyncio.Context, first: int, batches: list[EventBatch]
    ) -> int | None:
        """Ask once; answers from where on to ask again, None after the end or without any answer."""
        if self._replay_endpoint is None:
            return None
        following: int | None = None
        patience = REPLAY_MILLISECONDS
        # One question has many answers, which a REQ socket cannot read: a DEALER that speaks like one can.
        with context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.rcvhwm = MAX_WAITING
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while await socket.poll(patience):
                patience = REPLAY_GAP_MILLISECONDS
                frames = await socket.recv_multipart()
                sequence = int.from_bytes(frames[-2], "big", signed=True)
                if sequence == END_OF_REPLAY:
                    return None
                if following is not None and sequence > following:
                    break
                following = sequence + 1
                batches += self.gate.offer(sequence, frames[-1])
        return following
