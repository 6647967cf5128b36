"""Which contexts time alone may change, found without asking each of them anew."""

import asyncio
from collections.abc import Mapping

from lifecycle.core.leases import next_deadline_ns
from lifecycle.core.state import ContextState

LOOKS_PER_TURN = 2_000
"""Contexts that are looked at before calls get their turn: less than a millisecond."""

LOOKS_PER_CHANGE = 10
"""What a context that changed costs, as so many that did not."""

NEVER_NS = 2**63


class Deadlines:
    """A state is never changed, only replaced: as long as a context has the same one, its deadline stands."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[ContextState, int]] = {}

    async def due(self, states: Mapping[str, ContextState], now_ns: int) -> list[str]:
        """The contexts whose next deadline, in nanoseconds since the epoch, is not after `now_ns`."""
        before, self._known = self._known, {}
        due = []
        looks = 0
        for uid, state in list(states.items()):
            looks += 1
            known = before.get(uid)
            if known is None or known[0] is not state:
                deadline = next_deadline_ns(state)
                known = state, NEVER_NS if deadline is None else deadline
                looks += LOOKS_PER_CHANGE
            self._known[uid] = known
            if known[1] <= now_ns:
                due.append(uid)
            if looks >= LOOKS_PER_TURN:
                looks = 0
                await asyncio.sleep(0)
        return due
