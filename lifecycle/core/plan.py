"""The plan: which directives follow from what is true. It asks; it never acts.

Liveness comes from the contexts (a chunk is dead when no live version of any context refers to it),
presence and ownership from the cache's own events. Everything in doubt stays.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntFlag
from typing import Protocol

from lifecycle.core.directives import Admit, Demote, Pin, Reclaim, Unpin
from lifecycle.core.ids import KEY_BYTES, Namespace
from lifecycle.core.state import ContextState, PinHold, chain, live_ids, path
from lifecycle.vocabulary import UNTRACKED_RECENT_SECONDS

MAX_KEYS = 2_000
"""Most chunks of one directive: its events take about 10 ms of the event loop."""

UNKNOWN_HOLD_NS = 5 * 10**9
"""How long a dead chunk waits for calls whose chain is not known yet; mapping takes a fraction of that."""

UNTRACKED_RECENT_NS = int(UNTRACKED_RECENT_SECONDS * 1e9)


class ChunkFlag(IntFlag):
    """What is known of a chunk besides its references; one byte a chunk.

    VERIFIED: the cache itself showed the key. OURS: its store was reported during a tracked call. PENDING: a
    directive about it has no outcome yet. DEMOTED: it left the upper tier, or no tier below can be told to
    take it.
    """

    VERIFIED = 1
    OURS = 2
    PENDING = 4
    DEMOTED = 8


_PROVEN = ChunkFlag.VERIFIED | ChunkFlag.OURS
FRESH: int = int(_PROVEN)
"""Flags of a dead chunk that may be reclaimed or demoted."""
DEMOTED: int = int(_PROVEN | ChunkFlag.DEMOTED)
"""Flags of a dead chunk that may be reclaimed but needs no second demotion."""


class DeadRun(Protocol):
    """Consecutive chunks of a chain that nothing refers to.

    `keys` are concatenated chunk keys, `flags` one `ChunkFlag` byte for each; dead since `dead_ns`, left
    alone until `retry_ns` because the last directive about it came to nothing (nanoseconds since the
    epoch). `owner` is the uid of the context that let go last.
    """

    @property
    def keys(self) -> bytes: ...
    @property
    def flags(self) -> bytes: ...
    @property
    def dead_ns(self) -> int: ...
    @property
    def retry_ns(self) -> int: ...
    @property
    def owner(self) -> str: ...


class ReclaimView(Protocol):
    """What the plan must know of one namespace's chunks."""

    def dead_runs(self, namespace: Namespace, *, demoted: bool) -> Iterable[DeadRun]:
        """Dead runs with a chunk of flags `FRESH` or, if `demoted`, `DEMOTED`; others may be among them."""
        ...

    def oldest_unknown_ns(self, namespace: Namespace) -> int | None:
        """When the oldest call in flight arrived whose chain is not known yet; None if there is none."""
        ...

    def unmapped_contexts(self, namespace: Namespace) -> Sequence[str]:
        """Uids of the open contexts whose chunks we do not know."""
        ...

    def last_untracked_ns(self, namespace: Namespace) -> int | None:
        """When inference was last forwarded without being tracked; None if never."""
        ...


def plan_reclaim(
    view: ReclaimView,
    namespace: Namespace,
    now_ns: int,
    as_of: int,
    new_id: str,
    wanted_owner: Callable[[str], bool],
    arriving_ns: int | None = None,
) -> Reclaim | Demote | None:
    """What to free now: dead chunks, shown by the cache, stored by our calls, not already asked for.

    A call whose chain is still unknown could need any chunk. So nothing is freed while there is one, except
    what was dead before the oldest such call arrived and has waited for `UNKNOWN_HOLD_NS`: calls that follow
    each other closely must not hold it for ever. Demote instead of Reclaim while somebody we cannot see may
    use the same chunks. At most `MAX_KEYS` chunks, longest dead first, of contexts that `wanted_owner`
    accepts. `as_of` is the position of the last event that `view` has seen; `arriving_ns` is when the oldest
    call came that it has not seen, and of whose chain nothing is known either.
    """
    unknown_ns = oldest(view.oldest_unknown_ns(namespace), arriving_ns)
    doubt = others_may_use(view, namespace, now_ns)
    wanted = {FRESH} if doubt else {FRESH, DEMOTED}
    settled = (
        run
        for run in view.dead_runs(namespace, demoted=not doubt)
        if waited_for_unknown(run.dead_ns, unknown_ns, now_ns) and wanted_owner(run.owner)
    )
    keys, owners = _eligible(settled, wanted, now_ns)
    if not keys:
        return None
    num_chunks = len(keys) // KEY_BYTES
    chunks = "1 chunk" if num_chunks == 1 else f"{num_chunks} chunks"
    if doubt:
        reason = (
            f"{chunks} no tracked context refers to, as of event {as_of}; lower copy kept because {doubt}"
        )
        return Demote(directive_id=new_id, namespace=namespace, reason=reason, keys=keys, owners=owners)
    reason = f"{chunks} no context refers to any more, as of event {as_of}"
    return Reclaim(directive_id=new_id, namespace=namespace, reason=reason, keys=keys, owners=owners)


def oldest(*moments_ns: int | None) -> int | None:
    """The earliest of those that are."""
    return min((at for at in moments_ns if at is not None), default=None)


