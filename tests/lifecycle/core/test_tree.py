"""How tokens land in the tree: who owns a chunk, and that a copy leaves the old version alone."""

from hypothesis import given
from hypothesis import strategies as st

from lifecycle.core.ids import KEY_BYTES
from lifecycle.core.state import TAIL_INDEX, chain, path
from lifecycle.core.tree import tail_of, tail_tag
from tests.lifecycle.core.story import CHUNK, Story, keys_of, mapping_of, prompt_tokens

WORDS = st.lists(st.sampled_from(["s0", "u1", "u2", "a1", "a2", "t1", "t2"]), max_size=8)


@given(WORDS)
def test_ranges_tile_the_prompt_and_each_chunk_has_one_owner(words: list[str]) -> None:
    story = Story()
    story.arrive(" ".join(words))
    story.map()
    (flight,) = story.state.flights
    steps = path(story.state.versions, flight.tail)
    tokens = [t for part in prompt_tokens(words) for t in part]
    assert [s.start for s in steps] == [0, *(s.end for s in steps[:-1])]
    assert steps[-1].end == len(tokens)
    assert chain(story.state.versions, flight.tail) == b"".join(keys_of(tokens))
    for step in steps:
        for i in range(step.num_chunks):
            assert step.start < (step.first_chunk + i + 1) * CHUNK <= step.end


@given(WORDS, WORDS, st.sets(st.sampled_from(["u1", "a1", "a2", "t1"])))
def test_a_second_rendering_shares_exactly_the_common_tokens(
    first: list[str], more: list[str], stripped: set[str]
) -> None:
    story = Story()
    story.call(" ".join(first))
    old = story.path_of(" ".join(first)) if first else None
    story.arrive(" ".join(first + more), "c2")
    before = dict(story.state.versions)
    story.map("c2", stripped=stripped)
    flight = story.state.flight("c2", 1)
    assert flight is not None
    assert chain(story.state.versions, flight.tail) == mapping_of(first + more, stripped=stripped).chunk_keys
    if old is not None:
        assert story.state.versions[old.id] == old
    changed = [i for i, v in story.state.versions.items() if before.get(i) not in (None, v)]
    assert all(not before[i].mapped for i in changed)


def test_a_tail_is_found_by_its_attempt_while_anything_holds_it() -> None:
    story = Story()
    story.call("s0 u1")
    tail = tail_of(story.state, "c1", 1)
    assert tail is not None
    assert (tail.index, tail.digest) == (TAIL_INDEX, tail_tag("c1", 1))
    assert tail_of(story.state, "c1", 2) is None
    story.call("s0 u1 a1", "c2")
    assert tail_of(story.state, "c1", 1) is None


def test_the_tails_chunk_is_not_the_last_messages() -> None:
    story = Story()
    story.call("s0 u1")
    tail = tail_of(story.state, "c1", 1)
    assert tail is not None
    assert tail.end - tail.start == 1
    assert len(tail.keys) in (0, KEY_BYTES)


def test_a_forks_own_call_is_not_taken_for_the_parents_of_the_same_name() -> None:
    mother = Story()
    mother.call("s0 u1")
    child = Story(parent=mother, fork=True)
    child.call("s0 u1")
    child.generate("a1")
    tail = tail_of(child.state, "c1", 1)
    assert tail is not None
    branch = child.state.current_branch()
    assert branch is not None
    assert any(child.state.versions[t].parent == tail.id for t in branch.tails)
    assert child.answer_keys("s0 u1", "a1") <= child.keys_live()
