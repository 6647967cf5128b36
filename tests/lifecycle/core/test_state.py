"""Questions about a state: paths, chains, who holds what, how strongly."""

from msgspec.structs import replace

from lifecycle.core.observations import PinSpan
from lifecycle.core.state import ROOT, chain, facts, list_path, live_ids, path, pruned, version_states
from lifecycle.vocabulary import VersionState
from tests.lifecycle.core.story import Story, fact


def two_branches() -> Story:
    story = Story()
    story.call("s0 u1")
    story.arrive("s0 u1 a1", "left")
    story.arrive("s0 u1 a2", "right")
    for call in ("left", "right"):
        story.map(call)
        story.first(call)
        story.end(call)
    return story


def test_a_path_leads_from_the_head_and_is_empty_for_no_version() -> None:
    story = two_branches()
    assert path(story.state.versions, ROOT) == []
    steps = path(story.state.versions, story.path_of("s0 u1 a1").id)
    assert [s.index for s in steps] == [-1, 0, 1, 2]
    assert facts(list_path(story.state, steps[-1].id)) == [fact("s0"), fact("u1"), fact("a1")]
    assert set(split(chain(story.state.versions, steps[-1].id))) == story.chain("s0 u1 a1")


def split(run: bytes) -> list[bytes]:
    return [run[i : i + 32] for i in range(0, len(run), 32)]


def test_live_sets_are_closed_under_prefixes() -> None:
    story = two_branches()
    live = live_ids(story.state.versions, [story.path_of("s0 u1 a1").id])
    assert all(story.state.versions[i].parent in {*live, ROOT} for i in live)


def test_pruning_keeps_what_is_held_and_only_that() -> None:
    story = two_branches()
    assert pruned(story.state) is story.state
    kept = pruned(replace(story.state, branches=story.state.branches[:1]))
    assert set(kept.versions) < set(story.state.versions)
    assert pruned(replace(story.state, branches=())).versions == {}


def test_the_strongest_holder_gives_the_state() -> None:
    story = two_branches()
    story.do(PinSpan, span=(0, 1))
    story.arrive("s0 u1", "c3")
    story.map("c3")
    live = story.live()
    assert live["s0"] is VersionState.PINNED
    assert live["s0 u1"] is VersionState.ACTIVE
    assert live["s0 u1 a2"] is VersionState.SUSPENDED
    assert set(version_states(story.state)) == set(story.state.versions)


def test_the_current_branch_is_the_open_one_advanced_last() -> None:
    story = two_branches()
    current = story.state.current_branch()
    assert current is not None
    assert current.tip == story.path_of("s0 u1 a2").id
    assert story.state.branch(current.id) == current
    assert story.state.branch(99) is None
    story.close()
    assert story.state.current_branch() is None