def waited_for_unknown(dead_ns: int, unknown_ns: int | None, now_ns: int) -> bool:
    """Whether a chunk that is dead since `dead_ns` need not wait for calls whose chains are not known, the
    oldest of which came at `unknown_ns`."""
    return unknown_ns is None or dead_ns < min(unknown_ns, now_ns - UNKNOWN_HOLD_NS)


def others_may_use(view: ReclaimView, namespace: Namespace, now_ns: int) -> str:
    """Why dead chunks may be in use all the same; empty if they cannot be.

    It begins with an event (a context unmapped, inference forwarded untracked); one, or time, ends it.
    """
    unmapped = view.unmapped_contexts(namespace)
    if unmapped:
        more = f" and {len(unmapped) - 1} more" if len(unmapped) > 1 else ""
        return f"the chunks of context {min(unmapped)}{more} are not known"
    untracked_ns = view.last_untracked_ns(namespace)
    if untracked_ns is not None and now_ns - untracked_ns < UNTRACKED_RECENT_NS:
        minutes = max(0, now_ns - untracked_ns) // 60_000_000_000
        return f"untracked inference was forwarded {minutes} min ago"
    return ""


def _eligible(
    runs: Iterable[DeadRun], wanted: set[int], now_ns: int
) -> tuple[bytes, tuple[tuple[str, int], ...]]:
    ripe = sorted((r for r in runs if r.retry_ns <= now_ns), key=lambda r: (r.dead_ns, r.keys))
    out = bytearray()
    owners: list[tuple[str, int]] = []
    for run in ripe:
        before = len(out)
        for position, flags in enumerate(run.flags):
            if flags in wanted and len(out) < MAX_KEYS * KEY_BYTES:
                out += run.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
        num_chunks = (len(out) - before) // KEY_BYTES
        if num_chunks and owners and owners[-1][0] == run.owner:
            owners[-1] = (run.owner, owners[-1][1] + num_chunks)
        elif num_chunks:
            owners.append((run.owner, num_chunks))
        if len(out) == MAX_KEYS * KEY_BYTES:
            break
    return bytes(out), tuple(owners)


def plan_admission(
    state: ContextState, call_id: str, verified_chunks: Callable[[bytes], int], new_id: str
) -> Admit | None:
    """Keep a one-off's own tokens out of the reusable store; None for a context that stays.

    A spawned one-off owns its whole prompt: boundary 0, known before any mapping. A forked one may touch
    what it inherited, as far as the cache has shown it: `verified_chunks` answers how many leading chunks
    of a chain it has.
    """
    flight = max((f for f in state.flights if f.call_id == call_id), key=lambda f: f.attempt, default=None)
    if flight is None or not (state.one_off or flight.one_off):
        return None
    boundary = 0
    if state.forked:
        inherited = live_ids(state.versions, (b.tip for b in state.branches))
        shared = [v for v in path(state.versions, flight.tip) if v.id in inherited]
        boundary = verified_chunks(b"".join(v.keys for v in shared)) * state.chunk_size
    kept = f"its first {boundary} tokens are its parent's" if boundary else "nothing of it is reusable"
    return Admit(
        directive_id=new_id,
        namespace=state.namespace,
        reason=f"a one-off serves a single inference; {kept}",
        call_id=call_id,
        bypass_from_token=boundary,
    )


def plan_pins(
    before: ContextState | None, after: ContextState, new_id: Callable[[], str]
) -> list[Pin | Unpin]:
    """Directives that bring the cache's holds from `before`'s pins to `after`'s.

    A renewed pin is a `Pin` of the same id and chain with the new lease. A pin whose chain changed is held
    on the new one first and only then released on the old one, under the same id. A pin on tokens not known
    yet waits.
    """
    if before is not None and before.pins is after.pins and before.versions is after.versions:
        return []
    held = _holds(before) if before is not None else {}
    wanted = _holds(after)
    out: list[Pin | Unpin] = []

    def release(pin_id: str, keys: bytes, reason: str) -> None:
        directive_id = new_id()
        namespace = after.namespace
        out.append(
            Unpin(directive_id=directive_id, namespace=namespace, reason=reason, pin_id=pin_id, keys=keys)
        )

    for pin_id, (pin, keys) in wanted.items():
        old_pin, old_keys = held.get(pin_id, (None, b""))
        moved = keys != old_keys
        if keys and (old_pin is None or moved or pin.until_ns != old_pin.until_ns):
            out.append(
                Pin(
                    directive_id=new_id(),
                    namespace=after.namespace,
                    reason=_pin_reason(bool(old_keys), moved),
                    pin_id=pin_id,
                    keys=keys,
                    lease_until_ns=pin.until_ns,
                )
            )
        if old_keys and moved:
            release(pin_id, old_keys, "the pinned message stands behind another prefix now")
    for pin_id, (_, old_keys) in held.items():
        if old_keys and pin_id not in wanted:
            release(pin_id, old_keys, "the pin was released or its lease ran out")
    return out


def _pin_reason(held_before: bool, moved: bool) -> str:
    if not held_before:
        return "pinned"
    return "the pinned message's chain changed" if moved else "the lease was renewed"


def _holds(state: ContextState) -> Mapping[str, tuple[PinHold, bytes]]:
    return {p.pin_id: (p, chain(state.versions, p.tip)) for p in sorted(state.pins, key=lambda p: p.pin_id)}
