"""Which chunks live contexts refer to, and what the cache said of them. Rebuilt from the log.

A context counts once for each of its live versions whose run holds a chunk. A chunk without references is
dead and stays in the books until it is known to be gone, or was not proven to be ours for `UNPROVEN_NS`.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from lifecycle.core.digest import digest_all
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
from lifecycle.core.ids import KEY_BYTES, Namespace, split_keys
from lifecycle.core.plan import ChunkFlag, DeadRun
from lifecycle.core.state import ROOT, ContextState, Version
from lifecycle.projections.chunk_runs import Run, RunBook
from lifecycle.projections.chunk_views import ChunkDescription, ChunkStats
from lifecycle.projections.recurrence import Recurrence, RecurrenceFacts
from lifecycle.vocabulary import DirectiveOutcome

UNPROVEN_NS = 120 * 10**9
"""How long a dead chunk that is not proven to be ours is remembered, in event time: it may never be freed."""

RETRY_NS = 30 * 10**9
"""How long after a directive came to nothing its chunks are left alone."""

_UNDER_WAY = (DirectiveOutcome.PROPOSED, DirectiveOutcome.ACCEPTED)
_VERIFIED = int(ChunkFlag.VERIFIED)
_STORED = int(ChunkFlag.VERIFIED | ChunkFlag.OURS)
_PRESENT = int(ChunkFlag.VERIFIED | ChunkFlag.OURS | ChunkFlag.DEMOTED)


class _Books:
    """One namespace's part of the index."""

    def __init__(self, keep_recurring_ns: int) -> None:
        self.runs = RunBook()
        self.recurrence = Recurrence(keep_recurring_ns)
        self.directives: dict[str, Reclaim | Demote] = {}
        self.asked: Counter[bytes] = Counter()
        self.unmapped: set[str] = set()
        self.unknown_flights: dict[str, int] = {}
        self.last_untracked_ns: int | None = None
        self.unknown_confirmed = 0


