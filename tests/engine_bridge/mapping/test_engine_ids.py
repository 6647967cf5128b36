"""Mapping by the engine's own ids: right keys always, boundaries as far as differences tell."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.mapping.engine_ids import EngineIdsMapper

CHUNK = 4


def lists():
    return st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=6)


@given(st.lists(lists(), min_size=1, max_size=5))
def test_keys_are_the_prompts_and_ranges_tile_it(calls):
    mapper = EngineIdsMapper(CHUNK)
    for messages in calls:
        ids = [token for message in messages for token in message]
        mapped = mapper.map("c", len(messages), ids)
        assert mapped.chunk_keys == chunk_keys(array("I", ids), CHUNK)
        assert len(mapped.message_ends) == len(messages)
        assert list(mapped.message_ends) == sorted(mapped.message_ends)
        assert mapped.num_tokens == len(ids)
        assert mapped.message_ends[-1] <= len(ids)


@given(lists(), st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_a_list_that_grows_keeps_the_ends_it_had(messages, more):
    mapper = EngineIdsMapper(CHUNK)
    ids = [token for message in messages for token in message]
    before = mapper.map("c", len(messages), ids)
    after = mapper.map("c", len(messages) + 1, ids + more)
    assert after.message_ends[:-1] == before.message_ends
    assert after.num_kept_tokens == len(ids)


@given(lists(), st.data())
def test_an_edit_ends_every_later_message_no_earlier_than_the_edit(messages, data):
    mapper = EngineIdsMapper(CHUNK)
    for count in range(1, len(messages) + 1):
        before = mapper.map("c", count, [t for m in messages[:count] for t in m])
    at = data.draw(st.integers(0, len(messages) - 1))
    edited = [*messages[:at], [9], *messages[at + 1 :]]
    after = mapper.map("c", len(edited), [t for m in edited for t in m])
    assert after.message_ends[:at] == before.message_ends[:at]
    unchanged_chunks = sum(map(len, messages[:at])) // CHUNK * CHUNK
    assert all(end >= min(unchanged_chunks, after.message_ends[-1]) for end in after.message_ends[at:])


def test_scaffold_at_the_end_of_a_prompt_belongs_to_no_message_once_it_is_known():
    mapper = EngineIdsMapper(CHUNK)
    scaffold = [7, 8, 9]
    first = [1] * 9
    mapper.map("a", 1, first + scaffold)
    mapper.map("a", 2, [*first, 5, 5, *scaffold])
    # Another context's scaffold crosses a chunk's end: its message ends before it, and stays so.
    before = mapper.map("b", 1, first + scaffold)
    assert before.message_ends == (8,)
    assert mapper.map("b", 2, [*first, 6, 6, *scaffold]).message_ends[:1] == before.message_ends


def test_contexts_do_not_share_states():
    mapper = EngineIdsMapper(CHUNK)
    mapper.map("one", 1, [1, 2, 3])
    assert mapper.map("two", 1, [1, 2, 3]).num_kept_tokens == 0
    assert list(mapper.token_ids("one") or ()) == [1, 2, 3]
    assert mapper.token_ids("three") is None
