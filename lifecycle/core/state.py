"""State of one context: a tree of message versions and the holders that keep parts of it alive.

A version is a message *and its whole prefix*, so versions form a tree: a fork in it is an edit, a branch, a
second attempt. Every holder (a branch, a call in flight, a pin) points at one version and thereby holds the
path to it. A version that no holder's path passes is dead, and leaves the tree in the same step. So the set
of live versions is the tree itself: closed under prefixes by construction, and never stored twice.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from lifecycle.core.ids import KEY_BYTES, ContextKey, Namespace
from lifecycle.core.observations import MessageFact, Operation, PinRequest
from lifecycle.vocabulary import IdentityRung, PrefixBreak, VersionState, WaitKind

ROOT = -1
"""Parent of a head version."""

HEAD_INDEX = -1
"""Index of the head: what the template puts before and around the messages (tools, default system text)."""

TAIL_INDEX = -2
"""Index of a tail: the generation prompt of one call, and behind it what the call generated."""


class Version(msgspec.Struct, frozen=True, array_like=True):
    """A message and its whole prefix. `[start, end)` are tokens, `end` -1 while they are not known.

    `keys` is the run of keys of the chunks whose *last* token lies in the range, the first of them being
    chunk number `first_chunk` of the chain: a chunk belongs to the version its last token belongs to.
    """

    id: int
    parent: int
    index: int
    role: str
    digest: bytes
    start: int = -1
    end: int = -1
    first_chunk: int = 0
    keys: bytes = b""

    @property
    def mapped(self) -> bool:
        """Whether the tokens are known."""
        return self.end >= 0

    @property
    def num_chunks(self) -> int:
        """Number of chunks whose last token lies in the range."""
        return len(self.keys) // KEY_BYTES

    @property
    def end_chunk(self) -> int:
        """Number of whole chunks up to the end of the range."""
        return self.first_chunk + self.num_chunks


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """A continuation of the context: `tip` ends its list, `tails` are what was generated behind it.

    `doubted_ns` is 0 for an open branch, else when it was doubted. `closed_tip` is the last message of the
    last call that *ended* on the branch: what a fork takes over while a call is in flight.
    """

    id: int
    tip: int
    tails: tuple[int, ...] = ()
    since_ns: int = 0
    wait: WaitKind = WaitKind.UNKNOWN
    tool: str = ""
    eta: float | None = None
    doubted_ns: int = 0
    closed_tip: int = ROOT


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a call between arrival and end. `tip` is its last message, `tails` its generation.

    `branch` is the branch its list continued or left (`diverges`) on arrival; `concurrent` says that another
    call was in flight then; `stale` that a declared edit overtook it: its list is not the context's any more,
    only the part up to `cut` is. `proxy` is the process that forwards it, empty where nobody said. `reopened`
    is why the context was closed when it came.
    """

    call_id: str
    attempt: int
    tip: int
    tail: int
    tails: tuple[int, ...]
    arrived_ns: int
    branch: int = -1
    diverges: bool = False
    concurrent: bool = False
    stale: bool = False
    cut: int = ROOT
    streamed: bool = True
    num_choices: int = 1
    prefilled: bool = False
    mapping_known: bool = False
    closes: bool = False
    one_off: bool = False
    pins: tuple[PinRequest, ...] = ()
    wait: WaitKind | None = None
    tool: str = ""
    eta: float | None = None
    proxy: str = ""
    reopened: str = ""


class PinHold(msgspec.Struct, frozen=True, kw_only=True):
    """A leased hold on the chain to `tip`. `message` and `index` say which message it follows.

    `moving` is set between an edit of the prefix and the next time the message is rendered. A byte budget was
    charged `bytes_per_token` for every token of the chain.
    """

    pin_id: str
    tip: int
    index: int
    message: bytes
    until_ns: int
    size_bytes: int = 0
    bytes_per_token: int = 0
    priority: int | None = None
    moving: bool = False


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt that left another. Fields as in `PrefixDiverged`."""

    at_ns: int
    call_id: str
    kind: PrefixBreak
    index: int
    role: str = ""
    declared: bool = False
    shared_tokens: int = -1
    lost_tokens: int = -1
    against: str = ""


class PrefixLint(msgspec.Struct, frozen=True, kw_only=True):
    """What left the prompt before it, and what that cost: `last` are the latest, the totals count all.

    Declared edits count by themselves, and so does what a new context did not share with another one.
    """

    count: int = 0
    lost_tokens: int = 0
    declared: int = 0
    declared_lost_tokens: int = 0
    beside: int = 0
    beside_lost_tokens: int = 0
    last: tuple[Divergence, ...] = ()


class DeclaredEdit(msgspec.Struct, frozen=True):
    """An edit that the next call will show, from message `start` on, of a list that had `num_chunks`.

    It `brings` something in, or only removes.
    """

    start: int
    num_chunks: int
    brings: bool


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One numbering of operations: the last `seq` consumed, and what came too early.

    `rendered` is the highest `seq` that a call named as sent before it: its list shows those edits already.
    """

    applied: int = 0
    rendered: int = 0
    held: Mapping[int, Operation] = msgspec.field(default_factory=dict)
    held_since_ns: int = 0


