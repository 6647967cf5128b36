"""What follows from calls: each row of the transition table that a call can cause."""

import pytest
from msgspec.structs import replace

from lifecycle.core.calls import BRANCH_LIMIT_REASON
from lifecycle.core.events import BranchExpired, CallMapped, GenerationMapped
from lifecycle.core.observations import CallMapping, GenerationKeys, PromptMapping, ReplaceMessages
from lifecycle.core.state import version_states
from lifecycle.errors import InvalidObservation
from lifecycle.vocabulary import CallEnd, MappingKind, VersionState, WaitKind
from tests.lifecycle.core.story import Story, mapping_of

ACTIVE, SUSPENDED = VersionState.ACTIVE, VersionState.SUSPENDED
DOUBTFUL, PENDING = VersionState.DOUBTFUL, VersionState.PENDING


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


# -- undeclared changes -----------------------------------------------------------------------------------


def edited_undeclared() -> Story:
    story = Story()
    story.call("s0 u1 a1 u2")
    story.call("s0 u1 a9", "c2")
    return story


def test_an_undeclared_change_makes_what_it_left_doubtful() -> None:
    story = edited_undeclared()
    assert story.live() == {
        "s0": SUSPENDED,
        "s0 u1": SUSPENDED,
        "s0 u1 a1": DOUBTFUL,
        "s0 u1 a1 u2": DOUBTFUL,
        "s0 u1 a9": SUSPENDED,
    }


def test_nothing_becomes_doubtful_before_the_first_token() -> None:
    story = Story()
    story.call("s0 u1 a1 u2")
    story.arrive("s0 u1 a9", "c2")
    story.map("c2")
    assert DOUBTFUL not in story.live().values()


def test_the_doubtful_expires_when_the_next_call_extends_the_new_branch() -> None:
    story = edited_undeclared()
    story.call("s0 u1 a9 u3", "c3")
    assert set(story.live()) == {"s0", "s0 u1", "s0 u1 a9", "s0 u1 a9 u3"}


def test_the_doubtful_expires_after_sixty_seconds() -> None:
    story = edited_undeclared()
    story.tick(59)
    assert "s0 u1 a1 u2" in story.live()
    story.tick(1.1)
    assert "s0 u1 a1" not in story.live()
    assert story.live()["s0 u1 a9"] is SUSPENDED


def test_the_doubtful_is_restored_if_the_old_branch_returns() -> None:
    story = edited_undeclared()
    story.call("s0 u1 a1 u2 a3", "c3")
    live = story.live()
    assert live["s0 u1 a1 u2"] is SUSPENDED
    assert live["s0 u1 a9"] is DOUBTFUL


def test_an_old_branch_may_return_with_its_very_list() -> None:
    story = edited_undeclared()
    story.call("s0 u1 a1 u2", "c3")
    assert story.live()["s0 u1 a1 u2"] is SUSPENDED
    assert story.live()["s0 u1 a9"] is DOUBTFUL


def test_a_shorter_list_is_an_undeclared_change_too() -> None:
    story = Story()
    story.call("s0 u1 a1 u2")
    story.call("s0 u1", "c2")
    assert story.live()["s0 u1 a1 u2"] is DOUBTFUL
    assert story.live()["s0 u1"] is SUSPENDED


def test_another_head_is_another_list() -> None:
    story = Story()
    story.call("s0 u1")
    story.arrive("s0 u1", "c2", head="other")
    story.map("c2", head="other")
    story.first("c2")
    assert len(story.state.branches) == 2
    assert [bool(b.doubted_ns) for b in story.state.branches] == [True, False]


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


# -- concurrent calls -------------------------------------------------------------------------------------


def test_a_call_that_diverges_while_another_is_in_flight_opens_a_branch() -> None:
    story = Story()
    story.call("s0 u1")
    story.arrive("s0 u1 a1", "left")
    story.arrive("s0 u1 a2", "right")
    for call in ("left", "right"):
        story.map(call)
        story.first(call)
        story.end(call)
    live = story.live()
    assert live["s0 u1 a1"] is SUSPENDED
    assert live["s0 u1 a2"] is SUSPENDED


@pytest.mark.parametrize("order", [("left", "right"), ("right", "left")])
def test_the_order_of_first_tokens_does_not_make_an_edit_of_a_branch(order: tuple[str, str]) -> None:
    story = Story()
    story.arrive("s0 u1", "first")
    story.map("first")
    story.first("first")
    story.generate("a5", "first")
    story.end("first")
    story.arrive("s0 u1 u8", "left")
    story.arrive("s0 u1 u9", "right")
    for call in order:
        story.map(call)
        story.first(call)
        story.end(call)
    live = story.live()
    assert live["s0 u1 u8"] is SUSPENDED
    assert live["s0 u1 u9"] is SUSPENDED


