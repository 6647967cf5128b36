"""Calls that were cut off: their process ended in the middle of them, or their client hung up."""

import asyncio
from collections.abc import Collection
from itertools import dropwhile

from lifecycle.core.ids import Namespace, split_keys
from lifecycle.core.observations import CallEnding
from lifecycle.core.state import Flight, chain, holder_tips
from lifecycle.projections.contexts import Contexts
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import CallEnd

CALLS_AT_ONCE = 64
"""How many calls are ended side by side: each waits for the log."""

CUT_OFF_NS = 30 * 10**9
"""How long before the end of a process calls may have ended whose chunks were not proven yet."""


def callers(contexts: Contexts) -> frozenset[str]:
    """Names of the processes that have calls in flight, by the books."""
    return frozenset(flight.proxy for state in contexts.states.values() for flight in state.flights)


async def end_orphans(tracker: Tracker, gone: Collection[str]) -> None:
    """End the calls that were under way when the processes `gone` ended: nobody else will.

    A call in flight holds what it computes with, and one whose tokens are not known yet holds reclaim back.
    """
    for cut_off in _cut_off(tracker.contexts):
        tracker.cut_off.setdefault(cut_off, tracker.clock.now_ns())
    states = tracker.contexts.states.items()
    left = [(uid, flight) for uid, state in states for flight in state.flights if flight.proxy in gone]
    for start in range(0, len(left), CALLS_AT_ONCE):
        now_ns = tracker.clock.now_ns()
        group = left[start : start + CALLS_AT_ONCE]
        await asyncio.gather(*(tracker.observe(uid, _aborted(flight, now_ns)) for uid, flight in group))


def _aborted(flight: Flight, at_ns: int) -> CallEnding:
    return CallEnding(
        at_ns=at_ns,
        call_id=flight.call_id,
        attempt=flight.attempt,
        end=CallEnd.ABORTED,
        detail="the proxy ended",
    )


def _cut_off(contexts: Contexts) -> list[tuple[Namespace, bytes]]:
    """Of calls in flight, and of contexts used shortly before the end."""
    states = contexts.states.values()
    since_ns = max((s.active_ns for s in states), default=0) - CUT_OFF_NS
    found = []
    for state in states:
        if not state.flights and state.active_ns < since_ns:
            continue
        for tip in dict.fromkeys(holder_tips(state)):
            run = unproven_behind_ours(contexts, state.namespace, chain(state.versions, tip))
            if run:
                found.append((state.namespace, run))
    return found


def unproven_behind_ours(contexts: Contexts, namespace: Namespace, keys: bytes) -> bytes:
    """Of a chain of keys those that nobody proved ours, from behind the first one that is ours."""
    run = split_keys(keys)
    unproven = set(contexts.index.unproven(namespace, keys))
    return b"".join(key for key in dropwhile(unproven.__contains__, run) if key in unproven)
