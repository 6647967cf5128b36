"""A context lived through step by step: a tiny template and tokenizer, and one method for each thing seen.

Every step decides, evolves and checks the invariants that hold always. Messages are written as words, such as
`"u1 a1 t1"`; the first letter gives the role. A message renders to as many tokens as its number says.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import msgspec

from lifecycle.core.decide import decide, open_context
from lifecycle.core.events import ContextEvent
from lifecycle.core.evolve import evolve
from lifecycle.core.ids import Namespace
from lifecycle.core.observations import (
    CallArrival,
    CallEnding,
    CallMapping,
    CloseRequested,
    ContextOpened,
    FirstToken,
    GenerationKeys,
    MessageFact,
    Observation,
    Operation,
    OperationReceived,
    PinRequest,
    PromptMapping,
    Tick,
    VerificationResult,
)
from lifecycle.core.state import ROOT, ContextState, Version, holder_tips, list_path, path, version_states
from lifecycle.vocabulary import CallEnd, IdentityRung, MappingKind, VersionState, WaitKind

CHUNK = 4
GO = "<go>"
BYTES_PER_TOKEN = 10
SECOND = 1_000_000_000
NAMESPACE = Namespace("model")
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
NOW = 1_000 * SECOND


def fact(word: str) -> MessageFact:
    """What is kept of a message."""
    return MessageFact(blake2b(word.encode(), digest_size=16).digest(), ROLES[word[0]])


def tokens_of(word: str) -> list[str]:
    """A message's tokens, at least five. An answer begins with the token of the generation prompt."""
    content = [f"{word}.{i}" for i in range(5 + sum(word.encode()) % 4)]
    return [GO, *content] if word[0] == "a" else content


def prompt_tokens(words: Sequence[str], head: str = "head", stripped: Iterable[str] = ()) -> list[list[str]]:
    """Tokens of the head, of each message, and of the generation prompt; a stripped message loses one."""
    out = [[f"{head}.{i}" for i in range(3)]]
    for word in words:
        tokens = tokens_of(word)
        out.append(tokens[:1] + tokens[2:] if word in stripped else tokens)
    return [*out, [GO]]


