"""Deadlines of many contexts are those of each, whatever became of it since the last look."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from lifecycle.core.leases import next_deadline_ns
from lifecycle.core.observations import PinSpan
from lifecycle.deadlines import LOOKS_PER_TURN, Deadlines
from tests.lifecycle.core.story import NOW, SECOND, Story

steps = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["call", "pin", "tick", "close", "forget"]),
        st.integers(0, 2400),
    ),
    max_size=12,
)


def step(stories: dict[str, Story], name: str, change: str, seconds: int) -> None:
    """One change to one context, the first one begins it."""
    if change == "forget":
        stories.pop(name, None)
        return
    story = stories.setdefault(name, Story())
    if change == "call":
        story.call("s0 u1")
    elif change == "pin" and story.state.branches:
        story.do(PinSpan, span=(0, 1), ttl=60.0)
    elif change == "tick":
        story.tick(seconds)
    elif change == "close":
        story.close()


@given(steps)
def test_they_are_those_of_each_context_after_every_change(taken: list[tuple[str, str, int]]) -> None:
    stories: dict[str, Story] = {}
    deadlines = Deadlines()
    for name, change, seconds in taken:
        step(stories, name, change, seconds)
        states = {each: story.state for each, story in stories.items()}
        now = NOW + seconds * SECOND
        wanted = [
            each
            for each, state in states.items()
            if (deadline := next_deadline_ns(state)) is not None and deadline <= now
        ]
        assert asyncio.run(deadlines.due(states, now)) == wanted


async def test_others_get_their_turn_while_many_contexts_are_looked_at() -> None:
    story = Story()
    story.call("s0 u1")
    states = {str(number): story.state for number in range(3 * LOOKS_PER_TURN)}
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    waiting = asyncio.ensure_future(other())
    deadlines = Deadlines()
    for least in (30, 3):  # all are new to it, then all are known
        turns = 0
        await deadlines.due(states, NOW)
        assert turns >= least
    waiting.cancel()
