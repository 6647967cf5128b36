"""A call's arrival: with its mapping, at a closed context."""

import pytest
from msgspec.structs import replace

from lifecycle.core.observations import CallMapping
from lifecycle.vocabulary import CallEnd
from tests.lifecycle.core.story import Story, mapping_of


def test_a_mapping_that_comes_with_the_call_is_what_one_behind_it_would_be() -> None:
    together, apart = Story(), Story()
    for story in (together, apart):
        story.call("s0 u1")
    mapping = CallMapping(
        at_ns=0, call_id="c2", attempt=0, mapping=mapping_of(["s0", "u1", "a1", "u2"]), bytes_per_token=7
    )
    together.arrive("s0 u1 a1 u2", "c2", mapping=mapping)
    apart.arrive("s0 u1 a1 u2", "c2")
    apart.see(replace(mapping, at_ns=apart.now, attempt=1))
    assert together.state == apart.state


def test_a_call_comes_though_its_mapping_cannot_be() -> None:
    story = Story()
    mapping = CallMapping(at_ns=0, call_id="c1", attempt=0, mapping=mapping_of(["s0"]))
    story.arrive("s0 u1", mapping=mapping)
    (flight,) = story.state.flights
    assert not flight.mapping_known


@pytest.mark.parametrize("end", [CallEnd.ABORTED, CallEnd.FAILED])
def test_a_call_that_computed_nothing_leaves_a_closed_context_closed(end: CallEnd) -> None:
    story = Story()
    story.call("s0 u1")
    story.close()
    story.arrive("s0 u1 a1 u2", "c2")
    story.arrive("s0 u1 a1 u2", "c3")
    story.end("c2", end=end)
    assert story.state.open  # the other one is under way
    story.end("c3", end=end)
    assert not story.state.open
    assert not story.live()


def test_a_call_that_computed_something_opens_a_closed_context() -> None:
    story = Story()
    story.call("s0 u1")
    story.close()
    story.arrive("s0 u1 a1 u2", "c2")
    story.map("c2")
    story.first("c2")
    story.abort("c2")
    assert story.state.open
    assert story.live()