class ChunkIndex:
    """References and flags of all chunks, by model and salt (what shares a cache). Satisfies `ReclaimView`.

    Feed it every event in log order. Equal events give an equal `digest`. Chunks that one context after the
    other begins with are not due before `keep_recurring_ns` have passed since the last one let go.
    """

    def __init__(self, keep_recurring_ns: int = 0) -> None:
        self.keep_recurring_ns = keep_recurring_ns
        self._books: dict[Namespace, _Books] = {}
        self._now_ns = 0
        self._unproven: deque[tuple[int, Namespace, bytes]] = deque()

    def apply(self, event: Event, before: ContextState | None, after: ContextState | None) -> None:
        """Take in one event. `before` and `after` are the states around a context's event, else None.

        `before` is None for a context's first event. Once only: an event applied twice counts twice.
        """
        self._now_ns = max(self._now_ns, event.at_ns)
        self._forget_unproven()
        if after is not None:
            self._follow(before, after)
            if isinstance(event, GenerationMapped) and event.parent == ROOT:
                self._add_dead(after, event.keys)
            return
        match event:
            case ChunksConfirmed():
                self._confirmed(event)
            case ChunksGone():
                self._gone(event.namespace, event.keys)
            case UntrackedForwarded():
                books = self._of(event.namespace)
                books.last_untracked_ns = max(books.last_untracked_ns or 0, event.at_ns)
            case DirectiveProposed(directive=(Reclaim() | Demote()) as directive):
                self._proposed(directive)
            case DirectiveSettled():
                self._settled(event)
            case _:
                pass

    def _follow(self, before: ContextState | None, after: ContextState) -> None:
        old = before.versions if before is not None else {}
        if old is not after.versions:
            self._follow_versions(after.namespace, old, after)
        if before is None or before.flights is not after.flights:
            unknown = [f.arrived_ns for f in after.flights if not f.mapping_known]
            books = self._of(after.namespace)
            if unknown:
                books.unknown_flights[after.uid] = min(unknown)
            else:
                books.unknown_flights.pop(after.uid, None)
        if before is None or before.unmapped != after.unmapped or before.closed != after.closed:
            unmapped = self._of(after.namespace).unmapped
            if after.unmapped and after.open:
                unmapped.add(after.uid)
            else:
                unmapped.discard(after.uid)

    def _follow_versions(self, namespace: Namespace, old: Mapping[int, Version], after: ContextState) -> None:
        new = after.versions
        came: list[bytes] = []
        went: list[bytes] = []
        num_kept = 0
        for version_id, version in new.items():
            was = old.get(version_id)
            num_kept += was is not None
            if was is version:
                continue
            was_keys = was.keys if was is not None else b""
            if was_keys != version.keys:
                came.append(version.keys)
                went.append(was_keys)
        if num_kept < len(old):
            went.extend(was.keys for version_id, was in old.items() if version_id not in new)
        # First all that came, so that what only moved between versions never looks dead.
        for keys in came:
            self._refer(after, keys)
        for keys in went:
            self._unrefer(after, keys)

    def _refer(self, context: ContextState, keys: bytes) -> None:
        books = self._of(context.namespace)
        runs = books.runs
        for stretch in runs.stretches(keys):
            if stretch.run is None:
                books.recurrence.came(stretch.keys, self._now_ns)
                self._insert(context, stretch.keys, 1)
                continue
            run = runs.isolate(stretch)
            runs.refer(run)
            if run.owner != context.uid and not (context.forked and run.owner == context.parent_uid):
                books.recurrence.shared(run.keys)

    def _unrefer(self, context: ContextState, keys: bytes) -> None:
        books = self._of(context.namespace)
        runs = books.runs
        for stretch in runs.stretches(keys):
            if stretch.run is not None:
                run = runs.isolate(stretch)
                runs.unrefer(run, self._now_ns, context.uid)
                if not run.refs:
                    kept_until_ns = books.recurrence.kept_until_ns(run.keys, self._now_ns)
                    run.retry_ns = max(run.retry_ns, kept_until_ns)
                if not run.refs and not run.proven:
                    self._watch(context.namespace, run.keys)

    def _add_dead(self, context: ContextState, keys: bytes) -> None:
        runs = self._of(context.namespace).runs
        for stretch in runs.stretches(keys):
            if stretch.run is None:
                self._insert(context, stretch.keys, 0)
                self._watch(context.namespace, stretch.keys)

    def _insert(self, context: ContextState, keys: bytes, refs: int) -> None:
        books = self._of(context.namespace)
        books.runs.insert(keys, refs, self._now_ns, context.uid)
        if books.asked:
            self._mark_pending(books, b"".join(k for k in split_keys(keys) if k in books.asked))

    def _watch(self, namespace: Namespace, keys: bytes) -> None:
        """Remember to look at keys that are dead now and may never be proven ours."""
        self._unproven.append((self._now_ns, namespace, keys))

    def _forget_unproven(self) -> None:
        while self._unproven and self._now_ns - self._unproven[0][0] >= UNPROVEN_NS:
            dead_ns, namespace, keys = self._unproven.popleft()
            runs = self._of(namespace).runs
            for stretch in runs.stretches(keys):
                run = stretch.run
                if run is None or run.refs or run.dead_ns != dead_ns or run.proven:
                    continue
                run = runs.isolate(stretch)
                chunks = zip(split_keys(run.keys), run.flags, strict=True)
                for lost in runs.stretches(b"".join(k for k, f in chunks if not f & ChunkFlag.OURS)):
                    runs.drop(runs.isolate(lost))

    def _confirmed(self, event: ChunksConfirmed) -> None:
        books = self._of(event.namespace)
        flag = _STORED if event.stored else _VERIFIED
        for stretch in books.runs.stretches(event.keys):
            if stretch.run is None:
                books.unknown_confirmed += stretch.num_chunks
            else:
                books.runs.mark(stretch, flag)

    def _gone(self, namespace: Namespace, keys: bytes) -> None:
        """The cache has not got them: dead ones leave the books, live ones are no longer proven."""
        runs = self._of(namespace).runs
        for stretch in runs.stretches(keys):
            if stretch.run is None:
                continue
            if stretch.run.refs:
                runs.mark(stretch, 0, clear=_PRESENT)
            else:
                runs.drop(runs.isolate(stretch))

    def _proposed(self, directive: Reclaim | Demote) -> None:
        books = self._of(directive.namespace)
        if directive.directive_id in books.directives:
            return
        books.directives[directive.directive_id] = directive
        books.asked.update(split_keys(directive.keys))
        self._mark_pending(books, directive.keys)

    def _mark_pending(self, books: _Books, keys: bytes) -> None:
        for stretch in books.runs.stretches(keys):
            books.runs.mark(stretch, ChunkFlag.PENDING)

    def _settled(self, event: DirectiveSettled) -> None:
        """What the outcome makes of the chunks: gone, forgotten, demoted, or asked for again later."""
        books = self._of(event.namespace)
        outcome = event.result.outcome
        if event.directive_id not in books.directives or outcome in _UNDER_WAY:
            return
        directive = books.directives.pop(event.directive_id)
        runs = books.runs
        books.asked.subtract(split_keys(directive.keys))
        answered = b"".join(k for k in split_keys(directive.keys) if books.asked[k] <= 0)
        for key in split_keys(answered):
            del books.asked[key]
        for stretch in runs.stretches(answered):
            runs.mark(stretch, 0, clear=ChunkFlag.PENDING)
        self._gone(event.namespace, event.result.gone)
        books.recurrence.freed(event.result.gone, self._now_ns)
        if outcome is DirectiveOutcome.EXPIRED:
            return  # nobody told what became of it: what is still dead is asked for again at once
        gone = set(split_keys(event.result.gone))
        left = b"".join(key for key in split_keys(directive.keys) if key not in gone)
        demoted = isinstance(directive, Demote) and outcome in (
            DirectiveOutcome.APPLIED,
            DirectiveOutcome.UNSUPPORTED,
        )
        for stretch in runs.stretches(left):
            if stretch.run is None:
                continue
            if not demoted and outcome is not DirectiveOutcome.SUPPRESSED:
                runs.isolate(stretch).retry_ns = self._now_ns + RETRY_NS
            elif not stretch.run.refs and demoted:
                runs.mark(stretch, ChunkFlag.DEMOTED)
            elif not stretch.run.refs:
                run = runs.isolate(stretch)
                runs.drop(run)
                books.recurrence.freed(run.keys, self._now_ns)

    def _of(self, namespace: Namespace) -> _Books:
        books = self._books.get(namespace.cache)
        if books is None:
            books = self._books[namespace.cache] = _Books(self.keep_recurring_ns)
        return books

    # -- questions ----------------------------------------------------------------------------------------

    def namespaces(self) -> list[Namespace]:
        """Model and salt of all books, in order."""
        return sorted(self._books)

    def references(self, namespace: Namespace, key: bytes) -> int:
        """Number of (context, live version) pairs whose run holds the key.

        A key that left the books (somebody else removed the chunk) is referred to by nothing.
        """
        found = self._find(namespace, key)
        return found[0].refs if found else 0

    def dead_ns(self, namespace: Namespace, key: bytes) -> int:
        """When the chunk was let go; 0 if it is alive, or not in the books."""
        found = self._find(namespace, key)
        return found[0].dead_ns if found else 0

    def open_directives(self) -> list[Reclaim | Demote]:
        """Directives without an outcome, in order of their ids."""
        found = {i: d for books in self._books.values() for i, d in books.directives.items()}
        return [found[i] for i in sorted(found)]

    def unverified(self, namespace: Namespace, keys: bytes) -> list[bytes]:
        """Which of the keys the cache has not shown."""
        return [key for key in split_keys(keys) if not self._has(namespace, key, ChunkFlag.VERIFIED)]

    def unproven(self, namespace: Namespace, keys: bytes) -> list[bytes]:
        """Which of the keys are not proven to be stored by our calls."""
        return [key for key in split_keys(keys) if not self._has(namespace, key, ChunkFlag.OURS)]

    def verified_keys(self, namespace: Namespace) -> list[bytes]:
        """Every key that the cache has shown and that is not known to be gone."""
        books = self._books.get(namespace.cache)
        return books.runs.keys_with(_VERIFIED) if books else []

    def verified_chunks(self, namespace: Namespace, keys: bytes) -> int:
        """How many leading chunks of a chain the cache has shown."""
        for position, key in enumerate(split_keys(keys)):
            if not self._has(namespace, key, ChunkFlag.VERIFIED):
                return position
        return len(keys) // KEY_BYTES

    def describe(self, namespace: Namespace, key: bytes) -> ChunkDescription | None:
        """What is known of one chunk; None if it is not in the books."""
        found = self._find(namespace, key)
        if found is None:
            return None
        run, at = found
        return ChunkDescription(
            key=key,
            references=run.refs,
            flags=tuple(flag.name or "" for flag in ChunkFlag if flag & run.flags[at]),
            dead_ns=run.dead_ns,
            retry_ns=run.retry_ns,
            directives=tuple(
                name
                for name, directive in sorted(self._books[namespace.cache].directives.items())
                if key in split_keys(directive.keys)
            ),
        )

    def stats(self, namespace: Namespace) -> ChunkStats:
        """Counts of the namespace, without walking its chunks."""
        books = self._books.get(namespace.cache)
        if books is None:
            return ChunkStats()
        runs = books.runs
        return ChunkStats(
            live=runs.num_chunks - runs.num_dead,
            dead=runs.num_dead,
            verified=runs.num_verified,
            pending=runs.num_pending,
            runs=runs.num_runs,
            directives=len(books.directives),
            unknown_confirmed=books.unknown_confirmed,
        )

    def dead_runs(self, namespace: Namespace, *, demoted: bool) -> Iterable[DeadRun]:
        """Dead runs that hold a chunk a plan may ask for, `ReclaimView`."""
        books = self._books.get(namespace.cache)
        if books is None:
            return ()
        runs = books.runs
        return tuple({**runs.fresh, **runs.demoted} if demoted else runs.fresh)

    def dead_keys(self, namespace: Namespace, owned: Callable[[str], bool]) -> list[bytes]:
        """Every key that nothing refers to and whose last owner is accepted, proven or not."""
        books = self._books.get(namespace.cache)
        return books.runs.dead_keys(owned) if books else []

    def oldest_unknown_ns(self, namespace: Namespace) -> int | None:
        """When the oldest call in flight arrived whose chain is not known yet; None if there is none."""
        books = self._books.get(namespace.cache)
        return min(books.unknown_flights.values(), default=None) if books else None

    def unmapped_contexts(self, namespace: Namespace) -> Sequence[str]:
        """Open contexts whose chunks are not known, in order of uid."""
        books = self._books.get(namespace.cache)
        return sorted(books.unmapped) if books else ()

    def last_untracked_ns(self, namespace: Namespace) -> int | None:
        """When inference was last forwarded untracked; None if never."""
        books = self._books.get(namespace.cache)
        return books.last_untracked_ns if books else None

    def digest(self) -> bytes:
        """Digest of every chunk and every fact, chunk by chunk: it does not tell how runs are cut."""
        return digest_all(self._parts())

    def _parts(self) -> Iterator[object]:
        for namespace in self.namespaces():
            books = self._books[namespace]
            yield namespace, books.last_untracked_ns, books.unknown_confirmed
            yield books.directives, books.unmapped, books.unknown_flights
            if (recurrence := books.recurrence.facts()) != RecurrenceFacts():
                yield recurrence
            chunks = (
                (key, run.refs, run.flags[at], run.dead_ns, run.retry_ns, run.owner)
                for run in books.runs.runs()
                for at, key in enumerate(split_keys(run.keys))
            )
            yield from sorted(chunks)

    def _find(self, namespace: Namespace, key: bytes) -> tuple[Run, int] | None:
        books = self._books.get(namespace.cache)
        return books.runs.find(key) if books else None

    def _has(self, namespace: Namespace, key: bytes, flag: int) -> bool:
        found = self._find(namespace, key)
        return found is not None and bool(found[0].flags[found[1]] & flag)