class ContextState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is true of one context. `versions` is the live tree, by id.

    `unmapped` says why the keys of the context are not known or not proven, empty if they are: `mapping_lost`
    (a live prompt has no tokens; the next mapping ends it) or `unverified` (the cache showed other keys; only
    the cache's own word ends it). `pinned_calls` are the calls whose own pins were dealt with. `backend` is
    the engine that served it last, empty where there is but one. `edit` waits for the call that shows it.
    """

    uid: str
    key: ContextKey
    namespace: Namespace
    rung: IdentityRung
    parent_uid: str = ""
    forked: bool = False
    one_off: bool = False
    agent: str = ""
    flow: str = ""
    backend: str = ""
    versions: Mapping[int, Version] = msgspec.field(default_factory=dict)
    next_version: int = 0
    next_branch: int = 0
    branches: tuple[Branch, ...] = ()
    flights: tuple[Flight, ...] = ()
    pins: tuple[PinHold, ...] = ()
    sources: Mapping[str, Source] = msgspec.field(default_factory=dict)
    attempts: Mapping[str, int] = msgspec.field(default_factory=dict)
    pinned_calls: tuple[str, ...] = ()
    declared_length: int | None = None
    declares_appends: bool = False
    chunk_size: int = 0
    tools_end: int = 0
    wait: WaitKind = WaitKind.UNKNOWN
    wait_tool: str = ""
    wait_eta: float | None = None
    outcomes: tuple[tuple[int, int, str], ...] = ()
    edit: DeclaredEdit | None = None
    lint: PrefixLint = PrefixLint()
    gap: str = ""
    unmapped: str = ""
    mapping_lost: str = ""
    unverified: str = ""
    closed: str = ""
    created_ns: int = 0
    active_ns: int = 0
    last_ns: int = 0

    @property
    def open(self) -> bool:
        """Whether calls and leases still keep the context."""
        return not self.closed

    def branch(self, branch_id: int) -> Branch | None:
        """The branch of that id, if it is still there."""
        return next((b for b in self.branches if b.id == branch_id), None)

    def flight(self, call_id: str, attempt: int) -> Flight | None:
        """That attempt, if it is still in flight."""
        return next((f for f in self.flights if f.call_id == call_id and f.attempt == attempt), None)

    def current_branch(self) -> Branch | None:
        """The open branch that was advanced last: the context's own list."""
        return max(
            (b for b in self.branches if not b.doubted_ns), key=lambda b: (b.since_ns, b.id), default=None
        )


def path(versions: Mapping[int, Version], tip: int) -> list[Version]:
    """Versions from the head to `tip`, in order. Empty for `ROOT`."""
    out = []
    while tip != ROOT:
        version = versions[tip]
        out.append(version)
        tip = version.parent
    out.reverse()
    return out


def chain(versions: Mapping[int, Version], tip: int) -> bytes:
    """Run of chunk keys from token 0 to the end of `tip`."""
    return b"".join(v.keys for v in path(versions, tip))


def holder_tips(state: ContextState) -> Iterator[int]:
    """Every version that some holder points at."""
    for branch in state.branches:
        yield branch.tip
        yield from branch.tails
    for flight in state.flights:
        yield flight.tip
        yield from flight.tails
    for pin in state.pins:
        yield pin.tip


def live_ids(versions: Mapping[int, Version], tips: Iterable[int]) -> set[int]:
    """Ids on the paths to `tips`."""
    live: set[int] = set()
    for tip in tips:
        while tip != ROOT and tip not in live:
            live.add(tip)
            tip = versions[tip].parent
    return live


def pruned(state: ContextState) -> ContextState:
    """The state without the versions that nothing holds any more."""
    live = live_ids(state.versions, holder_tips(state))
    if len(live) == len(state.versions):
        return state
    return msgspec.structs.replace(state, versions={i: v for i, v in state.versions.items() if i in live})


def version_states(state: ContextState) -> dict[int, VersionState]:
    """State of every live version: the strongest its holders give it.

    A call makes its versions Active until its first token, one that is not streamed to its end.
    """
    out: dict[int, VersionState] = {}

    def mark(tips: Iterable[int], as_state: VersionState) -> None:
        for version_id in live_ids(state.versions, tips):
            out.setdefault(version_id, as_state)

    mark((p.tip for p in state.pins), VersionState.PINNED)
    for flight in state.flights:
        if not flight.prefilled:
            mark((flight.tip, *flight.tails), VersionState.ACTIVE)
    for flight in state.flights:
        mark((flight.tip, *flight.tails), VersionState.SUSPENDED)
    for doubted, as_state in ((False, VersionState.SUSPENDED), (True, VersionState.DOUBTFUL)):
        for branch in state.branches:
            if bool(branch.doubted_ns) == doubted:
                mark((branch.tip, *branch.tails), as_state)
    return {
        i: VersionState.PENDING if s is VersionState.SUSPENDED and not state.versions[i].mapped else s
        for i, s in out.items()
    }


def list_path(state: ContextState, tip: int) -> list[Version]:
    """The client's own messages on the path to `tip`: without head and tails."""
    return [v for v in path(state.versions, tip) if v.index >= 0]


def facts(versions: Iterable[Version]) -> list[MessageFact]:
    """Digest and role of each version."""
    return [MessageFact(v.digest, v.role) for v in versions]
