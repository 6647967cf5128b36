"""What follows from calls: each row of the transition table that a call can cause."""

import pytest

from lifecycle.core.events import GenerationMapped
from lifecycle.core.observations import GenerationKeys, ReplaceMessages
from lifecycle.core.state import version_states
from lifecycle.errors import InvalidObservation
from lifecycle.vocabulary import CallEnd, VersionState, WaitKind
from tests.lifecycle.core.story import Story

ACTIVE, SUSPENDED = VersionState.ACTIVE, VersionState.SUSPENDED


# -- the rows, in the table's order -----------------------------------------------------------------------


def test_an_arriving_call_makes_its_versions_active() -> None:
    story = Story()
    story.call("s0 u1")
    assert story.live() == {"s0": SUSPENDED, "s0 u1": SUSPENDED}
    story.arrive("s0 u1 a1 u2", "c2")
    assert set(story.live().values()) == {ACTIVE}


def test_prefill_done_suspends_them() -> None:
    story = Story()
    story.arrive("s0 u1")
    story.map()
    story.first()
    assert set(story.live().values()) == {SUSPENDED}


def test_a_non_streamed_call_is_active_to_its_end_and_then_suspended() -> None:
    story = Story()
    story.arrive("s0 u1", streamed=False)
    story.map()
    assert set(story.live().values()) == {ACTIVE}
    story.end()
    assert set(story.live().values()) == {SUSPENDED}
    assert story.state.current_branch() is not None


def test_completion_keeps_the_generation_and_stamps_the_wait() -> None:
    story = Story()
    story.arrive("s0 u1")
    story.map()
    story.first()
    story.generate("a1")
    story.end(wait=WaitKind.TOOL)
    assert story.answer_keys("s0 u1", "a1") <= story.keys_live()
    branch = story.state.current_branch()
    assert branch is not None
    assert (branch.wait, branch.since_ns) == (WaitKind.TOOL, story.now)
    assert story.state.wait is WaitKind.TOOL


@pytest.mark.parametrize("how", [CallEnd.ABORTED, CallEnd.FAILED])
def test_an_end_mid_stream_keeps_the_prompt_and_drops_the_partial_generation(how: CallEnd) -> None:
    story = Story()
    story.arrive("s0 u1")
    story.map()
    story.first()
    story.generate("a1")
    story.end(end=how)
    assert story.chain("s0 u1") <= story.keys_live()
    assert not story.answer_keys("s0 u1", "a1") & story.keys_live()
    assert set(story.live().values()) == {SUSPENDED}


@pytest.mark.parametrize("how", [CallEnd.ABORTED, CallEnd.FAILED])
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("words", ["s0 u1 a1 u2", "s0 u1", "s0 u9", "u9"])
def test_an_end_before_the_first_token_brings_back_the_states_before(
    how: CallEnd, streamed: bool, words: str
) -> None:
    story = Story()
    story.call("s0 u1")
    story.call("s0 u1 a1 t1")
    before = story.state
    story.arrive(words, "c2", streamed=streamed)
    story.map("c2")
    story.end("c2", end=how)
    assert version_states(story.state) == version_states(before)
    assert story.state.versions == before.versions
    assert story.state.branches == before.branches
    assert story.state.wait == before.wait


def test_the_generation_of_a_call_that_is_not_the_last_any_more_is_dead_on_arrival() -> None:
    story = Story()
    story.call("s0 u1")
    story.call("s0 u1 a1 u2", "c2")
    before = story.state.versions
    (event,) = story.see(
        GenerationKeys(
            at_ns=story.now,
            call_id="c1",
            attempt=1,
            choice=0,
            num_tokens=8,
            chain=b"x" * 64,
            chunk_size=4,
        )
    )
    assert isinstance(event, GenerationMapped)
    assert event.parent == -1
    assert story.state.versions == before


# -- generations ------------------------------------------------------------------------------------------


def test_a_generation_that_the_next_list_reproduces_leaves_nothing_behind() -> None:
    story = Story()
    story.arrive("s0 u1")
    story.map()
    story.first()
    story.generate("a1")
    story.end()
    story.call("s0 u1 a1 u2", "c2")
    assert len(story.state.branches) == 1
    assert story.answer_keys("s0 u1", "a1") <= story.keys_live()


def test_a_generation_that_is_not_reproduced_is_doubtful_and_then_expires() -> None:
    story = Story()
    story.arrive("s0 u1")
    story.map()
    story.first()
    story.generate("a1")
    story.end()
    answer = story.answer_keys("s0 u1", "a1")
    assert answer
    story.arrive("s0 u1 a1 u2", "c2")
    story.map("c2", stripped=["a1"])
    story.first("c2")
    story.end("c2")
    assert answer <= story.keys_live()
    doubted = [b for b in story.state.branches if b.doubted_ns]
    assert len(doubted) == 1
    story.arrive("s0 u1 a1 u2 a2", "c3")
    story.map("c3", stripped=["a1"])
    story.first("c3")
    assert not answer & story.keys_live()