def keys_of(tokens: Sequence[str]) -> list[bytes]:
    """The chain of chunk keys of a token sequence."""
    keys: list[bytes] = []
    parent = b""
    for i in range(len(tokens) // CHUNK):
        chunk = "|".join(tokens[i * CHUNK : (i + 1) * CHUNK]).encode()
        parent = blake2b(parent + chunk, digest_size=32).digest()
        keys.append(parent)
    return keys


def mapping_of(
    words: Sequence[str], head: str = "head", stripped: Iterable[str] = (), tools_end: int = 0
) -> PromptMapping:
    """The exact mapping of a list."""
    parts = prompt_tokens(words, head, stripped)
    ends = []
    total = 0
    for part in parts:
        total += len(part)
        ends.append(total)
    return PromptMapping(
        kind=MappingKind.EXACT,
        num_tokens=total,
        head_end=ends[0],
        tools_end=tools_end,
        message_ends=tuple(ends[1:-1]),
        chunk_size=CHUNK,
        chunk_keys=b"".join(keys_of([t for part in parts for t in part])),
    )


def check_always(state: ContextState) -> None:
    """What holds of every state: the tree is whole, closed, tiled, and held."""
    for version in state.versions.values():
        assert version.parent == ROOT or version.parent in state.versions
        if version.mapped:
            parent_end = state.versions[version.parent].end if version.parent != ROOT else 0
            assert version.start == parent_end
            assert version.end >= version.start
            if version.index >= -1:
                assert version.first_chunk == version.start // state.chunk_size
                assert version.num_chunks == version.end // state.chunk_size - version.first_chunk
    held: set[int] = set()
    for tip in holder_tips(state):
        held.update(v.id for v in path(state.versions, tip))
    assert held == set(state.versions)
    assert len({b.id for b in state.branches}) == len(state.branches)
    assert len({p.pin_id for p in state.pins}) == len(state.pins)
    for flight in state.flights:
        assert (flight.cut == ROOT) == (not flight.stale)
        assert flight.cut in {ROOT, *(v.id for v in path(state.versions, flight.tip))}
    for branch in state.branches:
        on_path = {v.id for v in path(state.versions, branch.tip)}
        assert branch.closed_tip in on_path or branch.closed_tip == ROOT
        for tail in branch.tails:
            assert state.versions[tail].index == -2
    assert set(version_states(state)) == set(state.versions)


Listener = Callable[[ContextEvent, ContextState | None, ContextState], None]


class Story:
    """One context. `events` is all there was, `seen` what the last step (`last`, on `before`) added."""

    def __init__(
        self,
        *,
        parent: "Story | None" = None,
        fork: bool = False,
        upto: int | None = None,
        one_off: bool = False,
        uid: str = "",
        listener: Listener = lambda event, before, after: None,
    ) -> None:
        self.listener = listener
        self.now = NOW if parent is None else parent.now
        opened = ContextOpened(
            at_ns=self.now,
            uid=uid or ("child" if parent else "ctx"),
            tenant="tenant",
            context_id="child" if parent else "ctx",
            namespace=NAMESPACE,
            rung=IdentityRung.EXPLICIT,
            parent=parent.state.uid if parent else "",
            fork=fork,
            upto=upto,
            one_off=one_off,
        )
        self.opened = opened
        self.parent_steps = len(parent.steps) if parent else 0
        self.steps: list[tuple[Observation, list[ContextEvent], ContextState]] = []
        self.events: list[ContextEvent] = open_context(opened, parent.state if parent else None)
        self.seen = list(self.events)
        self.state = evolve(None, self.events[0])
        listener(self.events[0], None, self.state)
        self.lists: dict[tuple[str, int], list[str]] = {}
        self.seqs = 0
        self.last: Observation = Tick(at_ns=self.now)
        self.before = self.state
        check_always(self.state)

    # -- steps --------------------------------------------------------------------------------------------

    def see(self, observation: Observation) -> list[ContextEvent]:
        """Any observation."""
        self.last, self.before = observation, self.state
        self.seen = decide(self.state, observation)
        for event in self.seen:
            before, self.state = self.state, evolve(self.state, event)
            self.listener(event, before, self.state)
        self.events += self.seen
        self.steps.append((observation, self.seen, self.state))
        check_always(self.state)
        return self.seen

    def arrive(self, words: str, call: str = "c1", *, head: str = "head", **fields: object) -> int:
        """A call comes; answers the attempt. Times advance by a millisecond a step."""
        self.now += SECOND // 1000
        messages = words.split()
        self.see(
            msgspec.structs.replace(
                CallArrival(
                    at_ns=self.now, call_id=call, head=head.encode(), messages=tuple(map(fact, messages))
                ),
                **fields,
            )
        )
        attempt = max(f.attempt for f in self.state.flights if f.call_id == call)
        self.lists[call, attempt] = messages
        return attempt

    def map(
        self,
        call: str = "c1",
        attempt: int = 1,
        *,
        head: str = "head",
        stripped: Iterable[str] = (),
        budget: int | None = None,
        pins_left: int | None = None,
        tools_end: int = 0,
    ) -> list[ContextEvent]:
        """The call's tokens become known."""
        mapping = mapping_of(self.lists[call, attempt], head, stripped, tools_end)
        return self.see(
            CallMapping(
                at_ns=self.now,
                call_id=call,
                attempt=attempt,
                mapping=mapping,
                bytes_per_token=BYTES_PER_TOKEN,
                budget_left_bytes=budget,
                pins_left=pins_left,
            )
        )

    def first(
        self, call: str = "c1", attempt: int = 1, max_branches: int | None = None
    ) -> list[ContextEvent]:
        """The first token came."""
        self.now += SECOND // 1000
        return self.see(FirstToken(at_ns=self.now, call_id=call, attempt=attempt, max_branches=max_branches))

    def end(
        self,
        call: str = "c1",
        attempt: int = 1,
        end: CallEnd = CallEnd.COMPLETED,
        wait: WaitKind = WaitKind.UNKNOWN,
    ) -> list[ContextEvent]:
        """The call is over."""
        self.now += SECOND // 1000
        return self.see(CallEnding(at_ns=self.now, call_id=call, attempt=attempt, end=end, wait=wait))

    def abort(self, call: str = "c1", attempt: int = 1) -> list[ContextEvent]:
        """The client hung up."""
        return self.end(call, attempt, CallEnd.ABORTED)

    def generate(
        self, answer: str, call: str = "c1", attempt: int = 1, choice: int = 0, stripped: Iterable[str] = ()
    ) -> list[ContextEvent]:
        """The engine told what it generated: the rest of the tokens of message `answer`."""
        parts = prompt_tokens(self.lists[call, attempt], stripped=stripped)
        tokens = [t for part in parts for t in part] + tokens_of(answer)[1:]
        return self.see(
            GenerationKeys(
                at_ns=self.now,
                call_id=call,
                attempt=attempt,
                choice=choice,
                num_tokens=len(tokens),
                chain=b"".join(keys_of(tokens)),
                chunk_size=CHUNK,
            )
        )

    def call(self, words: str, call: str = "c1", wait: WaitKind = WaitKind.UNKNOWN, **fields: object) -> int:
        """A whole call, streamed and completed."""
        attempt = self.arrive(words, call, **fields)
        self.map(call, attempt)
        self.first(call, attempt)
        self.end(call, attempt, wait=wait)
        return attempt

    def do(
        self,
        operation: type[Operation],
        /,
        seq: int | None = None,
        *,
        budget: int | None = None,
        pins_left: int | None = None,
        **fields: object,
    ) -> list[ContextEvent]:
        """A declared operation; without `seq` the next one."""
        if seq is None:
            self.seqs += 1
            seq = self.seqs
        self.seqs = max(self.seqs, seq)
        return self.see(
            OperationReceived(
                at_ns=self.now,
                source="sdk",
                operation=operation(seq=seq, ctx="ctx", **fields),
                bytes_per_token=BYTES_PER_TOKEN,
                budget_left_bytes=budget,
                pins_left=pins_left,
            )
        )

    def tick(self, seconds: float = 0.0) -> list[ContextEvent]:
        """Time passes."""
        self.now += int(seconds * SECOND)
        return self.see(Tick(at_ns=self.now))

    def close(self) -> list[ContextEvent]:
        """Somebody with authority ends it."""
        return self.see(CloseRequested(at_ns=self.now, reason="asked"))

    def verify(self, reason: str = "") -> list[ContextEvent]:
        """The cache's word about computed keys."""
        return self.see(VerificationResult(at_ns=self.now, reason=reason))

    # -- questions ----------------------------------------------------------------------------------------

    def names(self, events: Iterable[ContextEvent] | None = None) -> list[str]:
        """Types of the events, by default of the last step."""
        return [type(e).__name__ for e in (self.seen if events is None else events)]

    def live(self) -> dict[str, VersionState]:
        """State of every live list, by its words: a version is a message and its whole prefix."""
        words = {fact(w).digest: w for ws in self.lists.values() for w in ws}
        words |= self._inherited_words
        states = version_states(self.state)
        out = {}
        for version in self.state.versions.values():
            if version.index >= 0:
                text = " ".join(words[v.digest] for v in list_path(self.state, version.id))
                out[text] = min(
                    out.get(text, states[version.id]), states[version.id], key=list(VersionState).index
                )
        return out

    @property
    def _inherited_words(self) -> dict[bytes, str]:
        return {fact(w).digest: w for w in ("s0", *(f"{r}{i}" for r in ROLES for i in range(40)))}

    def lists_live(self) -> set[str]:
        """The live lists that no live list goes on with."""
        live = set(self.live())
        return {a for a in live if not any(b.startswith(a + " ") for b in live)}

    def keys_live(self) -> set[bytes]:
        """Every key that a live version holds."""
        out: set[bytes] = set()
        for version in self.state.versions.values():
            out.update(version.keys[i : i + 32] for i in range(0, len(version.keys), 32))
        return out

    def chain(self, words: str, stripped: Iterable[str] = ()) -> set[bytes]:
        """The keys of a list's whole prompt, the generation prompt's own chunk left out."""
        parts = prompt_tokens(words.split(), stripped=stripped)[:-1]
        return set(keys_of([t for part in parts for t in part]))

    def answer_keys(self, words: str, answer: str) -> set[bytes]:
        """Keys that only a generation behind the list's prompt fills."""
        parts = prompt_tokens(words.split())
        prompt = [t for part in parts for t in part]
        return set(keys_of(prompt + tokens_of(answer)[1:])) - set(keys_of(prompt))

    def path_of(self, words: str) -> Version:
        """The newest live version that spells the list."""
        digests = [fact(w).digest for w in words.split()]
        found = [
            v
            for v in self.state.versions.values()
            if v.index == len(digests) - 1 and [m.digest for m in list_path(self.state, v.id)] == digests
        ]
        return max(found, key=lambda v: v.id)


def pin(span: tuple[int, int] | str, ttl: float | None = None) -> PinRequest:
    """A pin that rides on a call."""
    return PinRequest(span, ttl)


def unpin(span: tuple[int, int] | str) -> PinRequest:
    """An unpin that rides on a call."""
    return PinRequest(span, release=True)
