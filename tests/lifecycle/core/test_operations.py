"""Declared operations: what each does, in order, once."""

import pytest

from lifecycle.core.events import DeclarationMismatched, OperationRejected
from lifecycle.core.observations import (
    AppendMessages,
    CloseContext,
    DeclareOutcome,
    DeclareResumed,
    DeclareWaiting,
    ForkContext,
    MarkOneOff,
    Operation,
    PinSpan,
    RemoveMessages,
    ReplaceMessages,
    SpawnContext,
    UnpinSpan,
)
from lifecycle.core.operations import MAX_HELD
from lifecycle.vocabulary import OutcomeResult, VersionState, WaitKind
from tests.lifecycle.core.story import Story


def talked() -> Story:
    """A context of four messages, mapped, between two calls."""
    story = Story()
    story.call("s0 u1 a1 t1")
    return story


# -- edits ------------------------------------------------------------------------------------------------


def test_append_declares_the_length_of_the_next_list() -> None:
    story = talked()
    story.do(AppendMessages, n=2)
    assert story.state.declared_length == 6
    story.do(AppendMessages, n=1)
    assert story.state.declared_length == 7
    assert set(story.live().values()) == {VersionState.SUSPENDED}


def test_a_list_of_the_declared_length_is_no_mismatch() -> None:
    story = talked()
    story.do(AppendMessages, n=2)
    story.arrive("s0 u1 a1 t1 a2 u2", "c2")
    assert story.names() == ["CallArrived"]


def test_a_list_of_another_length_is_told_and_inference_takes_over() -> None:
    story = talked()
    story.do(AppendMessages, n=1)
    story.arrive("s0 u1 a1 t1 a2 u2", "c2")
    mismatch = story.seen[0]
    assert isinstance(mismatch, DeclarationMismatched)
    assert (mismatch.expected, mismatch.actual) == (5, 6)
    story.map("c2")
    story.first("c2")
    assert story.live()["s0 u1 a1 t1 a2 u2"] is VersionState.SUSPENDED


def test_replace_takes_the_versions_from_the_span_on_out_at_once() -> None:
    story = talked()
    story.do(ReplaceMessages, span=(2, 3), n=1)
    assert set(story.live()) == {"s0", "s0 u1"}
    story.call("s0 u1 a9 t1", "c2")
    assert set(story.live()) == {"s0", "s0 u1", "s0 u1 a9", "s0 u1 a9 t1"}
    assert len(story.state.branches) == 1


def test_remove_is_replace_by_nothing() -> None:
    story = talked()
    story.do(RemoveMessages, span=(1, 3))
    assert set(story.live()) == {"s0"}
    story.call("s0 t1", "c2")
    assert set(story.live()) == {"s0", "s0 t1"}


def test_an_empty_edit_changes_nothing() -> None:
    story = talked()
    before = story.state.versions
    story.do(RemoveMessages, span=(2, 2))
    assert story.names() == ["OperationApplied"]
    assert story.state.versions == before


def test_an_insertion_keeps_what_stands_before_it() -> None:
    story = talked()
    story.do(ReplaceMessages, span=(1, 1), n=2)
    assert set(story.live()) == {"s0"}


def test_the_whole_list_may_be_replaced() -> None:
    story = talked()
    story.do(ReplaceMessages, span=(0, 4), n=1)
    assert story.live() == {}
    story.call("u7", "c2")
    assert set(story.live()) == {"u7"}


def test_an_edit_behind_the_known_list_keeps_the_generation() -> None:
    """The tool's result is edited before it was ever sent; the answer before it stands."""
    story = Story()
    story.arrive("s0 u1")
    story.map()
    story.first()
    story.generate("a1")
    story.end()
    story.do(AppendMessages, n=2)
    story.do(ReplaceMessages, span=(3, 4), n=1)
    assert story.state.declared_length == 4
    assert story.answer_keys("s0 u1", "a1") <= story.keys_live()
    story.do(ReplaceMessages, span=(2, 3), n=1)
    assert not story.answer_keys("s0 u1", "a1") & story.keys_live()


def test_what_is_appended_behind_a_first_edit_counts_from_the_whole_list() -> None:
    story = talked()
    story.do(ReplaceMessages, span=(1, 2), n=1)
    story.do(AppendMessages, n=2)
    assert story.state.declared_length == 6


def test_a_client_that_tells_edits_alone_declares_no_length() -> None:
    story = talked()
    story.do(RemoveMessages, span=(1, 3))
    story.arrive("s0 t1 a2 u2 a3", "c2")
    assert "DeclarationMismatched" not in story.names()


def test_an_edit_spares_other_branches_that_do_not_pass_it() -> None:
    story = Story()
    story.call("s0 u1")
    story.arrive("s0 u1 a1", "left")
    story.arrive("s0 u1 a2", "right")
    for call in ("left", "right"):
        story.map(call)
        story.first(call)
        story.end(call)
    story.do(ReplaceMessages, span=(2, 3), n=1)  # right is the branch that was advanced last
    assert "s0 u1 a1" in story.live()
    assert "s0 u1 a2" not in story.live()
    story.do(ReplaceMessages, span=(1, 2), n=1)
    assert set(story.live()) == {"s0"}