def test_every_choice_is_live_until_the_next_list() -> None:
    story = Story()
    story.arrive("s0 u1", num_choices=2)
    story.map()
    story.first()
    story.generate("a1", choice=0)
    story.generate("a2", choice=1)
    story.end()
    both = story.answer_keys("s0 u1", "a1") | story.answer_keys("s0 u1", "a2")
    assert both <= story.keys_live()
    story.call("s0 u1 a7", "c2")
    story.call("s0 u1 a7 u2", "c3")
    assert not both & story.keys_live()


def test_a_generation_grows_in_place_and_twice_is_once() -> None:
    story = Story()
    story.arrive("s0 u1")
    story.map()
    story.first()
    assert story.generate("a1")
    assert story.generate("a1") == []
    num = len(story.state.versions)
    assert story.generate("a66")
    assert len(story.state.versions) == num


def test_a_generation_must_continue_its_prompt() -> None:
    story = Story()
    story.arrive("s0 u1")
    story.map()
    story.first()
    wrong = GenerationKeys(
        at_ns=story.now, call_id="c1", attempt=1, choice=0, num_tokens=40, chain=b"x" * 320, chunk_size=4
    )
    with pytest.raises(InvalidObservation):
        story.see(wrong)


def test_another_call_with_the_same_list_leaves_the_first_ones_generation_doubtful() -> None:
    story = Story()
    story.call("s0 u1")
    for i in range(2, 40):
        story.arrive("s0 u1", f"c{i}")
        story.map(f"c{i}")
        story.first(f"c{i}")
        story.generate(f"a{i}", f"c{i}")
        story.end(f"c{i}")
        story.tick(30)
    assert len(story.state.branches) <= 4
    assert story.answer_keys("s0 u1", "a39") <= story.keys_live()
    assert not story.answer_keys("s0 u1", "a5") & story.keys_live()


# -- attempts ---------------------------------------------------------------------------------------------


def test_the_same_call_again_is_another_attempt() -> None:
    story = Story()
    assert story.arrive("s0 u1") == 1
    assert story.arrive("s0 u1") == 2
    assert len(story.state.flights) == 2


def test_overlapping_attempts_make_one_branch_and_both_generations_live() -> None:
    story = Story()
    for attempt in (1, 2):
        story.arrive("s0 u1")
        story.map("c1", attempt)
    for attempt in (1, 2):
        story.first("c1", attempt)
        story.generate(f"a{attempt}", "c1", attempt)
    for attempt in (1, 2):
        story.end("c1", attempt)
    assert len(story.state.branches) == 1
    both = story.answer_keys("s0 u1", "a1") | story.answer_keys("s0 u1", "a2")
    assert both <= story.keys_live()


def test_a_retry_after_an_abort_continues_as_if_nothing_had_been() -> None:
    story = Story()
    story.call("s0 u1")
    story.arrive("s0 u1 a1 u2", "c2")
    story.map("c2")
    story.abort("c2")
    story.arrive("s0 u1 a1 u2", "c2")
    story.map("c2", 2)
    story.first("c2", 2)
    story.end("c2", 2)
    assert set(story.live().values()) == {SUSPENDED}
    assert len(story.state.branches) == 1


def test_an_attempt_number_is_not_used_again_while_its_call_is_in_flight() -> None:
    story = Story()
    story.arrive("s0 u1", "slow")
    for i in range(80):
        story.arrive("s0 u2", f"c{i}")
        story.abort(f"c{i}")
    assert story.arrive("s0 u1", "slow") == 2
    assert len(story.state.attempts) <= 64


def test_observations_of_a_call_that_is_over_change_nothing() -> None:
    story = Story()
    story.call("s0 u1")
    assert story.first() == []
    assert story.end() == []
    assert story.map() == []
    assert story.first("nobody") == []


def test_twice_changes_nothing() -> None:
    story = Story()
    story.arrive("s0 u1")
    assert story.map()
    assert story.map() == []
    assert story.first()
    assert story.first() == []


# -- declared and real length -----------------------------------------------------------------------------


def test_a_stale_first_call_leaves_what_its_edit_left() -> None:
    """The first call's list is edited while the call runs: what stands before the edit lives on."""
    story = Story()
    story.arrive("s0 u1 u2")
    story.map()
    story.do(ReplaceMessages, span=(2, 3), n=1)
    story.first()
    story.end()
    assert set(story.live()) == {"s0", "s0 u1"}
    story.call("s0 u1 u3", "c2")
    assert set(story.live()) == {"s0", "s0 u1", "s0 u1 u3"}


def test_a_call_may_close_its_context() -> None:
    story = Story()
    story.arrive("s0 u1", closes=True)
    story.map()
    story.first()
    assert story.state.open
    story.end()
    assert not story.state.open
    assert not story.state.versions


def test_a_closing_call_that_computed_nothing_closes_nothing() -> None:
    story = Story()
    story.call("s0 u1")
    story.arrive("s0 u1 a1", "c2", closes=True)
    story.map("c2")
    story.end("c2", end=CallEnd.FAILED)
    assert story.state.open
    story.call("s0 u1 a1", "c2", closes=True)
    assert not story.state.open


def test_the_calls_own_wait_is_taken_before_the_answers() -> None:
    story = Story()
    story.arrive("s0 u1", wait=WaitKind.HUMAN, eta=3.0)
    story.map()
    story.first()
    story.end(wait=WaitKind.TOOL)
    assert story.state.wait is WaitKind.HUMAN
    assert story.state.wait_eta == 3.0
