"""Snapshots: everything that `Contexts` holds at one position, as parts that snapshots share, and a manifest.

A context's state follows from its stream alone, so the part of a context is named by its uid and the version
of its stream; a part that an earlier snapshot wrote is not written again. The same holds for directives. What
the chunk index knows beyond the states is written anew each time.

Every part and every manifest carries a checksum that also covers its name. A snapshot of which anything
cannot be read is no snapshot: an older one is taken, or the log from its beginning.
"""

import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import msgspec
import structlog

from lifecycle.core.ids import context_stream
from lifecycle.core.state import ContextState
from lifecycle.errors import CorruptLog
from lifecycle.ports import SnapshotStore, StoredSnapshot
from lifecycle.projections.chunk_index import ChunkIndex
from lifecycle.projections.contexts import Contexts, DirectiveRecord, Held
from lifecycle.projections.index_facts import (
    BookFacts,
    DeadRunFacts,
    IndexFacts,
    LiveRun,
    Mismatch,
    dead_in_order,
    live_in_order,
    put,
    taken,
)

log = structlog.get_logger(__name__)

FORMAT = 1
"""Raised whenever an older reader would take the bytes for something else. A reader of a later format reads
the earlier ones as well: of what was trimmed there is nothing else. Fields are added with defaults only."""

RUNS_PER_PART = 5_000
PARTS_PER_READ = 200

_MAGIC = b"KVT\x01"
_CRC_BYTES = 4

T = TypeVar("T")


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a snapshot consists of. `contexts` and `directives` are names of parts, in the order of the books.

    `live` and `dead` are parts with the runs of the chunk index, `dead` by number of its namespace.
    """

    format: int
    position: int
    stream_versions: dict[str, int]
    contexts: list[str]
    directives: list[str]
    held: Held
    index: IndexFacts
    owners: list[str]
    live: list[str]
    dead: list[tuple[int, str]]

    def parts(self) -> Iterator[str]:
        """Names of all parts."""
        yield from self.contexts
        yield from self.directives
        yield from self.live
        yield from (name for _, name in self.dead)


class _AnyFormat(msgspec.Struct):
    """What every format's manifest says first."""

    format: int


class Capture(msgspec.Struct):
    """The books at one position; nothing in it changes any more."""

    position: int
    states: dict[str, ContextState]
    directives: dict[str, DirectiveRecord]
    stream_versions: dict[str, int]
    held: Held
    index: IndexFacts


class Unreadable(Exception):
    """A snapshot that this version cannot use, and why."""


_manifests = msgspec.msgpack.Decoder(Manifest)
_any_format = msgspec.msgpack.Decoder(_AnyFormat)
_states = msgspec.msgpack.Decoder(ContextState)
_records = msgspec.msgpack.Decoder(DirectiveRecord)
_live_runs = msgspec.msgpack.Decoder(list[LiveRun])
_dead_runs = msgspec.msgpack.Decoder(list[DeadRunFacts])
_encode = msgspec.msgpack.Encoder().encode


def captured(contexts: Contexts) -> Iterator[Capture | None]:
    """The books, which must not change meanwhile; yields None to let others run, then the capture."""
    for facts in taken(contexts.index):
        if facts is None:
            yield None
        else:
            yield Capture(
                contexts.position,
                dict(contexts.states),
                dict(contexts.directives),
                dict(contexts.stream_versions),
                contexts.held(),
                facts,
            )


def encoded(capture: Capture, known: frozenset[str]) -> Iterator[tuple[str, bytes] | Manifest | None]:
    """Parts that are not in `known`, by name, and at last the manifest; None to let others run.

    Raises `Mismatch` where states and index contradict each other.
    """
    names: list[str] = []
    for uid, state in capture.states.items():
        names.append(f"{FORMAT}/context/{uid}/{capture.stream_versions[context_stream(uid)]}")
        if names[-1] not in known:
            yield names[-1], sealed(names[-1], _encode(state))
    directives: list[str] = []
    for directive_id, record in capture.directives.items():
        directives.append(f"{FORMAT}/directive/{directive_id}/{record.settled_ns}")
        if directives[-1] not in known:
            yield directives[-1], sealed(directives[-1], _encode(record))
    prefix = f"{FORMAT}/index/{capture.position}"
    owners: dict[str, int] = {}
    live: list[str] = []
    runs: list[LiveRun] = []
    for run in live_in_order(capture.index, capture.states.values(), owners):
        if run is None:
            yield None
            continue
        runs.append(run)
        if len(runs) == RUNS_PER_PART:
            live.append(f"{prefix}/live/{len(live)}")
            yield live[-1], sealed(live[-1], _encode(runs))
            runs = []
    if runs:
        live.append(f"{prefix}/live/{len(live)}")
        yield live[-1], sealed(live[-1], _encode(runs))
    dead: list[tuple[int, str]] = []
    for number, books in enumerate(capture.index.books):
        for batch in _batches(dead_in_order(books, owners), RUNS_PER_PART):
            dead.append((number, f"{prefix}/dead/{len(dead)}"))
            yield dead[-1][1], sealed(dead[-1][1], _encode(batch))
    yield Manifest(
        format=FORMAT,
        position=capture.position,
        stream_versions=capture.stream_versions,
        contexts=names,
        directives=directives,
        held=capture.held,
        index=_without_runs(capture.index),
        owners=list(owners),
        live=live,
        dead=dead,
    )


