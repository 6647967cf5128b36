"""A decision under construction."""

from lifecycle.core.decision import Decision
from lifecycle.core.events import ListGrown
from tests.lifecycle.core.story import Story


def test_each_event_is_decided_on_what_the_one_before_made_true() -> None:
    story = Story()
    decision = Decision(story.state, story.now + 5)
    decision.emit(ListGrown(at_ns=decision.at_ns, num_new=2))
    decision.emit(ListGrown(at_ns=decision.at_ns, num_new=3))
    assert decision.state.declared_length == 5
    assert len(decision.events) == 2
    assert story.state.declared_length is None


def test_its_time_is_never_before_the_last() -> None:
    story = Story()
    assert Decision(story.state, 0).at_ns == story.state.last_ns
    assert Decision(story.state, story.now + 7).at_ns == story.now + 7
