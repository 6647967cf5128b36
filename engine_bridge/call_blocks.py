"""What a call computed and generated, read from the engine's own cache events.

The engine reports every full block of its prefix cache in the step that fills it, generated ones included,
with the tokens and the `session_id` of the call. That is prompter than the cache server's reports of chunks
in L1, which an idle engine passes on only with its next step. A block's event says its parent and not its
position, so positions are kept for every block seen: a call whose prompt was found in the prefix cache
reports only what it added.

Blocks that the engine loaded from the cache are reported like those it computed, but never in one event
with them: the connector loads all chunks that the cache has before anything is computed, and the blocks of
a load are reported when it is over (vLLM 0.32.0 with LMCache 0.5.6). So a call's first event may report
either if it ends with a chunk, and reports computed blocks if it ends inside one; whatever lies behind it the
cache had not got when the engine asked.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from blake3 import blake3

from engine_bridge.cache_events import (
    BlocksRemoved,
    BlocksStored,
    EventBatch,
    EventsMissed,
    IncarnationChanged,
    TierCleared,
)
from engine_bridge.chunk_keys import ROOT
from lifecycle.core.ids import KEY_BYTES
from lifecycle.vocabulary import Tier

MAX_POSITIONS = 4_000_000
MAX_TOKENS = 4_000_000
"""Blocks, and tokens of calls, that are kept. Beyond these the oldest are forgotten; what they computed and
generated is then not known."""


class GeneratedChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk stored behind a call's prompt: its whole key, its parent's, and its tokens."""

    key: bytes
    parent: bytes
    token_ids: tuple[int, ...]


