"""The lifecycle side of a call: from its arrival at the proxy to what the cache showed of it afterwards.

Nothing here stands between client and engine except the plan of a one-off, for at most the plan's wait.
Whatever fails here makes the call untracked, which stops reclaim around it; the call itself goes on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import structlog

from engine_bridge.errors import BridgeError
from engine_bridge.mapping.ranges import MappedPrompt
from engine_bridge.verifier import Verifier
from lifecycle.core.directives import DirectiveResult
from lifecycle.core.events import CallArrived, CallMapped
from lifecycle.core.ids import ContextKey, Namespace
from lifecycle.core.observations import (
    CallArrival,
    CallEnding,
    CallMapping,
    CloseRequested,
    ContextOpened,
    FirstToken,
)
from lifecycle.core.pins import PinRoom
from lifecycle.core.plan import plan_admission
from lifecycle.core.state import ContextState
from lifecycle.errors import LifecycleError, LogUnavailable
from lifecycle.openings import open_for_call
from lifecycle.ports import IdSource
from lifecycle.reclaimer import Reclaimer
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import CallEnd, DirectiveOutcome, Mode, WaitKind
from proxy.affinity import Placed
from proxy.answer_facts import AnswerFacts, Usage
from proxy.call_recognition import CallRecognition
from proxy.declarations import Declarations
from proxy.followed_call import MessageHasher
from proxy.identity import LineageIndex
from proxy.limits import Limits
from proxy.mailbox import Mailboxes
from proxy.models import MappedModel
from proxy.modes import Modes
from proxy.prefix_lint import PrefixLint
from proxy.prompt_mapper import PromptMapper
from proxy.relatives import Relatives
from proxy.shared_lineage import SharedLineage
from proxy.tasks import Tasks
from proxy.tracked_call import CallRequest, TrackedCall, Unmapped, can_be_labelled, computed_call
from proxy.untracked import UntrackedNotes

log = structlog.get_logger(__name__)

TOOL_FINISH = "tool_calls"

ARRIVAL_LAG_SECONDS = 0.001
"""How long the books of a call wait for its body to leave first: they share one processor with it."""


class Tracking:
    """Follows calls. Built inside the lifespan: its work runs in `tasks`."""

    def __init__(
        self,
        tracker: Tracker,
        reclaimer: Reclaimer,
        verifier: Verifier,
        declarations: Declarations,
        mailboxes: Mailboxes,
        models: Mapping[str, MappedModel],
        modes: Modes,
        lineage: LineageIndex,
        hasher: MessageHasher,
        ids: IdSource,
        tasks: Tasks,
        limits: Limits,
        place: Callable[[CallRequest, Placed | None], Placed],
        plan_wait_seconds: float,
    ) -> None:
        self.tracker = tracker
        self.declarations = declarations
        relatives = Relatives(tracker, declarations, mailboxes)
        self.calls = CallRecognition(tracker, modes, lineage, hasher, ids, limits, relatives)
        self.lineage = SharedLineage(tracker, lineage)
        self._reclaimer = reclaimer
        self._verifier = verifier
        self._models = models
        self._mapper = PromptMapper(models, PrefixLint(tracker))
        self.untracked = UntrackedNotes(tracker, models, tasks)
        self._ids = ids
        self._tasks = tasks
        self._limits = limits
        self._place = place
        self._plan_wait_seconds = plan_wait_seconds
        self._mailboxes = mailboxes

    def namespace(self, model: str, salt: str) -> Namespace:
        """The KV identity that a model's calls share under a salt."""
        known = self._models.get(model)
        fingerprint = known.fingerprint if known else ""
        return Namespace(model, salt, fingerprint or self.tracker.contexts.fingerprint_of(model))

    def served(self, model: str) -> str:
        """The model that a call means: if it names none, the only one there is."""
        return model or (next(iter(self._models)) if len(self._models) == 1 else "")

    @contextmanager
    def expecting(self, namespace: Namespace) -> Iterator[None]:
        """A call's body leaves before anybody knows whose it is: while the block runs nothing is freed that
        it may need."""
        unknown = object()
        self.tracker.arriving[unknown] = (namespace, self.tracker.clock.now_ns())
        try:
            yield
        finally:
            del self.tracker.arriving[unknown]

    async def begin(
        self, request: CallRequest, beside: Placed | None = None, *, has_left: bool = False
    ) -> TrackedCall:
        """Take a call in; answers when its body may leave, unless it `has_left` already.

        That is at once, unless (in enforce) its plan may add a hint, or it names an operation sent before
        it: then when that is recorded, and no later than the plan's wait. `beside`: see `Placing.place`.
        """
        call = TrackedCall(request, self._first_token, self._end)
        call.placed = self._place(request, beside)
        enforces = request.mode is Mode.ENFORCE and not has_left
        call.asks_ids = enforces and self._mapper.asks_engine(request.asked)
        if enforces and self._reclaimer.capabilities.level and can_be_labelled(request.asked):
            call.session_id = self._ids.new("s")
        if enforces and request.awaits_plan:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._plan_wait_seconds):
                    await self.declarations.taken_in_before(request)
                    self._post_arrival(call)
                    await call.planned.wait()
        if not call.posted:
            self._expect(call)
            asyncio.get_running_loop().call_later(ARRIVAL_LAG_SECONDS, self._post_arrival, call)
        call.sent = True
        return call

    # -- jobs of one context, in order --------------------------------------------------------------------

    async def _arrive(self, call: TrackedCall) -> None:
        request, fields = call.request, call.request.fields
        try:
            state = await self._context(request)
            call.uid = state.uid
            if fields.ops:
                await self.declarations.apply(request.tenant, fields.source, fields.ops, state.uid)
            call.mapping = call.mapping or self._tasks.run(self._map(call, state.uid))
            if state.uid != request.uid:  # a call that came while the context was being opened
                call.mapping.add_done_callback(lambda _: self._mapper.forget(request))
            at_once = None
            if call.mapping.done() and not fields.pins:  # one append instead of two
                async with self.declarations.pin_room(request.tenant, sets_pins=False) as room:
                    at_once = self._mapping(call, call.mapping.result(), room)
            recorded = await self.tracker.observe(
                state.uid,
                CallArrival(
                    at_ns=self.tracker.clock.now_ns(),
                    call_id=request.call_id,
                    head=request.asked.head,
                    messages=request.asked.facts,
                    streamed=request.asked.stream,
                    num_choices=request.asked.num_choices,
                    closes=fields.close,
                    one_off=fields.one_off,
                    pins=fields.pins,
                    wait=fields.waiting,
                    tool=fields.tool,
                    eta=fields.eta,
                    source=fields.source,
                    seq=fields.seq,
                    arm=request.arm,
                    harness=request.harness,
                    backend=call.placed.backend,
                    placed=call.placed.reason,
                    normalised=request.asked.normalised,
                    mapping=at_once,
                    rung=request.identity.rung,
                    reason=request.identity.reason,
                ),
            )
            # An arrival that waits for the log will be given the next number when it is recorded.
            following = state.attempts.get(request.call_id, 0) + 1
            told = (r.event.attempt for r in recorded if isinstance(r.event, CallArrived))
            call.attempt = next(told, following)
            call.mapping_recorded = at_once is not None and (
                not recorded or any(isinstance(r.event, CallMapped) for r in recorded)
            )
            await self._admit(call, self.tracker.contexts.states[state.uid])
        finally:
            self.tracker.arriving.pop(call, None)
            self._limits.opened(request.tenant, request.uid)
            call.planned.set()

    async def _context(self, request: CallRequest) -> ContextState:
        identity = request.identity
        key = ContextKey(request.tenant, identity.context_id)
        known = self.tracker.contexts.find(key, request.namespace)
        if known is not None:
            return known
        parent = ContextKey(request.tenant, identity.parent) if identity.parent else None
        state = await open_for_call(
            self.tracker,
            ContextOpened(
                at_ns=self.tracker.clock.now_ns(),
                uid=request.uid,
                tenant=request.tenant,
                context_id=identity.context_id,
                namespace=request.namespace,
                rung=identity.rung,
                reason=identity.reason,
                parent=identity.parent,
                fork=identity.fork_at is not None,
                upto=identity.fork_at,
                one_off=request.fields.one_off,
                agent=request.fields.agent,
                flow=request.fields.flow,
            ),
            parent,
        )
        for old in self.tracker.contexts.superseded(key, request.namespace):
            reason = "its tokens are mapped otherwise now"
            await self.tracker.observe(
                old.uid, CloseRequested(at_ns=self.tracker.clock.now_ns(), reason=reason)
            )
        if state.parent_uid:
            self._mapper.inherit(request.namespace.model, state.parent_uid, state.uid)
        return state

    async def _admit(self, call: TrackedCall, state: ContextState) -> None:
        """Keep a one-off out of the store: the hint rides if the plan is recorded before the body leaves."""
        index = self.tracker.contexts.index
        directive = plan_admission(
            state,
            call.request.call_id,
            lambda keys: index.verified_chunks(state.namespace, keys),
            self._ids.new("d"),
        )
        if directive is None:
            return
        try:
            await self._reclaimer.propose(directive)
        except LogUnavailable:
            return  # no hint without its record
        suppressed = self._suppression(call)
        if suppressed:
            self._tasks.spawn(self._reclaimer.execute(directive, suppressed))
        elif call.sent:
            result = DirectiveResult(
                outcome=DirectiveOutcome.EXPIRED, reason="planned after the call had left"
            )
            self._tasks.spawn(self._reclaimer.settle(directive, result))
        else:
            call.bypass_from_token = directive.bypass_from_token
            self._tasks.spawn(self._reclaimer.execute(directive))

    def _suppression(self, call: TrackedCall) -> str:
        if call.request.mode is not Mode.ENFORCE:
            return f"{call.request.mode} mode"
        return "" if "admit" in self._reclaimer.capabilities.supported else "the cache does not take the hint"

    async def _map(self, call: TrackedCall, uid: str) -> MappedPrompt | Unmapped:
        """The prompt in tokens. Recorded behind whatever the context does meanwhile."""
        result = await self._mapper.map(call, uid)
        if not isinstance(result, Unmapped):
            call.mapping_kind = self._mapper.kind(call.request.namespace.model)
            if self._reclaimer.capabilities.level:
                self._tasks.spawn(self._look_before(call, result))
        self._post(call, lambda: self._record_mapping(call, result))
        return result

    async def _look_before(self, call: TrackedCall, mapped: MappedPrompt) -> None:
        """What the cache has not got now, and has after the call, was stored while the call was under way."""
        call.before = await self._verifier.before(call.request.namespace, mapped.chunk_keys)

    async def _record_mapping(self, call: TrackedCall, result: MappedPrompt | Unmapped) -> None:
        if call.mapping_recorded or not call.uid:
            return
        call.mapping_recorded = True
        request = call.request
        async with self.declarations.pin_room(request.tenant, bool(request.fields.pins)) as room:
            await self.tracker.observe(call.uid, self._mapping(call, result, room))

    def _mapping(self, call: TrackedCall, result: MappedPrompt | Unmapped, room: PinRoom) -> CallMapping:
        return CallMapping(
            at_ns=self.tracker.clock.now_ns(),
            call_id=call.request.call_id,
            attempt=call.attempt,
            mapping=self._mapper.observed(call, result),
            bytes_per_token=room.bytes_per_token,
            budget_left_bytes=room.bytes_left,
            pins_left=room.pins_left,
        )

    def _first_token(self, call: TrackedCall) -> None:
        self._post_arrival(call)

        async def record() -> None:
            if call.uid:
                await self.tracker.observe(
                    call.uid,
                    FirstToken(
                        at_ns=self.tracker.clock.now_ns(),
                        call_id=call.request.call_id,
                        attempt=call.attempt,
                        max_branches=self._limits.of(call.request.tenant).branches,
                    ),
                )

        self._post(call, record)

    def _end(self, call: TrackedCall, end: CallEnd, facts: AnswerFacts, reason: str) -> None:
        request = call.request
        self._post_arrival(call)
        if not call.answered.done():
            call.answered.set_result(facts)
        call.answers = self.calls.answered(request, end is CallEnd.COMPLETED, facts)
        self._post(call, lambda: self._record_end(call, end, facts, reason))

    async def _record_end(self, call: TrackedCall, end: CallEnd, facts: AnswerFacts, reason: str) -> None:
        """The end stands behind the mapping: what a call leaves behind is known only in tokens."""
        if not call.uid or call.mapping is None:
            return
        result = await call.mapping
        await self._record_mapping(call, result)
        called = [c for choice in facts.choices for c in choice.tool_calls]
        finish = next((c.finish_reason for c in facts.choices if c.finish_reason), "")
        waits = bool(called) or finish == TOOL_FINISH
        usage = facts.usage
        await self.tracker.observe(
            call.uid,
            CallEnding(
                at_ns=self.tracker.clock.now_ns(),
                call_id=call.request.call_id,
                attempt=call.attempt,
                end=end,
                wait=WaitKind.TOOL if waits else WaitKind.UNKNOWN,
                tool=called[0].name if called else "",
                finish_reason=finish,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=-1 if usage.cached_tokens is None else usage.cached_tokens,
                output_tokens=usage.completion_tokens,
                detail=reason,
                max_branches=self._limits.of(call.request.tenant).branches,
                answers=call.answers,
                backend=call.backend if call.backend != call.placed.backend else "",
            ),
        )
        if isinstance(result, MappedPrompt) and self._reclaimer.capabilities.level:
            self._tasks.spawn(self._verify(call, result, end, usage))

    async def _verify(self, call: TrackedCall, mapped: MappedPrompt, end: CallEnd, usage: Usage) -> None:
        try:
            await self._verifier.verify(computed_call(call, mapped, end, usage))
        except (LifecycleError, BridgeError) as error:
            log.warning("verification failed", call=call.request.call_id, error=str(error))

    # -- failures -----------------------------------------------------------------------------------------

    def _post_arrival(self, call: TrackedCall) -> None:
        """Behind what happened to the parent: a fork takes over the list of its last answered call."""
        if call.posted:
            return
        self._expect(call)
        call.posted, parent, uid = True, call.request.identity.parent, call.request.uid
        # Only a fork's mapping waits, too: what the cache lacks must be asked before the engine stores it.
        maps = not parent or uid in self.tracker.contexts.states
        if maps and not call.request.awaits_plan:  # first: a short one is recorded with the arrival
            call.mapping = self._tasks.run(self._map(call, uid))
        self._post(call, lambda: self._arrive(call), behind=parent)
        if maps and call.mapping is None:
            call.mapping = self._tasks.run(self._map(call, uid))

    def _expect(self, call: TrackedCall) -> None:
        """Until its arrival is recorded nothing is freed that the call may need."""
        since = (call.request.namespace, self.tracker.clock.now_ns())
        self.tracker.arriving.setdefault(call, since)

    def _post(self, call: TrackedCall, job: Callable[[], Awaitable[None]], behind: str = "") -> None:
        """A call that cannot be followed counts as untracked: its chunks may be alive or dead."""
        request = call.request

        async def guarded() -> None:
            try:
                await job()
            except Exception as error:
                log.exception("a call is not tracked", call=request.call_id)
                self.untracked.note(request.namespace, f"tracking failed: {type(error).__name__}")

        key = (request.tenant, request.identity.context_id)
        self._mailboxes.post(key, guarded, behind=(request.tenant, behind) if behind else None)