def test_a_call_that_came_while_an_edit_was_in_flight_keeps_its_branch() -> None:
    story = Story()
    story.call("s0 u1 a1")
    story.arrive("s0 u7", "edit")
    story.arrive("s0 u1 a1 u2", "on")
    for call in ("on", "edit"):
        story.map(call)
        story.first(call)
        story.end(call)
    assert story.live()["s0 u1 a1 u2"] is SUSPENDED
    assert story.live()["s0 u7"] is SUSPENDED


def test_a_branch_ends_when_a_later_call_extends_another() -> None:
    story = Story()
    story.call("s0 u1")
    story.arrive("s0 u1 a1", "left")
    story.arrive("s0 u1 a2", "right")
    for call in ("left", "right"):
        story.map(call)
        story.first(call)
        story.end(call)
    story.call("s0 u1 a1 u2", "c2")
    assert story.live()["s0 u1 a2"] is DOUBTFUL
    story.call("s0 u1 a1 u2 a3", "c3")
    assert "s0 u1 a2" not in story.live()


def test_a_branch_with_a_call_in_flight_does_not_end() -> None:
    story = Story()
    story.call("s0 u1")
    story.arrive("s0 u1 a1", "left")
    story.arrive("s0 u1 a2", "right")
    for call in ("left", "right"):
        story.map(call)
        story.first(call)
    story.end("left")
    story.call("s0 u1 a1 u2", "c2")
    assert story.live()["s0 u1 a2"] is SUSPENDED
    story.end("right")
    assert story.live()["s0 u1 a2"] is SUSPENDED


def test_two_first_calls_at_once_are_two_branches() -> None:
    story = Story()
    story.arrive("s0 u1", "left")
    story.arrive("u5", "right")
    for call in ("left", "right"):
        story.map(call)
        story.first(call)
        story.end(call)
    assert set(story.live().values()) == {SUSPENDED}
    assert len(story.state.branches) == 2


def test_a_branch_that_expired_during_its_own_call_comes_back() -> None:
    story = edited_undeclared()
    story.arrive("s0 u1 a1 u2 a3", "c3")
    story.map("c3")
    story.tick(61)
    assert "s0 u1 a1 u2 a3" in story.live()
    story.first("c3")
    assert story.live()["s0 u1 a1 u2"] is SUSPENDED
    assert story.live()["s0 u1 a9"] is DOUBTFUL


# -- mappings ---------------------------------------------------------------------------------------------


def test_a_message_rendered_otherwise_is_another_version() -> None:
    """A template that strips thinking from earlier turns: the same messages, other tokens."""
    story = Story()
    story.call("s0 u1 a1 t1")
    old = story.chain("s0 u1 a1 t1")
    story.arrive("s0 u1 a1 t1 u2", "c2")
    story.map("c2", stripped=["a1"])
    assert old <= story.keys_live()
    story.first("c2")
    assert story.chain("s0 u1 a1 t1 u2", ["a1"]) <= story.keys_live()
    assert old <= story.keys_live()
    assert story.live()["s0 u1 a1"] is SUSPENDED
    doubted = [b for b in story.state.branches if b.doubted_ns]
    assert len(doubted) == 1
    story.end("c2")
    story.arrive("s0 u1 a1 t1 u2 a2", "c3")
    story.map("c3", stripped=["a1"])
    story.first("c3")
    assert not (old - story.chain("s0 u1")) & story.keys_live()


def test_a_late_mapping_moves_the_branch_that_took_the_list() -> None:
    story = Story()
    story.call("s0 u1 a1 t1")
    story.arrive("s0 u1 a1 t1 u2", "c2")
    story.first("c2")
    story.map("c2", stripped=["a1"])
    new = story.chain("s0 u1 a1 t1 u2", ["a1"])
    assert new <= story.keys_live()
    story.end("c2")
    assert new <= story.keys_live()
    story.arrive("s0 u1 a1 t1 u2 a2", "c3")
    story.map("c3", stripped=["a1"])
    (mapped,) = [e for e in story.seen if isinstance(e, CallMapped)]
    assert mapped.first_changed == 6  # head and five messages lie where they lay
    story.first("c3")
    assert new <= story.keys_live()


def test_a_late_mapping_of_an_unmapped_list_fills_it_in_place() -> None:
    story = Story()
    story.arrive("s0 u1")
    story.first()
    assert set(story.live().values()) == {PENDING}
    num = len(story.state.versions)
    story.map()
    assert len(story.state.versions) == num
    assert story.chain("s0 u1") <= story.keys_live()


def test_a_mapping_after_the_end_is_taken_and_until_then_the_context_is_unmapped() -> None:
    story = Story()
    story.arrive("s0 u1")
    story.first()
    story.end()
    assert story.state.unmapped
    assert story.map()
    assert not story.state.unmapped
    assert story.chain("s0 u1") <= story.keys_live()
    assert story.map() == []


def test_a_mapping_after_the_end_moves_to_copies_too() -> None:
    story = Story()
    story.call("s0 u1 a1 t1")
    story.arrive("s0 u1 a1 t1 u2", "c2")
    story.first("c2")
    story.end("c2")
    story.map("c2", stripped=["a1"])
    new = story.chain("s0 u1 a1 t1 u2", ["a1"])
    assert new <= story.keys_live()
    story.call("s0 u1 a1 t1 u2 a3", "c3")
    assert not story.state.unmapped