def chunk_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of the one chunk that follows `parent`."""
    wire = b"".join(token.to_bytes(4, "big") for token in token_ids)
    return bytes(blake3(parent + wire).digest())


class _Block(NamedTuple):
    """Tokens `[start, start + len(tokens))` of a call, first reported with all up to `reported_to`."""

    parent: int | None
    start: int
    tokens: tuple[int, ...]
    reported_to: int


class CallBlocks:
    """Blocks by `session_id`. Use an id for one attempt of one call, and `forget` it when it is over.

    Several engines may feed it, each under a name: a block is known by its hash to its own engine only.
    `live` says whether all of them do.
    """

    def __init__(self) -> None:
        self.live = False
        self._ends: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._engines: dict[str, str] = {}
        self._sessions: OrderedDict[str, dict[int, _Block]] = OrderedDict()
        self._num_tokens = 0
        self._first_ends: dict[str, int] = {}
        self._in_doubt: set[str] = set()

    def take(self, batch: EventBatch, engine: str = "") -> None:
        """Take in one batch of an engine's stream, in order."""
        for event in batch.events:
            if isinstance(event, BlocksStored):
                if event.tier is Tier.GPU:
                    self._store(event, engine)
            elif isinstance(event, BlocksRemoved):
                if event.tier is Tier.GPU:
                    for block in event.hashes:
                        self._ends.pop((engine, block), None)
            elif isinstance(event, TierCleared | IncarnationChanged):
                for place in [place for place in self._ends if place[0] == engine]:
                    del self._ends[place]
            elif isinstance(event, EventsMissed):
                # What these calls report from now on may have been reported before: as loaded, perhaps.
                self._in_doubt |= {s for s, of in self._engines.items() if of == engine}

    def _store(self, event: BlocksStored, engine: str) -> None:
        end = 0 if event.parent is None else self._ends.get((engine, event.parent))
        if end is None or len(event.token_ids) != len(event.hashes) * event.block_size:
            return
        parent = event.parent
        reported_to = end + len(event.token_ids)
        if event.session_id is not None:
            self._first_ends.setdefault(event.session_id, reported_to)
            self._engines[event.session_id] = engine
        for index, block in enumerate(event.hashes):
            start, end = end, end + event.block_size
            self._ends[engine, block] = end
            if event.session_id is not None:
                tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
                # A call that was preempted reports blocks again that it loads now: the first report counts.
                known = self._sessions.setdefault(event.session_id, {})
                if block not in known:
                    known[block] = _Block(parent, start, tokens, reported_to)
                    self._num_tokens += len(tokens)
            parent = block
        while len(self._ends) > MAX_POSITIONS:
            self._ends.popitem(last=False)
        while self._num_tokens > MAX_TOKENS:
            self.forget(next(iter(self._sessions)))

    def generated(
        self, session_id: str, prompt_keys: bytes, tail_ids: Sequence[int], chunk_size: int
    ) -> list[GeneratedChunk]:
        """Full chunks behind a call's prompt, parents first; several choices make a tree.

        `prompt_keys` is the run of the prompt's chunk keys, `tail_ids` its tokens behind the last of them.
        The keys follow from the engine's tokens; that the cache holds them must still be looked up.
        """
        blocks = self._sessions.get(session_id, {})
        base = len(prompt_keys) // KEY_BYTES * chunk_size
        children: dict[int | None, list[int]] = {}
        for name, block in blocks.items():
            if block.start >= base:
                children.setdefault(block.parent, []).append(name)
        tail = tuple(tail_ids)
        found: dict[bytes, GeneratedChunk] = {}
        # What stands before the first block the call reported was in the prefix cache: it is in the tail.
        pending = [
            (name, prompt_keys[-KEY_BYTES:] or ROOT, tail[: blocks[name].start - base])
            for parent, names in children.items()
            if parent not in blocks or blocks[parent].start < base
            for name in names
            if blocks[name].start - base <= len(tail)
        ]
        while pending:
            name, key, tokens = pending.pop(0)
            block = blocks[name]
            known = tail[block.start - base : block.start - base + len(block.tokens)]
            if block.tokens[: len(known)] != known:
                continue
            tokens = tokens + block.tokens
            while len(tokens) >= chunk_size:
                parent_key, key = key, chunk_key(key, tokens[:chunk_size])
                chunk = GeneratedChunk(key=key, parent=parent_key, token_ids=tokens[:chunk_size])
                found.setdefault(key, chunk)
                tokens = tokens[chunk_size:]
            pending += [(child, key, tokens) for child in children.get(name, ())]
        return list(found.values())

    def computed_chunks(self, session_id: str, num_tokens: int, chunk_size: int) -> set[int]:
        """Places in the chain of those chunks of a call's prompt that the engine surely computed for it.

        Of each at least one block was computed, so the cache had not got the chunk when the engine asked.
        """
        found: set[int] = set()
        if session_id in self._in_doubt:
            return found
        first_end = self._first_ends.get(session_id, 0)
        for block in self._sessions.get(session_id, {}).values():
            end = block.start + len(block.tokens)
            # Of a prompt that was found whole the last token is computed all the same, and with it a block.
            last = num_tokens - len(block.tokens) if num_tokens % chunk_size == 0 else -1
            may_be_loaded = block.reported_to % chunk_size == 0 or block.reported_to == last
            if block.start != last and (block.start >= first_end or not may_be_loaded):
                found.update(range(block.start // chunk_size, -(-end // chunk_size)))
        return {place for place in found if (place + 1) * chunk_size <= num_tokens}

    def disagreement(self, session_id: str, prompt_ids: Sequence[int]) -> int | None:
        """First position of a block that the engine computed of other tokens than `prompt_ids`, or None."""
        blocks = sorted(self._sessions.get(session_id, {}).values(), key=lambda block: block.start)
        for block in blocks:
            ours = tuple(prompt_ids[block.start : block.start + len(block.tokens)])
            if block.tokens[: len(ours)] != ours:
                return block.start
        return None

    def forget(self, session_id: str) -> None:
        """Drop what is kept for a call that is over."""
        blocks = self._sessions.pop(session_id, {})
        self._num_tokens -= sum(len(block.tokens) for block in blocks.values())
        self._first_ends.pop(session_id, None)
        self._engines.pop(session_id, None)
        self._in_doubt.discard(session_id)
