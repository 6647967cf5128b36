"""How contexts begin and end: fork, spawn, one-off, close; and what time and repetition may not do."""

import pytest

from lifecycle.core.decide import decide, open_context
from lifecycle.core.events import ContextCreated
from lifecycle.core.evolve import evolve
from lifecycle.core.observations import ContextOpened, PinSpan, Tick
from lifecycle.vocabulary import CallEnd, IdentityRung, VersionState
from tests.lifecycle.core.story import NAMESPACE, Story

SUSPENDED = VersionState.SUSPENDED


def parent() -> Story:
    story = Story()
    story.arrive("s0 u1 a1")
    story.map()
    story.first()
    story.generate("a2")
    story.end()
    return story


# -- fork -------------------------------------------------------------------------------------------------


def test_a_fork_inherits_the_list_and_its_generation() -> None:
    child = Story(parent=parent(), fork=True)
    assert child.live() == {"s0": SUSPENDED, "s0 u1": SUSPENDED, "s0 u1 a1": SUSPENDED}
    assert child.keys_live() == parent().keys_live()
    (created,) = child.events
    assert isinstance(created, ContextCreated)
    assert (created.parent_uid, created.forked, created.fork_at) == ("ctx", True, 3)


@pytest.mark.parametrize(
    ("upto", "left"), [(0, set()), (1, {"s0"}), (2, {"s0 u1"}), (3, {"s0 u1 a1"}), (9, {"s0 u1 a1"})]
)
def test_a_fork_inherits_up_to_a_message(upto: int, left: set[str]) -> None:
    child = Story(parent=parent(), fork=True, upto=upto)
    assert child.lists_live() == left
    answer = parent().answer_keys("s0 u1 a1", "a2")
    assert (answer <= child.keys_live()) == (upto == 9)


def test_a_forked_list_goes_on_in_the_child_and_the_parent_alike() -> None:
    mother = parent()
    child = Story(parent=mother, fork=True)
    child.call("s0 u1 a1 a2 u5")
    assert child.lists_live() == {"s0 u1 a1 a2 u5"}
    assert len(child.state.branches) == 1
    assert mother.chain("s0 u1 a1") <= child.keys_live()
    mother.close()
    assert mother.state.versions == {}
    assert child.chain("s0 u1 a1") <= child.keys_live()


def test_a_fork_during_the_parents_call_takes_the_last_closed_list() -> None:
    mother = parent()
    mother.arrive("s0 u1 a1 u2", "c2")
    mother.map("c2")
    assert Story(parent=mother, fork=True).lists_live() == {"s0 u1 a1"}
    mother.first("c2")
    assert Story(parent=mother, fork=True).lists_live() == {"s0 u1 a1"}
    mother.end("c2")
    assert Story(parent=mother, fork=True).lists_live() == {"s0 u1 a1 u2"}


def test_a_fork_during_the_parents_first_call_inherits_nothing() -> None:
    mother = Story()
    mother.arrive("s0 u1")
    mother.map()
    mother.first()
    assert Story(parent=mother, fork=True).state.versions == {}


def test_a_fork_of_a_closed_parent_inherits_nothing() -> None:
    mother = parent()
    mother.close()
    assert Story(parent=mother, fork=True).state.versions == {}


def test_the_pin_stays_the_parents() -> None:
    mother = parent()
    mother.do(PinSpan, span=(0, 2))
    child = Story(parent=mother, fork=True)
    assert not child.state.pins
    assert set(child.live().values()) == {SUSPENDED}


def test_a_fork_of_a_fork_before_its_first_call() -> None:
    child = Story(parent=parent(), fork=True)
    assert Story(parent=child, fork=True, upto=2).lists_live() == {"s0 u1"}


def test_a_fork_of_an_unmapped_list_is_unmapped_itself() -> None:
    mother = Story()
    mother.arrive("s0 u1")
    mother.first()
    mother.end()
    child = Story(parent=mother, fork=True)
    assert child.state.unmapped
    child.call("s0 u1 a1")
    assert not child.state.unmapped