def stored(manifest: Manifest) -> StoredSnapshot:
    """The manifest as a store keeps it."""
    content = sealed(str(manifest.position), _encode(manifest))
    return StoredSnapshot(manifest.position, _MAGIC + content)


def read_manifest(snapshot: StoredSnapshot) -> Manifest:
    """What `stored` was given. Raises `Unreadable`."""
    if not snapshot.manifest.startswith(_MAGIC):
        raise Unreadable("its manifest is none of ours")
    content = opened(str(snapshot.position), snapshot.manifest[len(_MAGIC) :])
    try:
        found = _any_format.decode(content).format
        if found != FORMAT:
            raise Unreadable(f"it has format {found}, this version writes and reads {FORMAT}")
        manifest = _manifests.decode(content)
    except msgspec.DecodeError as error:
        raise Unreadable(f"its manifest cannot be decoded: {error}") from error
    if manifest.position != snapshot.position:
        raise Unreadable("its manifest is that of another position")
    return manifest


async def restored(store: SnapshotStore, manifest: Manifest, into: Contexts) -> None:
    """Fill the empty books `into` from a snapshot.

    Raises `Unreadable` and leaves them half filled; `LogUnavailable`.
    """
    states: dict[str, ContextState] = {}
    try:
        async for content in _parts(store, manifest.contexts):
            state = _states.decode(content)
            states[state.uid] = state
        records = [_records.decode(content) async for content in _parts(store, manifest.directives)]
        live = [_live_runs.decode(content) async for content in _parts(store, manifest.live)]
        dead: dict[int, list[DeadRunFacts]] = {}
        contents = _parts(store, [name for _, name in manifest.dead])
        for number, _ in manifest.dead:
            dead.setdefault(number, []).extend(_dead_runs.decode(await anext(contents)))
        if len(states) != len(manifest.contexts):
            raise Unreadable("a context stands in it twice")
        index = ChunkIndex(into.index.keep_recurring_ns)
        put(
            index,
            manifest.index,
            states,
            (run for part in live for run in part),
            {manifest.index.books[number].namespace: runs for number, runs in dead.items()},
            manifest.owners,
        )
        into.hold(manifest.position, states, records, manifest.stream_versions, manifest.held, index)
    except (msgspec.DecodeError, Mismatch, LookupError, CorruptLog) as error:
        raise Unreadable(f"its parts do not fit: {error!r}") from error


async def newest_usable(
    store: SnapshotStore, first_position: int, head: int, empty: Callable[[], Contexts]
) -> tuple[Contexts, Manifest] | None:
    """Books from the newest snapshot that can be read and from which the log goes on; None without one.

    What cannot be used is said in the program's log. Raises `LogUnavailable`.
    """
    for snapshot in await store.newest_first():
        try:
            manifest = read_manifest(snapshot)
            if not first_position - 1 <= manifest.position <= head:
                raise Unreadable(
                    f"the log holds events {first_position} to {head}: they do not go on from it"
                )
            contexts = empty()
            await restored(store, manifest, contexts)
        except Unreadable as error:
            log.warning("a snapshot is passed over", position=snapshot.position, reason=str(error))
        else:
            return contexts, manifest
    return None


def sealed(name: str, content: bytes) -> bytes:
    """Content with a checksum of it and its name."""
    return _crc(name, content) + content


def opened(name: str, content: bytes) -> bytes:
    """What `sealed` was given under this name. Raises `Unreadable`."""
    checksum, content = content[:_CRC_BYTES], content[_CRC_BYTES:]
    if checksum != _crc(name, content):
        raise Unreadable(f"{name!r} has been altered: its checksum does not match")
    return content


def _crc(name: str, content: bytes) -> bytes:
    return zlib.crc32(content, zlib.crc32(name.encode())).to_bytes(_CRC_BYTES, "big")


async def _parts(store: SnapshotStore, names: Sequence[str]) -> AsyncIterator[bytes]:
    for batch in _batches(names, PARTS_PER_READ):
        found = await store.parts(batch)
        for name in batch:
            if name not in found:
                raise Unreadable(f"its part {name!r} is missing")
            yield opened(name, found[name])


def _without_runs(facts: IndexFacts) -> IndexFacts:
    books: list[BookFacts] = [msgspec.structs.replace(b, live=[], dead=[]) for b in facts.books]
    return msgspec.structs.replace(facts, books=books)


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch
