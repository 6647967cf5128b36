"""Inference is fed random lies: that costs prefills, and never a chunk that somebody holds.

Agents send what agents send, and a liar says whose each call is: any context, any parent, a one-off, a turn.
Recognition, tracker and reclaimer are the real ones, and so is time. What must hold is told by a model that
knows neither trees nor branches, only who called, where a lie put it, and when:

- nothing is deleted that any context holds, counted anew from every context;
- what a call computed stays as long as the context it was given to may go on with it: until that context is
  over, or a later call of it was answered *and* a minute passed, or one that came later still was answered,
  too. Who is lied about is doubted first, and has his time to come back.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lifecycle.core.directives import Demote, Directive, DirectiveResult, Reclaim
from lifecycle.core.events import ChunksConfirmed
from lifecycle.core.ids import ContextKey, split_keys
from lifecycle.core.observations import CallArrival, CallEnding, CallMapping, ContextOpened, FirstToken
from lifecycle.reclaimer import Reclaimer
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import DOUBT_SECONDS, LEASE_SECONDS, CallEnd, IdentityRung, Mode, Tier
from proxy.answer_facts import AnswerFacts, ChoiceFact
from proxy.call_recognition import CallRecognition
from proxy.config import Config, LimitsConfig
from proxy.context_finder import ContextFinder
from proxy.declarations import Declarations
from proxy.followed_call import FollowedCall
from proxy.harness_identity import NOTHING_SAID, HarnessCall
from proxy.identity import Identity, LineageIndex
from proxy.known_lists import Relation
from proxy.lifecycle_fields import LifecycleFields
from proxy.limits import Limits
from proxy.mailbox import Mailboxes
from proxy.modes import Modes
from proxy.relatives import Relatives
from proxy.tasks import owned_tasks
from proxy.tracked_call import CallRequest
from tests.lifecycle.core.story import CHUNK, NAMESPACE, ROLES, SECOND, mapping_of
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.lives import CountedIds, ManualClock, books, replayed, started
from tests.proxy.conversations import HASHER, chat

WORDS = ["u1", "u2", "a1", "a2", "t1", "t2"]
MAX_WORDS = 8
NUM_STEPS = 40
PAUSES = [1.0, 5.0, 30.0, DOUBT_SECONDS + 1, min(LEASE_SECONDS.values()) + 1]


class Liar(ContextFinder):
    """Says of a call what it likes, and at times the truth; it remembers honestly what became of it."""

    def __init__(self, lie: Callable[[], Identity | None]) -> None:
        super().__init__(LineageIndex(), HASHER)
        self._lie = lie

    def find(self, tenant: str, fields: LifecycleFields, asked: FollowedCall, said: HarnessCall) -> Identity:
        return self._lie() or super().find(tenant, fields, asked, said)


@dataclass
class Computed:
    """What the model knows of a call: where it was put, what it computed, and when. Times are None until
    they come.

    What stands behind the last message is the beginning of an answer, and goes with it.
    """

    uid: str
    prompt: frozenset[bytes] = field(repr=False)
    stored: frozenset[bytes] = field(repr=False)
    arrived: int
    first: int | None = None
    ended: int | None = None
    over: bool = False


@dataclass
class Model:
    """Who may still come back for what."""

    calls: list[Computed] = field(default_factory=list)
    one_offs: dict[str, bool] = field(default_factory=dict)
    heard: dict[str, int] = field(default_factory=dict)

    def hear(self, uid: str, now: int) -> None:
        self.heard[uid] = now

    def pass_time(self, now: int) -> None:
        """Who was silent for the shortest lease may be given up."""
        in_use = {call.uid for call in self.calls if call.ended is None}
        for call in self.calls:
            silent = now - self.heard[call.uid] >= min(LEASE_SECONDS.values()) * SECOND
            call.over = call.over or (silent and call.uid not in in_use)

    def needed(self, call: Computed, now: int) -> bool:
        """Whether what the call computed may still be gone on with."""
        if call.ended is None:
            return True
        if call.first is None or call.over or self.one_offs[call.uid]:
            return False
        beside = [c for c in self.calls if c.uid == call.uid and c is not call and c.first is not None]
        doubts = [c.first for c in beside if c.first is not None and c.first >= call.first]
        if not doubts:
            return True
        since = min(doubts)
        gone_on = any(c.arrived >= since and c.first is not None for c in beside)
        return not gone_on and now - since < DOUBT_SECONDS * SECOND


class WatchedCache(FakeCache):
    """Says before it frees a chunk who holds it, and tells of what it freed."""

    def __init__(self, check: Callable[[bytes], None]) -> None:
        super().__init__()
        self._check = check
        self.num_freed = 0

    async def execute(
        self,
        directive: Directive,
        still_dead: Callable[[bytes], bool],
        token_ids: Callable[[], Sequence[int] | None],
    ) -> DirectiveResult:
        def watched(key: bytes) -> bool:
            dead = still_dead(key)
            if dead:
                self._check(key)
                self.num_freed += 1
            return dead

        return await super().execute(directive, watched, token_ids)


@dataclass
class Flying:
    request: CallRequest
    computed: Computed
    attempt: int


class World:
    """Agents, the liar, and what stands behind them."""

    def __init__(
        self, chance: random.Random, tracker: Tracker, clock: ManualClock, mailboxes: Mailboxes
    ) -> None:
        self.chance = chance
        self.tracker = tracker
        self.clock = clock
        self.mailboxes = mailboxes
        self.model = Model()
        self.cache = WatchedCache(self.check)
        ids = CountedIds()
        self.reclaimer = Reclaimer(tracker, self.cache, ids, lambda uid: Mode.ENFORCE, lambda namespace: "")
        limits = Limits(tracker, LimitsConfig())
        declarations = Declarations(
            tracker, mailboxes, ids, limits, lambda: 0, lambda: self.cache.capabilities, lambda: NAMESPACE
        )
        relatives = Relatives(tracker, declarations, mailboxes)
        modes = Modes(Config(mode=Mode.ENFORCE))
        self.recognition = CallRecognition(tracker, modes, LineageIndex(), HASHER, ids, limits, relatives)
        self.recognition.finder = Liar(self.lie)
        self.agents: list[list[str]] = []
        self.flying: list[Flying] = []
        self.pending: list[Reclaim | Demote] = []
        self.freed_while_alive = 0
        self.wrongs: list[str] = []

    @property
    def now(self) -> int:
        return self.clock.now_ns()

    # -- what must hold -----------------------------------------------------------------------------------

    def check(self, key: bytes) -> None:
        """Noted, and raised by whoever may: a driver's failure is but an outcome to the reclaimer."""
        for state in self.tracker.contexts.states.values():
            if any(key in split_keys(v.keys) for v in state.versions.values()):
                self.wrongs.append(f"{state.uid} holds what was freed")
        for call in self.model.calls:
            if key in call.prompt and self.model.needed(call, self.now):
                self.wrongs.append(f"{call} may be gone on with, at {self.now}")

    # -- lies ---------------------------------------------------------------------------------------------

    def lie(self) -> Identity | None:
        """Whatever comes to mind, of the contexts that were used last; at times nothing."""
        chance = self.chance
        states = sorted(self.tracker.contexts.states.values(), key=lambda s: (s.active_ns, s.uid))
        names = ["", *(state.key.context_id for state in states[-3:])]
        if chance.random() < 0.2:
            return None
        return Identity(
            rung=IdentityRung.INFERENCE,
            reason="a lie",
            context_id=chance.choice(names),
            parent=chance.choice(names),
            fork_at=chance.choice([None, chance.randrange(MAX_WORDS + 2)]),
            one_off=chance.random() < 0.15,
            relation=chance.choice(list(Relation)),
        )

    # -- what happens -------------------------------------------------------------------------------------

    async def turn(self) -> None:
        """A whole call, the usual thing."""
        await self.call()
        await self.end(self.flying[-1], completed=True)

    async def call(self) -> None:
        """An agent, new or known, sends its list: grown, cut, or as it was."""
        chance = self.chance
        if not self.agents or (len(self.agents) < 4 and chance.random() < 0.2):
            self.agents.append(["s0"])
        number = chance.randrange(len(self.agents))
        words = self.agents[number]
        keep = chance.choice([len(words)] * 6 + [1, 2])
        words = [*words[:keep], *chance.choices(WORDS, k=chance.randint(0, 2))]
        words = self.agents[number] = words[: chance.randint(2, 4)] if len(words) > MAX_WORDS else words
        asked = chat([{"role": ROLES[w[0]], "content": w} for w in words])
        request = self.recognition.request("t", NAMESPACE, asked, LifecycleFields(), "", NOTHING_SAID)
        state = await self.opened(request)
        await self.tracker.observe(
            state.uid,
            CallArrival(
                at_ns=self.now,
                call_id=request.call_id,
                head=b"head",
                messages=asked.facts,
                one_off=request.fields.one_off,
                closes=request.fields.close,
            ),
        )
        mapping = mapping_of(words)
        attempt = self.tracker.contexts.states[state.uid].attempts[request.call_id]
        seen = CallMapping(at_ns=self.now, call_id=request.call_id, attempt=attempt, mapping=mapping)
        await self.tracker.observe(state.uid, seen)
        self.model.hear(state.uid, self.now)
        keys = split_keys(mapping.chunk_keys)
        prompt = frozenset(keys[: mapping.message_ends[-1] // CHUNK])
        self.model.one_offs.setdefault(state.uid, request.fields.one_off)
        computed = Computed(state.uid, prompt, frozenset(keys), self.now)
        self.model.calls.append(computed)
        self.flying.append(Flying(request, computed, attempt))

    async def opened(self, request: CallRequest) -> Any:
        identity = request.identity
        known = self.tracker.contexts.find(ContextKey("t", identity.context_id), NAMESPACE)
        if known is not None:
            return known
        return await self.tracker.open(
            ContextOpened(
                at_ns=self.now,
                uid=request.uid,
                tenant="t",
                context_id=identity.context_id,
                namespace=NAMESPACE,
                rung=identity.rung,
                reason=identity.reason,
                parent=identity.parent,
                fork=identity.fork_at is not None,
                upto=identity.fork_at,
                one_off=request.fields.one_off,
            ),
            ContextKey("t", identity.parent) if identity.parent else None,
        )

    async def answer(self) -> None:
        """A call in flight shows its first token, ends, or breaks off."""
        if self.flying:
            flying = self.chance.choice(self.flying)
            how = self.chance.choice([self.first, self.end, self.end, self.fail])
            await how(flying)

    async def fail(self, flying: Flying) -> None:
        await self.end(flying, completed=False)

    async def end(self, flying: Flying, completed: bool = True) -> None:
        request, computed = flying.request, flying.computed
        if completed:
            await self.first(flying)
        facts = AnswerFacts(choices=(ChoiceFact(index=0, content=self.chance.choice(["a1", "a2"])),))
        self.recognition.answered(request, completed, facts)
        await self.tracker.observe(
            computed.uid,
            CallEnding(
                at_ns=self.now,
                call_id=request.call_id,
                attempt=flying.attempt,
                end=CallEnd.COMPLETED if completed else CallEnd.ABORTED,
            ),
        )
        computed.ended = self.now
        self.model.hear(computed.uid, self.now)
        self.flying.remove(flying)

    async def first(self, flying: Flying) -> None:
        """The prompt is computed, and the cache stores it."""
        if flying.computed.first is not None:
            return
        self.clock.advance(0.001)
        seen = FirstToken(at_ns=self.now, call_id=flying.request.call_id, attempt=flying.attempt)
        await self.tracker.observe(flying.computed.uid, seen)
        flying.computed.first = self.now
        run = b"".join(sorted(flying.computed.stored))
        self.cache.store(run)
        stored = ChunksConfirmed(
            at_ns=self.now, namespace=NAMESPACE, keys=run, tiers=(Tier.L1, Tier.L2), stored=True
        )
        await self.tracker.record(NAMESPACE, [stored])

    async def wait(self) -> None:
        """Time passes."""
        self.clock.advance(self.chance.choice(PAUSES))
        self.model.pass_time(self.now)
        await self.tracker.tick()

    async def plan(self) -> None:
        """The reclaimer plans, and its deletes reach the cache, at times only after something else."""
        for directive, _ in self.reclaimer._planned():
            await self.reclaimer.propose(directive)
            self.pending.append(directive)
        if self.chance.random() < 0.7:
            await self.deliver()

    async def deliver(self) -> None:
        for directive in self.pending:
            await self.reclaimer.execute(directive)
        self.pending.clear()
        assert not self.wrongs

    async def live(self) -> None:
        """One step after another, and then the end of everything."""
        steps = [self.turn] * 3 + [self.call] * 2 + [self.answer] * 3 + [self.wait] * 2
        for _ in range(NUM_STEPS):
            await self.chance.choice(steps)()
            await self.mailboxes.settled()
            self.clock.advance(0.001)
            await self.plan()
        self.freed_while_alive = self.cache.num_freed
        while self.flying:
            await self.answer()
        await self.mailboxes.settled()
        self.clock.advance(2 * max(LEASE_SECONDS.values()))
        self.model.pass_time(self.now)
        await self.tracker.tick()
        await self.plan()
        await self.deliver()
        assert not any(state.versions for state in self.tracker.contexts.states.values())
        assert not self.cache.chunks, "nobody holds anything any more"


async def lives(chance: random.Random) -> World:
    tracker, clock = await started()
    async with owned_tasks() as tasks:
        world = World(chance, tracker, clock, Mailboxes(tasks))
        await world.live()
    assert books(tracker.contexts) == books(await replayed(tracker._log))
    return world


@given(st.randoms(use_true_random=True))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_lie_frees_what_somebody_holds(chance: random.Random) -> None:
    asyncio.run(lives(chance))


def test_the_lies_do_cost_something() -> None:
    """Else nothing would be proven: chunks are freed while agents are still at work."""
    assert sum(asyncio.run(lives(random.Random(seed))).freed_while_alive for seed in range(5)) > 0