@pytest.mark.parametrize("fork", [True, False])
def test_an_unknown_parent_or_a_spawn_begins_empty(fork: bool) -> None:
    opened = ContextOpened(
        at_ns=1,
        uid="x",
        tenant="t",
        context_id="x",
        namespace=NAMESPACE,
        rung=IdentityRung.EXPLICIT,
        parent="somebody",
        fork=fork,
    )
    (created,) = open_context(opened, None)
    state = evolve(None, created)
    assert not state.versions
    assert not state.forked
    spawned = Story(parent=parent(), fork=False)
    assert not spawned.state.versions
    assert spawned.state.parent_uid == "ctx"


def test_silence_ends_a_child_that_never_called() -> None:
    child = Story(parent=parent(), fork=True)
    child.tick(30 * 60)
    assert child.state.versions == {}


# -- one-off ----------------------------------------------------------------------------------------------


def test_a_one_offs_own_versions_are_discarded_when_it_ended() -> None:
    story = Story(one_off=True)
    story.arrive("s0 u1")
    story.map()
    story.first()
    story.generate("a1")
    assert story.answer_keys("s0 u1", "a1") <= story.keys_live()
    story.end()
    assert story.state.versions == {}
    assert not story.state.open


def test_a_forked_one_off_gives_back_what_it_inherited() -> None:
    mother = parent()
    story = Story(parent=mother, fork=True, one_off=True)
    story.arrive("s0 u1 a1 u9")
    story.map()
    story.first()
    story.end()
    assert story.state.versions == {}
    assert mother.lists_live() == {"s0 u1 a1"}


def test_a_one_off_may_be_retried() -> None:
    story = Story(one_off=True)
    for attempt, how in ((1, CallEnd.FAILED), (2, CallEnd.ABORTED), (3, CallEnd.COMPLETED)):
        assert story.arrive("s0 u1") == attempt
        story.map("c1", attempt)
        if attempt > 1:
            story.first("c1", attempt)
        story.end("c1", attempt, how)
        assert story.state.versions == {}


def test_overlapping_attempts_of_a_one_off_end_with_the_last_of_them() -> None:
    story = Story(one_off=True)
    for attempt in (1, 2):
        story.arrive("s0 u1")
        story.map("c1", attempt)
        story.first("c1", attempt)
    story.end("c1", 1)
    assert story.state.open
    assert "s0 u1" in story.live()
    story.end("c1", 2)
    assert not story.state.open
    assert story.state.versions == {}


def test_a_call_may_make_its_context_a_one_off() -> None:
    story = Story()
    story.call("s0 u1", one_off=True)
    assert story.state.versions == {}


def test_a_used_context_cannot_become_a_one_off() -> None:
    story = parent()
    story.call("s0 u1 a1 a2 u3", "c2", one_off=True)
    assert story.state.open
    assert story.lists_live() == {"s0 u1 a1 a2 u3"}


# -- close ------------------------------------------------------------------------------------------------


def test_close_expires_all_but_pins_and_calls() -> None:
    story = parent()
    story.do(PinSpan, span=(0, 1))
    story.close()
    assert story.live() == {"s0": VersionState.PINNED}
    assert story.close() == []
    assert story.see(Tick(at_ns=story.now)) == []


def test_a_closed_context_stays_closed_whatever_its_last_calls_do() -> None:
    story = parent()
    story.arrive("s0 u1 a1 u2", "c2")
    story.close()
    story.map("c2")
    story.first("c2")
    assert "s0 u1 a1 u2" in story.live()
    story.end("c2")
    assert story.state.versions == {}


def test_deciding_does_not_change_the_state_it_was_given() -> None:
    story = parent()
    before = story.state
    decide(before, Tick(at_ns=before.last_ns + 10**13))
    assert before == story.state
    assert before.open
