"""HBM blocks: hits are a prefix, held blocks stay, the end of a chain goes before its beginning."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.sim.prefix_cache import PrefixCache, block_hashes
from lifecycle.core.ids import split_keys

tokens = st.lists(st.integers(0, 3), max_size=24).map(lambda ids: array("I", ids))


def fill(cache, hashes):
    """A request that computes a chain of blocks; answers them and what had to go."""
    matched = cache.match(hashes)
    missing = len(hashes) - len(matched)
    assert cache.has_room(matched, missing)
    cache.hold(matched, missing)
    taken, lost = cache.take(missing)
    for number, each in zip(taken, hashes[len(matched) :], strict=True):
        cache.publish(number, each)
    return matched + taken, lost


@given(tokens, tokens, st.integers(1, 5))
def test_blocks_share_a_hash_exactly_as_far_as_all_tokens_before_agree(left, right, width):
    ours, theirs = block_hashes(left, width, ""), block_hashes(right, width, "")
    same = 0
    while same < min(len(ours), len(theirs)) and left[: (same + 1) * width] == right[: (same + 1) * width]:
        same += 1
    assert ours[:same] == theirs[:same]
    assert not set(ours[same:]) & set(theirs[same:])


@given(tokens, st.integers(1, 5), st.integers(0, 24))
def test_hashes_can_be_continued(ids, width, known):
    whole = block_hashes(ids, width, "salt")
    assert block_hashes(ids, width, "salt", whole[:known]) == whole


def test_a_salt_changes_every_hash():
    ids = array("I", range(8))
    assert not set(block_hashes(ids, 4, "")) & set(block_hashes(ids, 4, "one"))
    assert not set(block_hashes(ids, 4, "two")) & set(block_hashes(ids, 4, "one"))


def test_block_hashes_are_not_chunk_keys():
    """Both name tokens by a chain; who mixes them up must not be right by accident."""
    ids = array("I", range(8))
    assert block_hashes(ids, 8, "") != split_keys(chunk_keys(ids, 8))


def test_hits_end_at_the_first_gap():
    cache = PrefixCache(8)
    blocks, _ = fill(cache, [b"a", b"b"])
    assert cache.match([b"a", b"b", b"c"]) == blocks
    assert cache.match([b"x", b"b"]) == []


def test_room_is_made_from_the_end_of_the_chain_that_was_let_go_first():
    cache = PrefixCache(4)
    first, _ = fill(cache, [b"a", b"b"])
    second, _ = fill(cache, [b"c", b"d"])
    cache.release(second)
    cache.release(first)
    _, lost = fill(cache, [b"e", b"f", b"g"])
    assert lost == [b"d", b"c", b"b"]
    assert cache.match([b"a"])


def test_what_is_held_stays_and_promises_are_kept():
    cache = PrefixCache(4)
    held, _ = fill(cache, [b"a", b"b"])
    cache.hold([], 1)
    assert cache.has_room([], 1)
    assert not cache.has_room([], 2)
    cache.take(1)
    cache.hold([], 1)
    cache.forgo(1)
    assert cache.match([b"a", b"b"]) == held
    assert not cache.clear()


def test_a_shared_block_is_free_when_its_last_user_lets_go():
    cache = PrefixCache(2)
    blocks, _ = fill(cache, [b"a"])
    again, _ = fill(cache, [b"a"])
    assert again == blocks
    cache.release(blocks)
    assert cache.num_used == 1
    assert not cache.has_room([], 2)
    cache.release(again)
    assert cache.num_used == 0
    assert cache.has_room([], 2)


def test_twins_go_one_by_one_and_the_last_can_still_be_found():
    cache = PrefixCache(2)
    cache.hold([], 2)
    twins, _ = cache.take(2)
    for number in twins:
        cache.publish(number, b"a")
    assert cache.num_cached == 2
    cache.release(twins)
    cache.hold([], 1)
    assert cache.take(1) == ([twins[1]], [b"a"])
    assert cache.match([b"a"]) == [twins[0]]
    cache.hold([], 1)
    assert cache.take(1) == ([twins[0]], [b"a"])
    assert cache.match([b"a"]) == []
    assert cache.num_cached == 0


def test_a_block_that_was_never_full_is_taken_before_any_that_can_be_found():
    cache = PrefixCache(2)
    cache.hold([], 1)
    (empty,), _ = cache.take(1)
    blocks, _ = fill(cache, [b"a"])
    cache.release([*blocks, empty])
    cache.hold([], 1)
    assert cache.take(1) == ([empty], [])


def test_reset_forgets_everything():
    cache = PrefixCache(2)
    blocks, _ = fill(cache, [b"a", b"b"])
    cache.release(blocks)
    assert cache.clear()
    assert cache.num_cached == 0
    assert cache.match([b"a"]) == []
    assert fill(cache, [b"c", b"d"])[1] == []
