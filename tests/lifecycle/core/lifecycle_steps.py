"""Steps of random lives, each made twice: decided by the core, and told to the model.

The agents lie: lists change undeclared, declarations are false, operations come twice, late, or never.
"""

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lifecycle.core.decide import decide
from lifecycle.core.events import CallMapped, ChunksConfirmed, GenerationMapped
from lifecycle.core.evolve import evolve
from lifecycle.core.ids import split_keys
from lifecycle.core.leases import next_deadline_ns
from lifecycle.core.observations import (
    AppendMessages,
    CallArrival,
    CallMapping,
    CloseContext,
    DeclareWaiting,
    GenerationKeys,
    PinSpan,
    PromptMapping,
    ReplaceMessages,
    UnpinSpan,
)
from lifecycle.core.state import path
from lifecycle.projections.chunk_index import ChunkIndex
from lifecycle.vocabulary import CallEnd, MappingKind, Tier, WaitKind
from tests.lifecycle.core.lifecycle_model import Model
from tests.lifecycle.core.story import NAMESPACE, SECOND, Story, fact, pin, tokens_of

WORDS = ["s0", "u1", "u2", "u3", "a1", "a2", "a3", "t1", "t2"]
BY_DIGEST = {fact(w).digest: w for w in WORDS}
MAX_CONTEXTS = 4
MAX_MESSAGES = 8

pick = st.integers(0, 1 << 16)
words = st.lists(st.sampled_from(WORDS), max_size=3)
stripped = st.one_of(st.just(frozenset()), st.frozensets(st.sampled_from(["a1", "a2", "u2"]), max_size=2))
spans = st.tuples(st.integers(0, 5), st.integers(1, 3)).map(lambda x: (x[0], x[0] + x[1]))
wait_kinds = st.sampled_from([WaitKind.TOOL, WaitKind.UNKNOWN, WaitKind.HUMAN, WaitKind.SUBAGENT])


class Twin:
    """One context, twice: as the core has it and as the model has it."""

    def __init__(self, story: Story, model: Model) -> None:
        self.story = story
        self.model = model
        self.agent: list[str] = []
        self.calls: list[tuple[str, int]] = []
        self.stripped: dict[tuple[str, int], frozenset[str]] = {}
        self.snapshots: list[tuple[int, bytes]] = []
        self.skipped: list[int] = []
        self.seq = 0

    def in_flight(self) -> list[tuple[str, int]]:
        return [(f.call_id, f.attempt) for f in self.story.state.flights]


