"""Brings the cache's holds in line with the pins that contexts have."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import structlog

from engine_bridge.chunk_keys import chunk_keys
from lifecycle.core.directives import Pin, Unpin
from lifecycle.core.events import RecordedEvent
from lifecycle.core.ids import KEY_BYTES, Namespace, context_stream
from lifecycle.core.plan import plan_pins
from lifecycle.core.state import ContextState
from lifecycle.errors import LogUnavailable
from lifecycle.ports import IdSource
from lifecycle.reclaimer import Reclaimer
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import Mode
from proxy.models import MappedModel

log = structlog.get_logger(__name__)

RETRY_SECONDS = 1.0
LOOK_AGAIN_SECONDS = 1.0
"""How often pins that were not sent are looked at: what stood against them ends without an event."""

SETTLE_SECONDS = 5.0


async def _nothing_to_keep() -> None:
    return None


class PinKeeper:
    """One loop: a context whose pins changed is compared with what was last asked of the cache for it.

    `holds_changed` is awaited after each directive.
    """

    def __init__(
        self,
        tracker: Tracker,
        reclaimer: Reclaimer,
        ids: IdSource,
        mode_of: Callable[[str], Mode],
        objection: Callable[[Namespace], str],
        models: Mapping[str, MappedModel],
        holds_changed: Callable[[], Awaitable[None]] = _nothing_to_keep,
    ) -> None:
        self._tracker = tracker
        self._reclaimer = reclaimer
        self._ids = ids
        self._mode_of = mode_of
        self._objection = objection
        self._models = models
        self._holds_changed = holds_changed
        self._asked: dict[str, ContextState] = {}
        self._not_sent: set[str] = set()
        self._changed: dict[str, None] = {}
        self._current = ""
        self._runs = False
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        tracker.listeners.append(self._heard)

    async def run(self) -> None:
        """Until cancelled. Begins with every pin there is: what an earlier run asked for is asked for again.

        A log that cannot take the proposal delays.
        """
        self._runs = True
        self._changed |= {uid: None for uid, s in self._tracker.contexts.states.items() if s.pins}
        try:
            await self._keep()
        finally:
            self._runs = False
            for forgotten in (self._asked, self._not_sent, self._changed):
                forgotten.clear()
            self._current = ""
            self._idle.set()

    async def _keep(self) -> None:
        while True:
            self._idle.clear()
            while self._changed:
                uid = next(iter(self._changed))
                self._current = uid
                try:
                    del self._changed[uid]
                    await self._bring_in_line(uid)
                except LogUnavailable as error:
                    log.warning("pins wait for the event log", error=str(error))
                    self._changed[uid] = None
                    await asyncio.sleep(RETRY_SECONDS)
                self._current = ""
                self._reclaimer.wake()
            self._wake.clear()
            self._idle.set()
            await self._news()

    async def _news(self) -> None:
        """Until a context's pins changed, or those that were not sent may be sent now."""
        while not self._changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_SECONDS if self._not_sent else None):
                    await self._wake.wait()
            self._changed |= {uid: None for uid in sorted(self._not_sent) if self._may_send(uid)}

    def _may_send(self, uid: str) -> bool:
        state = self._tracker.contexts.states.get(uid)
        return state is None or not self._suppression(uid, state.namespace)

    async def settled(self) -> None:
        """Until every change was told to the cache, as far as that takes no longer than `SETTLE_SECONDS`.

        At once where the loop does not run: then another proxy tells it.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                await self._idle.wait()

    def changing(self, uid: str) -> bool:
        """Whether what the cache holds for the context is not yet what its pins say."""
        return uid in self._changed or uid == self._current

    async def _bring_in_line(self, uid: str) -> None:
        state = self._tracker.contexts.states.get(uid)
        if state is None or (uid in self._not_sent and self._may_send(uid)):
            self._asked.pop(uid, None)
            self._not_sent.discard(uid)
        if state is None:
            return
        for directive in plan_pins(self._asked.get(uid), state, partial(self._ids.new, "d")):
            await self._reclaimer.propose(directive)
            suppressed = self._suppression(uid, state.namespace)
            if suppressed:
                self._not_sent.add(uid)
            await self._reclaimer.execute(directive, suppressed, partial(self._tokens, uid, state, directive))
            await self._holds_changed()
        if state.pins:
            self._asked[uid] = state
        else:
            self._asked.pop(uid, None)
            self._not_sent.discard(uid)

    def _suppression(self, uid: str, namespace: Namespace) -> str:
        objection = self._objection(namespace)
        if objection:
            return objection
        return "" if self._mode_of(uid) is Mode.ENFORCE else "observe mode"

    def _tokens(self, uid: str, state: ContextState, directive: Pin | Unpin) -> Sequence[int] | None:
        """Tokens of the pinned chain, if the context's last prompt still begins with it."""
        model = self._models.get(state.namespace.model)
        ids = model.service.token_ids(uid) if model is not None and model.service is not None else None
        if ids is None or not state.chunk_size:
            return None
        held = array("I", ids[: len(directive.keys) // KEY_BYTES * state.chunk_size])
        return held if chunk_keys(held, state.chunk_size) == directive.keys else None

    def _heard(self, batch: Sequence[RecordedEvent]) -> None:
        if not self._runs:
            return  # it begins with every pin there is
        prefix = context_stream("")
        for recorded in batch:
            if not recorded.stream.startswith(prefix):
                continue
            uid = recorded.stream.removeprefix(prefix)
            state = self._tracker.contexts.states.get(uid)
            if uid in self._asked or (state is not None and state.pins):
                self._changed[uid] = None
                self._idle.clear()
                self._wake.set()
