"""Where a list meets the tree: the longest known prefix, and the branch it goes on with."""

import pytest

from lifecycle.core.message_diff import match_list
from lifecycle.core.state import ROOT
from tests.lifecycle.core.story import Story, fact


def match(story: Story, words: str, head: str = "head"):  # type: ignore[no-untyped-def]
    return match_list(story.state, head.encode(), [fact(w) for w in words.split()])


def test_nothing_is_known_of_an_empty_context() -> None:
    found = match(Story(), "s0 u1")
    assert (found.kept, found.num_kept, found.branch, found.diverges) == (ROOT, 0, None, False)


@pytest.mark.parametrize(
    ("words", "num_kept", "diverges"),
    [
        ("s0 u1 a1", 3, False),
        ("s0 u1 a1 u2", 3, False),
        ("s0 u1", 2, True),
        ("s0 u1 a2", 2, True),
        ("u1 a1", 0, True),
        ("", 0, True),
    ],
)
def test_a_list_goes_on_with_the_branch_or_leaves_it(words: str, num_kept: int, diverges: bool) -> None:
    story = Story()
    story.call("s0 u1 a1")
    found = match(story, words)
    assert (found.num_kept, found.diverges) == (num_kept, diverges)
    assert found.branch is not None


def test_another_head_shares_nothing() -> None:
    story = Story()
    story.call("s0 u1")
    found = match(story, "s0 u1", head="tools changed")
    assert (found.kept, found.num_kept, found.diverges) == (ROOT, 0, True)


def test_of_equal_messages_rendered_otherwise_the_newest_counts() -> None:
    story = Story()
    story.call("s0 u1 a1 t1")
    story.arrive("s0 u1 a1 t1 u2", "c2")
    story.map("c2", stripped=["a1"])
    story.first("c2")
    found = match(story, "s0 u1 a1 t1 u3")
    assert found.kept == story.path_of("s0 u1 a1 t1").id
    on_new = {v.id for v in story.state.versions.values() if v.parent == found.kept}
    assert story.path_of("s0 u1 a1 t1 u2").id in on_new


def test_the_longest_branch_on_the_path_is_the_one_that_goes_on() -> None:
    story = Story()
    story.call("s0 u1")
    story.arrive("s0 u1 a1", "left")
    story.arrive("s0 u1 a2", "right")
    for call in ("left", "right"):
        story.map(call)
        story.first(call)
        story.end(call)
    for words in ("s0 u1 a1 u2", "s0 u1 a2 u2"):
        found = match(story, words)
        assert found.branch is not None
        assert found.branch.tip == found.kept
        assert found.num_kept == 3
        assert not found.diverges


def test_a_list_may_go_on_with_a_call_in_flight() -> None:
    story = Story()
    story.arrive("s0 u1")
    found = match(story, "s0 u1 a1")
    assert found.num_kept == 2
    assert found.branch is None