class Steps(RuleBasedStateMachine):
    """All that may happen. Contexts share one clock."""

    def __init__(self) -> None:
        super().__init__()
        self.twins: list[Twin] = []
        self.index = ChunkIndex()
        self.stored: set[bytes] = set()
        self.num_calls = 0
        self.now = 0

    def begun(self, story: Story, model: Model, agent: list[str]) -> None:
        twin = Twin(story, model)
        twin.agent = agent
        self.twins.append(twin)

    def twin(self, number: int) -> Twin:
        twin = self.twins[number % len(self.twins)]
        twin.story.now = self.now = max(self.now, twin.story.now)
        return twin

    def after(self, twin: Twin) -> None:
        """Whatever was seen changes nothing when it is seen again; a call's arrival is another attempt.

        The cache stores, and says so, every chunk that becomes known.
        """
        story = twin.story
        self.now = story.now
        keys = set(
            split_keys(b"".join(e.keys for e in story.seen if isinstance(e, CallMapped | GenerationMapped)))
        )
        self.stored |= keys
        run = b"".join(sorted(keys))
        stored = ChunksConfirmed(at_ns=self.now, namespace=NAMESPACE, keys=run, tiers=(Tier.L1,), stored=True)
        self.index.apply(stored, None, None)
        if not isinstance(story.last, CallArrival):
            again = decide(story.state, story.last)
            state = story.state
            for event in again:
                state = evolve(state, event)
            assert state == story.state
            assert not again or isinstance(story.last, GenerationKeys)

    # -- contexts -----------------------------------------------------------------------------------------

    @initialize(one_off=st.sampled_from([False, False, True]))
    def first_context(self, one_off: bool) -> None:
        story = Story(one_off=one_off, uid="ctx 0", listener=self.index.apply)
        self.now = story.now
        self.begun(story, Model(story.now, one_off=one_off), [])
        for word in (1, 2) if not one_off else ():
            self.whole_call(word)

    @precondition(lambda self: len(self.twins) < MAX_CONTEXTS)
    @rule(
        number=pick,
        upto=st.none() | st.integers(0, 6),
        one_off=st.sampled_from([False, False, True]),
        share=st.booleans(),
    )
    def another_context(self, number: int, upto: int | None, one_off: bool, share: bool) -> None:
        parent = self.twin(number)
        story = Story(
            parent=parent.story,
            fork=share,
            upto=upto,
            one_off=one_off,
            uid=f"ctx {len(self.twins)}",
            listener=self.index.apply,
        )
        model = parent.model.fork(self.now, upto) if share else Model(self.now)
        model.one_off = one_off
        self.begun(story, model, list(parent.agent[:upto]) if share else [])

    # -- calls --------------------------------------------------------------------------------------------

    @rule(
        number=pick,
        more=words,
        at=st.none() | st.integers(0, MAX_MESSAGES),
        keep=st.booleans(),
        retry=st.sampled_from([False, False, False, True]),
        pins=st.lists(spans, max_size=1),
        closes=st.sampled_from([False] * 9 + [True]),
        tells=st.booleans(),
    )
    def arrive(
        self,
        number: int,
        more: list[str],
        at: int | None,
        keep: bool,
        retry: bool,
        pins: list[tuple[int, int]],
        closes: bool,
        tells: bool,
    ) -> None:
        twin = self.twin(number)
        if len(twin.story.state.flights) >= 4:
            return
        base = twin.agent if at is None else twin.agent[:at]
        wanted = [*base, *more][:MAX_MESSAGES]
        if len(base) + len(more) > MAX_MESSAGES:
            wanted = more
        self.num_calls += 1
        name = f"c{self.num_calls}"
        if retry and twin.calls:
            name, attempt = twin.calls[number % len(twin.calls)]
            wanted = twin.story.lists[name, attempt]
        elif keep:
            twin.agent = wanted
        shown = twin.seq if tells else 0
        attempt = twin.story.arrive(
            " ".join(wanted),
            name,
            pins=tuple(pin(p) for p in pins),
            closes=closes,
            source="sdk" if tells else "",
            seq=shown,
        )
        twin.model.arrive(name, wanted, twin.story.now, pins=pins, closes=closes, shown=shown)
        twin.calls.append((name, attempt))
        self.after(twin)

    @rule(number=pick, which=pick, strips=stripped)
    def map(self, number: int, which: int, strips: frozenset[str]) -> None:
        twin = self.twin(number)
        recent = twin.in_flight() or twin.calls[-3:]
        if not recent:
            return
        name, attempt = recent[which % len(recent)]
        twin.story.map(name, attempt, stripped=strips)
        if twin.story.seen:
            twin.stripped[name, attempt] = strips
        twin.model.map(name, attempt, strips, twin.story.now)
        self.after(twin)

    @rule(number=pick, which=pick, sure=st.sampled_from([False, False, True]))
    def map_none(self, number: int, which: int, sure: bool) -> None:
        twin = self.twin(number)
        if not twin.in_flight() or not sure:
            return
        name, attempt = twin.in_flight()[which % len(twin.in_flight())]
        none = PromptMapping(kind=MappingKind.NONE, reason="no template")
        twin.story.see(CallMapping(at_ns=self.now, call_id=name, attempt=attempt, mapping=none))
        twin.model.map_none(name, attempt, twin.story.now)
        self.after(twin)

    @rule(number=pick, which=pick)
    def first(self, number: int, which: int) -> None:
        twin = self.twin(number)
        if not twin.in_flight():
            return
        name, attempt = twin.in_flight()[which % len(twin.in_flight())]
        twin.story.first(name, attempt)
        twin.model.first(name, attempt, twin.story.now)
        self.after(twin)

    @rule(number=pick, which=pick, completed=st.sampled_from([True, True, True, False]), wait=wait_kinds)
    def end(self, number: int, which: int, completed: bool, wait: WaitKind) -> None:
        twin = self.twin(number)
        if not twin.in_flight():
            return
        name, attempt = twin.in_flight()[which % len(twin.in_flight())]
        before = twin.story.state
        flight = before.flight(name, attempt)
        assert flight is not None
        twin.story.end(name, attempt, CallEnd.COMPLETED if completed else CallEnd.ABORTED, wait)
        twin.model.end(name, attempt, completed, wait, twin.story.now)
        after = twin.story.state
        if not completed and not flight.prefilled and after.open:
            own = {v.id for end in (flight.tip, *flight.tails) for v in path(before.versions, end)}
            assert after.branches == before.branches
            assert {i: v for i, v in before.versions.items() if i in after.versions} == after.versions
            assert set(before.versions) - set(after.versions) <= own
        self.after(twin)

    @rule(number=pick)
    def goes_on(self, number: int) -> None:
        self.whole_call(number)

    def whole_call(self, number: int) -> None:
        """The usual: the agent's own list, one answer more, from arrival to end."""
        twin = self.twin(number)
        if len(twin.agent) >= MAX_MESSAGES:
            twin.agent = twin.agent[:2]
        twin.agent = [*twin.agent, WORDS[number % len(WORDS)]]
        self.num_calls += 1
        name, story, model = f"c{self.num_calls}", twin.story, twin.model
        attempt = story.arrive(" ".join(twin.agent), name)
        model.arrive(name, twin.agent, story.now)
        twin.calls.append((name, attempt))
        story.map(name)
        twin.stripped[name, 1] = frozenset()
        model.map(name, 1, (), story.now)
        story.first(name)
        model.first(name, 1, story.now)
        story.end(name)
        model.end(name, 1, True, WaitKind.UNKNOWN, story.now)
        self.after(twin)

    @rule(number=pick, which=pick, answer=st.sampled_from(["a1", "a2", "a3"]), choice=st.integers(0, 1))
    def generate(self, number: int, which: int, answer: str, choice: int) -> None:
        twin = self.twin(number)
        known = [c for c in twin.calls[-5:] if c in twin.stripped]
        if not known:
            return
        name, attempt = known[which % len(known)]
        twin.story.generate(answer, name, attempt, choice, twin.stripped[name, attempt])
        twin.model.generate(name, attempt, choice, tokens_of(answer)[1:])
        self.after(twin)

    # -- operations ---------------------------------------------------------------------------------------

    def operate(self, twin: Twin, seq: int | None, kind: str, fields: tuple[object, ...]) -> None:
        if seq is None:
            twin.seq += 1
            seq = twin.seq
        story = twin.story
        if kind == "append":
            story.do(AppendMessages, seq, n=fields[0])
        elif kind == "edit":
            story.do(ReplaceMessages, seq, span=fields[:2], n=fields[2])
        elif kind == "pin":
            story.do(PinSpan, seq, span=fields[0], ttl=fields[1] / SECOND)  # type: ignore[operator]
        elif kind == "unpin":
            story.do(UnpinSpan, seq, span=fields[0])
        elif kind == "wait":
            story.do(DeclareWaiting, seq, kind=fields[0])
        elif kind == "close":
            story.do(CloseContext, seq)
        twin.model.operate(seq, kind, fields, story.now)
        self.after(twin)

    @rule(number=pick, span=spans, num_new=st.integers(0, 2), truthful=st.booleans())
    def edit(self, number: int, span: tuple[int, int], num_new: int, truthful: bool) -> None:
        twin = self.twin(number)
        self.operate(twin, None, "edit", (*span, num_new))
        if truthful:
            new = [WORDS[(number + i) % len(WORDS)] for i in range(num_new)]
            twin.agent = [*twin.agent[: span[0]], *new, *twin.agent[span[1] :]]

    @rule(
        number=pick,
        kind=st.sampled_from(["append", "pin", "pin", "unpin", "wait", "lost", "late"]),
        span=spans,
        seconds=st.sampled_from([10, 300, 3600]),
        wait=wait_kinds,
    )
    def declare(self, number: int, kind: str, span: tuple[int, int], seconds: int, wait: WaitKind) -> None:
        twin = self.twin(number)
        if kind == "lost":  # perhaps for good
            twin.seq += 1
            twin.skipped.append(twin.seq)
        elif kind == "late":
            if twin.skipped:
                self.operate(twin, twin.skipped.pop(0), "edit", (*span, 1))
        else:
            fields = {
                "append": (span[0],),
                "pin": (span, seconds * SECOND),
                "unpin": (span,),
                "wait": (wait,),
            }
            self.operate(twin, None, kind, fields[kind])

    def close(self, number: int, declared: bool) -> None:
        twin = self.twin(number)
        if declared:
            self.operate(twin, None, "close", ())
        else:
            twin.story.close()
            twin.model.close()
            self.after(twin)

    # -- time ---------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 0.5, 0.5, 4.0, 4.0, 5.5, 5.5, 30.0, 30.0, 61.0, 61.0, 901.0, 4000.0]))
    def tick(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)
        for twin in self.twins:
            twin.story.now = self.now
            due = next_deadline_ns(twin.story.state)
            twin.story.tick()
            assert bool(twin.story.seen) == (due is not None and due <= self.now)
            twin.model.tick(self.now)
            self.after(twin)

    @rule(number=pick, what=st.sampled_from(["snapshot"] * 4 + ["close", "closed by its agent"]))
    def now_and_then(self, number: int, what: str) -> None:
        if what == "snapshot":
            twin = self.twin(number)
            twin.snapshots.append((len(twin.story.events), msgspec.msgpack.encode(twin.story.state)))
        else:
            self.close(number, what != "close")