def test_an_edit_during_a_call_takes_effect_when_the_call_has_ended() -> None:
    story = talked()
    story.arrive("s0 u1 a1 t1 a2 u2", "c2")
    story.map("c2")
    story.do(ReplaceMessages, span=(2, 4), n=1)
    assert "s0 u1 a1 t1 a2 u2" in story.live()  # the engine computes with it
    story.first("c2")
    story.end("c2")
    assert set(story.live()) == {"s0", "s0 u1"}


def test_a_call_that_came_after_the_edit_is_not_held_to_the_call_before() -> None:
    story = talked()
    story.arrive("s0 u1 a1 t1 a2", "old")
    story.map("old")
    story.do(ReplaceMessages, span=(2, 4), n=1)
    story.call("s0 u1 u5", "new")
    story.first("old")
    story.end("old")
    assert story.lists_live() == {"s0 u1 u5"}
    assert len(story.state.branches) == 1


@pytest.mark.parametrize("span", [(3, 2), (-1, 2)])
def test_what_is_no_span_is_rejected_and_consumed(span: tuple[int, int]) -> None:
    story = talked()
    story.do(RemoveMessages, span=span)
    assert story.names() == ["OperationRejected"]
    story.do(AppendMessages, n=-1)
    assert story.names() == ["OperationRejected"]
    story.do(AppendMessages, n=1)
    assert "ListGrown" in story.names()


def test_an_edit_of_a_context_without_list_is_rejected() -> None:
    story = Story()
    story.do(RemoveMessages, span=(0, 1))
    (event,) = story.seen
    assert isinstance(event, OperationRejected)


def test_a_false_declaration_costs_a_new_prefill_and_nothing_else() -> None:
    story = talked()
    story.do(RemoveMessages, span=(0, 4))
    story.call("s0 u1 a1 t1 u2", "c2")  # nothing had been removed at all
    assert story.lists_live() == {"s0 u1 a1 t1 u2"}
    assert set(story.live().values()) == {VersionState.SUSPENDED}


# -- lifetime and runtime facts ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MarkOneOff, ForkContext, SpawnContext])
def test_what_only_begins_a_context_is_rejected_on_a_used_one(kind: type[Operation]) -> None:
    fields = {"parent": "p"} if kind is ForkContext else {}
    story = talked()
    story.do(kind, **fields)
    assert story.names() == ["OperationRejected"]
    fresh = Story()
    fresh.do(kind, **fields)
    assert fresh.names() == ["OperationApplied"]


def test_one_off_marks_a_fresh_context() -> None:
    story = Story()
    story.do(MarkOneOff)
    story.call("s0 u1")
    assert story.live() == {}
    assert not story.state.open


def test_waiting_says_for_what_and_stamps_the_lease() -> None:
    story = talked()
    story.tick(100)
    story.do(DeclareWaiting, kind=WaitKind.TOOL, tool="bash", eta=4.0)
    assert (story.state.wait, story.state.wait_tool, story.state.wait_eta) == (WaitKind.TOOL, "bash", 4.0)
    assert story.state.active_ns == story.now
    branch = story.state.current_branch()
    assert branch is not None
    assert (branch.wait, branch.tool, branch.eta) == (WaitKind.TOOL, "bash", 4.0)
    story.do(DeclareWaiting, kind=WaitKind.TOOL, eta=-1.0)
    assert story.names() == ["OperationRejected"]


def test_resumed_says_that_a_call_follows() -> None:
    story = talked()
    story.do(DeclareWaiting, kind=WaitKind.HUMAN, eta=600.0)
    story.tick(50)
    story.do(DeclareResumed)
    assert story.state.active_ns == story.now
    assert story.state.wait_eta == 0.0


def test_outcomes_are_kept_the_latest_ones() -> None:
    story = talked()
    for i in range(100):
        story.do(DeclareOutcome, span=(i, i + 1), result=OutcomeResult.VERIFIED)
    assert story.state.outcomes[-1] == (99, 100, "verified")
    assert len(story.state.outcomes) <= 64


def test_close_discards_everything_and_a_new_call_opens_again() -> None:
    story = talked()
    story.do(CloseContext)
    assert not story.state.open
    assert story.live() == {}
    story.do(CloseContext)
    assert story.names() == ["OperationApplied"]
    story.call("s0 u1", "c2")
    assert story.state.open
    assert set(story.live()) == {"s0", "s0 u1"}


def test_close_during_a_call_waits_for_the_call() -> None:
    story = talked()
    story.arrive("s0 u1 a1 t1 a2", "c2")
    story.map("c2")
    story.do(CloseContext)
    assert "s0 u1 a1 t1 a2" in story.live()
    story.first("c2")
    story.end("c2")
    assert story.live() == {}


