"""Branches: what calls leave and return to, side by side, and how many there may be."""

import pytest

from lifecycle.core.calls import BRANCH_LIMIT_REASON
from lifecycle.core.events import BranchExpired
from lifecycle.vocabulary import VersionState
from tests.lifecycle.core.story import Story

SUSPENDED, DOUBTFUL = VersionState.SUSPENDED, VersionState.DOUBTFUL


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
