"""Runs: cut only where they must be, found by any key, keys shared with whoever brought them."""

from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from lifecycle.core.ids import KEY_BYTES, split_keys
from lifecycle.core.plan import ChunkFlag
from lifecycle.projections.chunk_runs import RunBook


def chain(name: int, num_chunks: int, *, colliding: bool = False) -> bytes:
    digests = (blake2b(bytes([name, i]), digest_size=KEY_BYTES).digest() for i in range(num_chunks))
    return b"".join(bytes(8) + d[8:] if colliding else d for d in digests)


def test_a_run_keeps_the_very_bytes_it_was_brought_as():
    book = RunBook()
    keys = chain(1, 40)
    assert book.insert(keys, 1, 0, "c").keys is keys


@given(st.integers(1, 12), st.data(), st.booleans())
def test_cut_anywhere_every_key_is_found_in_its_place(num_chunks, data, colliding):
    book = RunBook()
    keys = chain(1, num_chunks, colliding=colliding)
    book.insert(keys, 1, 0, "c")
    start = data.draw(st.integers(0, num_chunks - 1))
    stop = data.draw(st.integers(start + 1, num_chunks))
    (stretch,) = book.stretches(keys[start * KEY_BYTES : stop * KEY_BYTES])
    run = book.isolate(stretch)
    assert run.keys == keys[start * KEY_BYTES : stop * KEY_BYTES]
    assert book.num_runs == 1 + (start > 0) + (stop < num_chunks)
    for key in split_keys(keys):
        found = book.find(key)
        assert found is not None
        assert split_keys(found[0].keys)[found[1]] == key
    book.drop(run)
    assert book.num_chunks == num_chunks - (stop - start)
    assert all(book.find(key) is None for key in split_keys(run.keys))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1), st.booleans())
def test_stretches_tile_what_was_asked(parts, colliding):
    book = RunBook()
    known = chain(0, 3, colliding=colliding)
    book.insert(known, 1, 0, "c")
    asked = b"".join(chain(name, length, colliding=colliding) for name, length in parts)
    tiled = b""
    for stretch in book.stretches(asked):
        if stretch.run is None:
            assert not any(book.find(key) for key in split_keys(stretch.keys))
            tiled += stretch.keys
        else:
            tiled += stretch.run.keys[stretch.at * KEY_BYTES :][: stretch.num_chunks * KEY_BYTES]
    assert tiled == asked


def test_a_key_is_not_found_across_the_border_of_two_others():
    """Half of one key and half of the next make 32 bytes that are no key."""
    book = RunBook()
    keys = chain(1, 2, colliding=True)
    book.insert(keys[:KEY_BYTES] + bytes(8) + keys[KEY_BYTES + 8 :], 1, 0, "c")
    straddling = keys[16 : 16 + KEY_BYTES]
    assert book.find(bytes(8) + straddling[8:]) is None
    assert book.find(straddling) is None


def test_marking_part_of_a_run_does_not_cut_it():
    book = RunBook()
    keys = chain(1, 5)
    run = book.insert(keys, 1, 0, "c")
    (middle,) = book.stretches(keys[KEY_BYTES : 3 * KEY_BYTES])
    book.mark(middle, ChunkFlag.VERIFIED)
    assert book.num_runs == 1
    assert [bool(flags & ChunkFlag.VERIFIED) for flags in run.flags] == [False, True, True, False, False]
    assert book.num_verified == 2