# -- order ------------------------------------------------------------------------------------------------


def test_twice_changes_nothing() -> None:
    story = talked()
    story.do(AppendMessages, seq=1, n=2)
    assert story.do(AppendMessages, seq=1, n=2) == []
    assert story.do(AppendMessages, seq=0, n=2) == []
    story.do(AppendMessages, seq=3, n=2)
    assert story.do(AppendMessages, seq=3, n=2) == []
    assert story.state.declared_length == 6


def test_operations_take_effect_in_order_whatever_order_they_come_in() -> None:
    straight, crooked = talked(), talked()
    first = (ReplaceMessages, {"seq": 1, "span": (2, 4), "n": 1})
    second = (AppendMessages, {"seq": 2, "n": 3})
    third = (RemoveMessages, {"seq": 3, "span": (1, 2)})
    for operation, fields in (first, second, third):
        straight.do(operation, **fields)
    for operation, fields in (third, second, first):
        crooked.do(operation, **fields)
    assert straight.state == crooked.state


def test_a_gap_is_held_for_a_bounded_time_and_then_tracking_has_a_gap() -> None:
    story = talked()
    story.do(RemoveMessages, seq=2, span=(2, 4))
    assert story.names() == ["OperationHeld"]
    story.tick(4.9)
    assert not story.state.gap
    story.tick(0.2)
    assert story.state.gap
    assert "s0 u1 a1 t1" in story.live()
    assert story.do(AppendMessages, seq=1, n=1) == []  # too late: its successors are lost


def test_what_closes_a_gap_in_time_releases_what_waited() -> None:
    story = talked()
    story.do(RemoveMessages, seq=2, span=(2, 4))
    story.tick(3)
    story.do(AppendMessages, seq=1, n=1)
    assert "ListEdited" in story.names()
    story.tick(60)
    assert not story.state.gap


def test_edits_behind_a_gap_are_not_believed() -> None:
    story = talked()
    story.do(RemoveMessages, seq=2, span=(2, 4))
    story.tick(6)
    story.do(RemoveMessages, seq=3, span=(1, 2))
    assert story.names() == ["OperationApplied"]
    assert "s0 u1 a1 t1" in story.live()


def test_nothing_doubtful_expires_in_a_gap_and_a_full_render_heals_it() -> None:
    story = talked()
    story.call("s0 u1 a9", "c2")
    story.do(AppendMessages, seq=2, n=1)
    story.tick(70)
    assert story.state.gap
    story.tick(120)
    assert story.live()["s0 u1 a1 t1"] is VersionState.DOUBTFUL
    story.arrive("s0 u1 a9 u2", "c3")
    story.first("c3")
    assert "s0 u1 a1 t1" in story.live()
    story.map("c3")
    assert not story.state.gap
    story.end("c3")
    story.call("s0 u1 a9 u2 a3", "c4")
    assert "s0 u1 a1 t1" not in story.live()


def test_the_branches_of_a_gap_that_never_heals_are_bounded() -> None:
    story = talked()
    story.do(AppendMessages, seq=2, n=1)
    story.tick(6)
    for i in range(300):
        story.arrive(f"s0 u{i % 7} a{i % 11}", f"c{i}")
        story.first(f"c{i}")
        story.end(f"c{i}")
        story.arrive(f"s0 u{i % 7} a{i % 11} u8", f"d{i}")
        story.first(f"d{i}")
        story.end(f"d{i}")
    assert story.state.gap
    assert len(story.state.branches) <= 70


def test_too_many_held_operations_are_a_gap_at_once() -> None:
    story = talked()
    for seq in range(3, 3 + MAX_HELD):
        story.do(AppendMessages, seq=seq, n=1)
    assert not story.state.gap
    story.do(AppendMessages, seq=3 + MAX_HELD, n=1)
    assert story.state.gap
    assert not story.state.sources["sdk"].held


def test_an_edit_that_a_call_shows_already_has_no_effect_when_it_comes_late() -> None:
    story = talked()
    story.call("s0 u1 u5", "c2", source="sdk", seq=1)
    story.do(ReplaceMessages, seq=1, span=(2, 4), n=1)
    assert story.names() == ["OperationApplied"]
    assert "s0 u1 u5" in story.live()
    story.do(ReplaceMessages, seq=2, span=(2, 3), n=1)
    assert "s0 u1 u5" not in story.live()


def test_sources_number_their_operations_each_on_its_own_and_are_bounded() -> None:
    story = talked()
    for i in range(200):
        story.call("s0 u1 a1 t1", f"c{i}", source=f"client {i}", seq=1)
    assert len(story.state.sources) <= 64
    assert "client 199" in story.state.sources


def test_pins_of_a_context_without_list_are_rejected() -> None:
    story = Story()
    story.do(PinSpan, span=(0, 1))
    assert story.names() == ["OperationRejected"]
    story.do(UnpinSpan, span=(0, 1))
    assert story.names() == ["OperationRejected"]