def test_another_calls_mapping_does_not_tell_the_tokens_of_an_unmapped_branch() -> None:
    story = Story()
    story.call("s0 u1")
    story.arrive("s0 u1 a1", "left")
    story.arrive("s0 u1 a2", "right")
    story.first("left")
    story.end("left")
    story.map("right")
    assert story.state.unmapped
    story.map("left")
    assert not story.state.unmapped


def test_a_call_without_mapping_makes_the_context_unmapped_until_the_next_exact_one() -> None:
    story = Story()
    story.arrive("s0 u1")
    story.see(
        CallMapping(
            at_ns=story.now,
            call_id="c1",
            attempt=1,
            mapping=PromptMapping(kind=MappingKind.NONE, reason="no template"),
        )
    )
    story.first()
    story.end()
    assert story.state.unmapped == "no template"
    story.call("s0 u1 a1", "c2")
    assert not story.state.unmapped
    assert story.chain("s0 u1 a1") <= story.keys_live()


def test_a_call_in_flight_without_mapping_keeps_the_context_unmapped_whatever_others_tell() -> None:
    story = Story()
    story.call("s0 u1")
    story.arrive("s0 u1 a1", "left")
    story.arrive("s0 u1 a2", "right")
    none = PromptMapping(kind=MappingKind.NONE, reason="no template")
    story.see(CallMapping(at_ns=story.now, call_id="left", attempt=1, mapping=none))
    story.map("right")
    story.first("left")
    assert story.state.unmapped == "no template"


def test_a_mapping_does_not_end_what_the_cache_said_and_the_cache_not_what_a_mapping_lacks() -> None:
    story = Story()
    story.call("s0 u1")
    story.verify("the cache holds other keys")
    assert story.state.unmapped == "the cache holds other keys"
    assert story.verify("the cache holds other keys") == []
    story.arrive("s0 u1 a1", "c2")
    none = PromptMapping(kind=MappingKind.NONE, reason="no template")
    story.see(CallMapping(at_ns=story.now, call_id="c2", attempt=1, mapping=none))
    assert story.state.unmapped == "the cache holds other keys"
    story.verify()
    assert story.state.unmapped == "no template"
    story.first("c2")
    story.end("c2")
    story.call("s0 u1 a1 u2", "c3")
    assert not story.state.unmapped
    assert story.verify() == []


@pytest.mark.parametrize(
    "change",
    [
        {"message_ends": (5,)},
        {"message_ends": (9, 4)},
        {"chunk_keys": b""},
        {"chunk_size": 0},
        {"num_tokens": 2},
    ],
)
def test_a_mapping_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    story = Story()
    story.arrive("s0 u1")
    mapping = replace(mapping_of(["s0", "u1"]), **change)
    with pytest.raises(InvalidObservation):
        story.see(CallMapping(at_ns=story.now, call_id="c1", attempt=1, mapping=mapping))


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


# -- a limit to branches ----------------------------------------------------------------------------------


def side_by_side(num: int, limit: int | None) -> Story:
    """As many calls at once, each with a list of its own; all of them are over."""
    story = Story()
    for n in range(num):
        story.arrive(f"s0 u{n}", f"c{n}")
    for n in range(num):
        story.map(f"c{n}")
        story.first(f"c{n}", max_branches=limit)
    assert len(story.state.branches) == num  # calls are on them: none may go
    for n in range(num):
        story.end(f"c{n}")
    return story


def test_branches_above_the_limit_expire_and_the_one_that_was_silent_longest_first() -> None:
    story = side_by_side(4, 3)
    story.arrive("s0 u3 a3 u9", "c9")
    story.map("c9")
    expired = [e for e in story.first("c9", max_branches=3) if isinstance(e, BranchExpired)]
    assert [e.reason for e in expired] == [BRANCH_LIMIT_REASON]
    assert "s0 u0" not in story.live()
    assert {"s0 u1", "s0 u2", "s0 u3 a3 u9"} <= story.live().keys()


def test_doubted_branches_go_before_open_ones_and_the_call_own_never() -> None:
    story = Story()
    story.call("s0 u1", "c1")
    story.call("s0 u2", "c2")  # an undeclared edit: the first list is doubted
    doubted = [b.id for b in story.state.branches if b.doubted_ns]
    assert len(doubted) == 1
    story.arrive("s0 u3", "c3")
    story.map("c3")
    expired = [e.branch for e in story.first("c3", max_branches=2) if isinstance(e, BranchExpired)]
    assert expired == doubted
    story.end("c3")
    story.arrive("s0 u4", "c4")
    story.map("c4")
    story.first("c4", max_branches=1)
    assert [story.path_of("s0 u4").id] == [b.tip for b in story.state.branches]


def test_without_a_limit_every_branch_stays() -> None:
    story = side_by_side(100, None)
    assert len(story.state.branches) == 100
