"""Books of the index recounted from scratch, and chained keys to keep books of, as a test tool."""

from dataclasses import dataclass
from hashlib import blake2b

from lifecycle.core.directives import Demote, Reclaim
from lifecycle.core.events import (
    ChunksConfirmed,
    ChunksGone,
    DirectiveProposed,
    DirectiveSettled,
    Event,
    GenerationMapped,
    UntrackedForwarded,
)
from lifecycle.core.ids import Namespace, split_keys
from lifecycle.core.state import ROOT, ContextState
from lifecycle.projections.chunk_index import RETRY_NS, UNPROVEN_NS
from lifecycle.vocabulary import DirectiveOutcome

SECOND = 10**9
NAMESPACES = (Namespace("m"), Namespace("m", salt="tenant"))
DEPTH = 6
PATHS = [()]
for _length in range(DEPTH):
    PATHS += [(*p, t) for p in PATHS if len(p) == _length for t in (0, 1)]

FINAL = [o for o in DirectiveOutcome if o not in (DirectiveOutcome.PROPOSED, DirectiveOutcome.ACCEPTED)]


def key_of(path: tuple[int, ...], *, crowded: bool) -> bytes:
    """A chained key: it names the whole path. Crowded ones share their first eight bytes with many others."""
    name = blake2b(bytes(path), digest_size=32).digest()
    return bytes([name[8] % 3]) * 8 + name[8:] if crowded else name


def chain_of(path: tuple[int, ...], start: int, *, crowded: bool) -> bytes:
    return b"".join(key_of(path[: i + 1], crowded=crowded) for i in range(start, len(path)))


@dataclass
class Chunk:
    """What the model knows of a key."""

    flags: int = 0
    dead_ns: int = 0
    retry_ns: int = 0
    owner: str = ""


class Model:
    """Books of one index, recounted from the contexts."""

    def __init__(self) -> None:
        self.now = 0
        self.contexts: dict[str, ContextState] = {}
        self.chunks: dict[Namespace, dict[bytes, Chunk]] = {n: {} for n in NAMESPACES}
        self.directives: dict[str, Reclaim | Demote] = {}
        self.untracked: dict[Namespace, int] = {}
        self.unknown_confirmed = dict.fromkeys(NAMESPACES, 0)

    def references(self, namespace: Namespace) -> dict[bytes, int]:
        counts: dict[bytes, int] = {}
        for state in self.contexts.values():
            if state.namespace == namespace:
                for version in state.versions.values():
                    for key in split_keys(version.keys):
                        counts[key] = counts.get(key, 0) + 1
        return counts

    def asked(self, namespace: Namespace) -> set[bytes]:
        return {k for d in self.directives.values() if d.namespace == namespace for k in split_keys(d.keys)}

    def apply(self, event: Event, after: ContextState | None) -> None:
        self.now = max(self.now, event.at_ns)
        for chunks in self.chunks.values():
            for key, chunk in list(chunks.items()):
                if chunk.dead_ns and not chunk.flags & 2 and self.now - chunk.dead_ns >= UNPROVEN_NS:
                    del chunks[key]
        if after is not None:
            self.contexts[after.uid] = after
            self._recount(after)
            if isinstance(event, GenerationMapped) and event.parent == ROOT:
                for key in split_keys(event.keys):
                    self.chunks[after.namespace].setdefault(key, Chunk(dead_ns=self.now, owner=after.uid))
        elif isinstance(event, ChunksConfirmed):
            for key in split_keys(event.keys):
                chunk = self.chunks[event.namespace].get(key)
                if chunk is None:
                    self.unknown_confirmed[event.namespace] += 1
                else:
                    chunk.flags |= 3 if event.stored else 1
        elif isinstance(event, ChunksGone):
            self._gone(event.namespace, event.keys)
        elif isinstance(event, UntrackedForwarded):
            self.untracked[event.namespace] = event.at_ns
        elif isinstance(event, DirectiveProposed):
            assert isinstance(event.directive, Reclaim | Demote)
            self.directives.setdefault(event.directive.directive_id, event.directive)
        elif isinstance(event, DirectiveSettled) and event.result.outcome in FINAL:
            self._settled(event)
        for namespace, chunks in self.chunks.items():
            asked = self.asked(namespace)
            for key, chunk in chunks.items():
                chunk.flags = chunk.flags & ~4 | (4 if key in asked else 0)

    def _recount(self, context: ContextState) -> None:
        counts = self.references(context.namespace)
        chunks = self.chunks[context.namespace]
        for key in counts:
            chunk = chunks.setdefault(key, Chunk())
            if chunk.dead_ns:
                chunk.dead_ns = 0
                chunk.flags &= ~8
        for key, chunk in chunks.items():
            if key not in counts and not chunk.dead_ns:
                chunk.dead_ns = self.now
                chunk.owner = context.uid

    def _gone(self, namespace: Namespace, keys: bytes) -> None:
        for key in split_keys(keys):
            chunk = self.chunks[namespace].get(key)
            if chunk and chunk.dead_ns:
                del self.chunks[namespace][key]
            elif chunk:
                chunk.flags &= 4

    def _settled(self, event: DirectiveSettled) -> None:
        directive = self.directives.pop(event.directive_id, None)
        if directive is None:
            return
        chunks = self.chunks[event.namespace]
        outcome = event.result.outcome
        self._gone(event.namespace, event.result.gone)
        if outcome is DirectiveOutcome.EXPIRED:
            return
        for key in split_keys(directive.keys):
            chunk = chunks.get(key)
            if chunk is None or key in split_keys(event.result.gone):
                continue
            if outcome is DirectiveOutcome.SUPPRESSED:
                if chunk.dead_ns:
                    del chunks[key]
            elif isinstance(directive, Demote) and outcome in (
                DirectiveOutcome.APPLIED,
                DirectiveOutcome.UNSUPPORTED,
            ):
                chunk.flags |= 8 if chunk.dead_ns else 0
            else:
                chunk.retry_ns = self.now + RETRY_NS
