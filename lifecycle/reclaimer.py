"""Carries the plan out: per KV namespace propose, append, execute, and record what became of it.

Driven by state, not by edges: whatever is dead and not asked for yet is found again after any restart.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from lifecycle.core.directives import (
    OWNERS_ALONE,
    Admit,
    Demote,
    Directive,
    DirectiveResult,
    Pin,
    Reclaim,
    Unpin,
)
from lifecycle.core.events import DirectiveProposed, DirectiveSettled, RecordedEvent
from lifecycle.core.ids import Namespace
from lifecycle.core.plan import oldest, others_may_use, plan_reclaim, waited_for_unknown
from lifecycle.errors import LogUnavailable
from lifecycle.ports import CacheCapabilities, CacheControl, IdSource
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import DirectiveOutcome, Mode

log = structlog.get_logger(__name__)

SWEEP_SECONDS = 1.0
"""How often a namespace is looked at even if nothing was heard: retries become due with time alone."""

REST_PER_PLAN = 9.0
"""Rest after each plan, as a multiple of the time it took."""

SHORTEST_REST_SECONDS = 0.02
"""Rest after each plan all the same: every event asks for a plan, and the dead can wait for the next ones."""

LOOK_SECONDS = 0.01
NUM_LOOKS = 100
"""A second: mapping a prompt takes less."""

NUM_ATTEMPTS = 5
"""How often a delete is asked for because calls came in the middle of it."""

OBSERVED = "observe mode"
"""Why a directive of a context that is not enforced was not sent."""


def _no_tokens() -> Sequence[int] | None:
    return None


class Reclaimer:
    """One loop over the KV namespaces of one cache.

    `mode_of(uid)` is the mode of the context that held a dead chunk last. `objection(namespace)` says why
    the cache must not be touched now, whatever the mode (a failed self-test, say); empty if it may.
    `holds_change(uid)` says that the cache is being told to let go of what the context pinned: until then it
    would refuse to free that. `plans()` says that this process may plan now, `shares()` that others use the
    same log, whose calls ask for hints of their own.
    """

    def __init__(
        self,
        tracker: Tracker,
        cache: CacheControl,
        ids: IdSource,
        mode_of: Callable[[str], Mode],
        objection: Callable[[Namespace], str],
        holds_change: Callable[[str], bool] = lambda uid: False,
        plans: Callable[[], bool] = lambda: True,
        shares: Callable[[], bool] = lambda: False,
    ) -> None:
        self._tracker = tracker
        self._cache = cache
        self._ids = ids
        self._mode_of = mode_of
        self._objection = objection
        self._holds_change = holds_change
        self._plans = plans
        self._shares = shares
        self._wake = asyncio.Event()
        self._news = asyncio.Event()
        self._began = False
        tracker.listeners.append(self._heard)

    async def run(self) -> None:
        """Until cancelled. A failing log or cache delays; it never ends the loop.

        Directives of an earlier run or of another owner that have no outcome are closed first: what they
        asked for is still wanted, and is asked for again.
        """
        try:
            await self._run()
        except asyncio.CancelledError:
            self._began = False  # whoever runs next finds what others left meanwhile
            raise

    async def _run(self) -> None:
        left_over = self._left_over()
        self._began = True
        async with asyncio.TaskGroup() as tasks:
            for directive in left_over:
                await self.settle(
                    directive,
                    DirectiveResult(outcome=DirectiveOutcome.EXPIRED, reason="whoever asked for it ended"),
                )
            clock = asyncio.get_running_loop().time
            while True:
                began = clock()
                planned = self._planned()
                took = clock() - began
                try:
                    for directive, suppressed in planned:
                        await self.propose(directive)
                        tasks.create_task(self.execute(directive, suppressed))
                except LogUnavailable as error:
                    log.warning("reclaim waits for the event log", error=str(error))
                try:
                    async with asyncio.timeout(SWEEP_SECONDS):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                # Many dead that cannot be freed now make a plan long; calls must not wait behind plans.
                await asyncio.sleep(max(took * REST_PER_PLAN, SHORTEST_REST_SECONDS))
                self._wake.clear()

    def _left_over(self) -> Sequence[Directive]:
        """What has no outcome and nobody who would tell one. Other kinds than reclaim end only with us."""
        contexts = self._tracker.contexts
        found: dict[str, Directive] = {d.directive_id: d for d in contexts.index.open_directives()}
        if not self._began:
            open_ones = {i: r.directive for i, r in contexts.directives.items() if r.result is None}
            kinds = OWNERS_ALONE if self._shares() else (*OWNERS_ALONE, Admit)
            found |= {i: d for i, d in open_ones.items() if isinstance(d, kinds)}
        return list(found.values())

    def _planned(self) -> list[tuple[Reclaim | Demote, str]]:
        """One directive per namespace and mode, with why it is suppressed; the next pass plans the rest."""
        if self._tracker.degraded or not self._plans():
            return []
        contexts = self._tracker.contexts
        planned: list[tuple[Reclaim | Demote, str]] = []
        for namespace in contexts.index.namespaces():
            objection = self._objection(namespace)
            for enforced in (True, False):
                directive = plan_reclaim(
                    contexts.index,
                    namespace,
                    self._tracker.clock.now_ns(),
                    contexts.position,
                    self._ids.new("d"),
                    partial(self._belongs, not objection, enforced),
                    self._tracker.oldest_arriving_ns(namespace),
                )
                if directive is not None:
                    planned.append((directive, "" if enforced else objection or OBSERVED))
        return planned

    @property
    def capabilities(self) -> CacheCapabilities:
        """What the cache can be asked for."""
        return self._cache.capabilities

    def _belongs(self, may_touch: bool, enforced: bool, owner: str) -> bool:
        """Whether a chunk's last owner puts it into the pass that is enforced, or into the other one."""
        if self._holds_change(owner):
            return False
        return (may_touch and self._mode_of(owner) is Mode.ENFORCE) is enforced

    def objection_to(self, namespace: Namespace, owner: str) -> str:
        """Why what context `owner` held last must not be freed now; empty if it may be."""
        contexts = self._tracker.contexts
        if self._mode_of(owner) is not Mode.ENFORCE:
            return OBSERVED
        return (
            self._tracker.degraded
            or self._objection(namespace)
            or others_may_use(contexts.index, namespace, self._tracker.clock.now_ns())
        )

    async def propose(self, directive: Directive) -> None:
        """Record the proposal. Raises `LogUnavailable`: then it must not be sent."""
        event = DirectiveProposed(
            at_ns=self._tracker.clock.now_ns(),
            directive=directive,
            as_of=self._tracker.contexts.position,
        )
        await self._tracker.record(directive.namespace, [event])

    async def execute(
        self,
        directive: Directive,
        suppressed: str = "",
        token_ids: Callable[[], Sequence[int] | None] = _no_tokens,
    ) -> DirectiveResult:
        """Send a proposed directive, unless it is `suppressed` for that reason, and record the outcome."""
        if suppressed:
            result = DirectiveResult(outcome=DirectiveOutcome.SUPPRESSED, reason=suppressed)
        elif isinstance(directive, Admit):
            result = DirectiveResult(outcome=DirectiveOutcome.ACCEPTED, reason="rides on the call")
        else:
            result = await self._send(directive, token_ids)
        await self.settle(directive, result)
        return result

    async def _send(
        self, directive: Reclaim | Demote | Pin | Unpin, token_ids: Callable[[], Sequence[int] | None]
    ) -> DirectiveResult:
        capabilities = self._cache.capabilities
        kind = type(directive).__name__.lower()
        if kind not in capabilities.supported:
            reason = capabilities.unsupported.get(kind, f"{capabilities.driver} cannot {kind}")
            return DirectiveResult(outcome=DirectiveOutcome.UNSUPPORTED, reason=reason)
        try:
            for attempts_left in reversed(range(NUM_ATTEMPTS)):
                if isinstance(directive, Reclaim | Demote):  # a pin takes nothing from any call
                    await self._calls_are_known(directive.namespace)
                may, held_back = self._may_still(directive, is_last=not attempts_left)
                result = await self._cache.execute(directive, may, token_ids)
                if not held_back():
                    break
            return result
        except Exception as error:
            log.exception("a directive failed", directive=directive.directive_id)
            return DirectiveResult(outcome=DirectiveOutcome.FAILED, reason=f"{type(error).__name__}: {error}")

    async def _calls_are_known(self, namespace: Namespace) -> None:
        """Until it is known what each call under way refers to, but no longer than a second."""
        for _ in range(NUM_LOOKS):
            known = self._tracker.contexts.index.oldest_unknown_ns(namespace) is None
            if known and self._tracker.oldest_arriving_ns(namespace) is None:
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _may_still(
        self, directive: Directive, is_last: bool
    ) -> tuple[Callable[[bytes], bool], Callable[[], bool]]:
        """The question before each delete: is what the plan rested on true at this moment?

        With it comes another one: was something held back for a call of which too little is known yet?

        A delete takes seconds. Meanwhile a call may refer to a chunk again or have come of which nobody knows
        yet what it refers to, the log may fail (then nobody knows either), the cache may have become one not
        to touch, or somebody we cannot see may use it: that forbids a reclaim, and the next plan demotes.

        Under load there is always a call of which too little is known. The last attempt asks no more than the
        plan did: what died before the oldest of them came, and has waited long enough, goes all the same.
        """
        contexts = self._tracker.contexts
        namespace = directive.namespace
        began_ns = self._tracker.clock.now_ns()
        looked_at = -1
        doubted = held_back = False

        def may(key: bytes) -> bool:
            nonlocal looked_at, doubted, held_back
            if (
                contexts.index.references(namespace, key)
                or self._tracker.degraded
                or self._objection(namespace)
            ):
                return False
            unknown_ns = contexts.index.oldest_unknown_ns(namespace)
            arriving_ns = self._tracker.oldest_arriving_ns(namespace)
            if is_last:
                dead_ns, now_ns = contexts.index.dead_ns(namespace, key), self._tracker.clock.now_ns()
                must_wait = not waited_for_unknown(dead_ns, oldest(unknown_ns, arriving_ns), now_ns)
            else:
                must_wait = arriving_ns is not None or (unknown_ns is not None and unknown_ns >= began_ns)
            if must_wait:
                held_back = True
                return False
            if isinstance(directive, Demote):
                return True
            if looked_at != contexts.position:  # doubt begins with an event, and many keys are asked about
                looked_at = contexts.position
                now_ns = self._tracker.clock.now_ns()
                doubted = bool(others_may_use(contexts.index, namespace, now_ns))
            return not doubted

        return may, lambda: held_back

    async def settle(self, directive: Directive, result: DirectiveResult) -> None:
        """Record an outcome; waits for the log as long as it takes."""
        event = DirectiveSettled(
            at_ns=self._tracker.clock.now_ns(),
            directive_id=directive.directive_id,
            namespace=directive.namespace,
            result=result,
        )
        while True:
            try:
                await self._tracker.record(directive.namespace, [event])
            except LogUnavailable as error:
                log.warning("an outcome waits for the event log", error=str(error))
                await asyncio.sleep(SWEEP_SECONDS)
            else:
                return

    async def settled(self) -> None:
        """Until the cache has answered everything that it was asked to free."""
        while self._tracker.contexts.index.open_directives():
            self._news.clear()
            await self._news.wait()

    def wake(self) -> None:
        """Plan now."""
        self._wake.set()

    def _heard(self, batch: Sequence[RecordedEvent]) -> None:
        self._news.set()
        self.wake()
