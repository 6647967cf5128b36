"""The cache below the engine: what a store, a hit, a delete, a pin and a restart do to L1 and L2."""

import pytest

from engine_bridge.sim.chunk_store import ChunkStore
from engine_bridge.sim.transfers import Agenda
from lifecycle.vocabulary import Tier
from tests.engine_bridge.sim.toy_engine import config

L1, L2 = frozenset({Tier.L1}), frozenset({Tier.L2})
BOTH = L1 | L2


def key(number):
    return bytes([number]) * 32


def keys(*numbers):
    return [key(number) for number in numbers]


class Shelf:
    """A store with the time it has come to."""

    def __init__(self, **changes):
        self.agenda = Agenda()
        self.removed = []
        self.store = ChunkStore(config(**changes), self.agenda, self.removed.extend)
        self.now_ns = 0

    def play(self, until_ns=1 << 40):
        while True:
            due = [self.agenda.next_ns(), *(link.next_ns() for link in self.store.links)]
            due = [at_ns for at_ns in due if at_ns is not None and at_ns <= until_ns]
            if not due:
                return
            self.now_ns = min(due)
            self.agenda.run(self.now_ns)
            for link in self.store.links:
                link.run(self.now_ns)

    def put(self, *numbers, salt=""):
        """Store chunks; answers those that were announced, once all is quiet."""
        announced = []
        chunks = [(salt, each) for each in keys(*numbers)]
        self.store.store(chunks, self.now_ns, lambda _, stored: announced.extend(stored))
        self.play()
        return [each[0] for _, each in announced]

    def where(self, *numbers, salt=""):
        return self.store.locate(salt, keys(*numbers))

    def delete(self, *numbers, tiers=BOTH):
        return self.store.delete("", keys(*numbers), tiers, self.now_ns)


def test_a_store_is_announced_when_it_can_be_read_and_reaches_l2_later():
    shelf = Shelf()
    shelf.store.store([("", key(1)), ("", key(2))], 0, lambda _, __: None)
    assert shelf.where(1, 2) == [frozenset()] * 2
    shelf.play(26)  # 10 ns latency, 16 bytes
    assert shelf.where(1, 2) == [L1] * 2
    shelf.play(26 + 500 + 25)
    assert shelf.where(1, 2) == [L1] * 2
    shelf.play(26 + 500 + 26)
    assert shelf.where(1, 2) == [BOTH] * 2


def test_a_chunk_is_stored_once_and_each_salt_has_its_own():
    shelf = Shelf()
    assert shelf.put(1, 2) == [1, 2]
    assert shelf.put(1, 2, 3) == [3]
    assert shelf.put(1, salt="other") == [1]
    assert shelf.where(2, salt="other") == [frozenset()]


def test_a_store_without_room_keeps_nothing():
    shelf = Shelf(l1_bytes=8 * 4, l1_watermark_percent=100)
    shelf.put(1, 2, 3)
    assert shelf.put(4, 5) == []
    assert shelf.where(4, 5) == [frozenset()] * 2
    assert shelf.store.num_refused_stores == 1
    assert shelf.put(4) == [4]


def test_above_the_watermark_the_evictor_takes_a_share_of_the_oldest():
    shelf = Shelf(l1_bytes=8 * 10, l2_bytes=0)
    shelf.put(1, 2, 3, 4)
    shelf.put(5, 6, 7, 8)
    assert shelf.now_ns % 10_000 == 0
    # A fifth of eight is one: of the request that was stored first the last chunk.
    assert [each[0] for _, each in shelf.removed] == [4]
    assert shelf.where(4, 8) == [frozenset(), L1]


def test_hits_are_a_prefix_over_both_tiers():
    shelf = Shelf()
    shelf.put(1, 2, 3, 5)
    shelf.delete(2, tiers=L1)
    lease = shelf.store.acquire("", keys(1, 2, 3, 4, 5), 0)
    assert lease.num_hits == 3
    assert [each[0] for _, each in lease.l1] == [1, 3]
    assert [each[0] for _, each in lease.l2] == [2]


def test_what_the_engine_has_is_not_loaded():
    shelf = Shelf()
    shelf.put(1, 2, 3)
    lease = shelf.store.acquire("", keys(1, 2, 3), 2)
    assert lease.num_hits == 3
    assert [each[0] for _, each in lease.l1] == [3]


def test_hits_in_l2_need_room_in_l1():
    shelf = Shelf(l1_bytes=8 * 3, l1_watermark_percent=100)
    shelf.put(1, 2)
    shelf.delete(1, 2, tiers=L1)
    shelf.put(8, 9)
    lease = shelf.store.acquire("", keys(1, 2), 0)
    assert lease.num_hits == 1
    assert shelf.store.l1.free_bytes == 0
    shelf.store.release(lease, shelf.now_ns)
    assert shelf.store.l1.free_bytes == 8


def test_what_is_leased_is_in_use():
    shelf = Shelf()
    shelf.put(1, 2, 3)
    shelf.delete(2, tiers=L1)
    lease = shelf.store.acquire("", keys(1, 2), 0)
    answer = shelf.delete(1, 2, 3)
    assert (answer.in_use, answer.deleted) == (tuple(keys(1, 2)), (key(3),))
    assert shelf.where(1, 2) == [BOTH, L2]
    shelf.store.release(lease, shelf.now_ns)
    assert shelf.delete(1, 2).deleted == tuple(keys(1, 2))


def test_deleting_twice_changes_nothing():
    shelf = Shelf()
    shelf.put(1, 2)
    assert shelf.delete(1, 1).deleted == (key(1),)
    assert shelf.delete(1).absent == (key(1),)
    assert shelf.where(1, 2) == [frozenset(), BOTH]
    assert [each[0] for _, each in shelf.removed] == [1]


def test_a_chunk_that_is_being_stored_is_in_use():
    shelf = Shelf()
    shelf.store.store([("", key(1))], 0, lambda _, __: None)
    assert shelf.delete(1).in_use == (key(1),)
    shelf.play()
    assert shelf.where(1) == [BOTH]


def test_a_copy_that_has_not_begun_does_not_bring_a_deleted_chunk_back():
    shelf = Shelf()
    shelf.store.store([("", key(1))], 0, lambda _, __: None)
    shelf.play(18)
    assert shelf.delete(1).deleted == (key(1),)
    shelf.play()
    assert shelf.where(1) == [frozenset()]


def test_a_copy_under_way_refuses_the_delete_and_comes_to_l2():
    shelf = Shelf()
    shelf.store.store([("", key(1))], 0, lambda _, __: None)
    shelf.play(18 + 500)
    assert shelf.delete(1).in_use == (key(1),)
    assert shelf.delete(1, tiers=L2).absent == (key(1),)
    shelf.play()
    assert shelf.where(1) == [BOTH]


def test_pins_are_counted_and_hold_the_copy_in_l2():
    shelf = Shelf()
    shelf.put(1, 2)
    shelf.store.pin("", keys(1))
    shelf.store.pin("", keys(1, 2))
    assert shelf.store.pins("") == {key(1): 2, key(2): 1}
    assert shelf.store.pins("other") == {}
    assert shelf.delete(1, 2).pinned == tuple(keys(1, 2))
    assert shelf.delete(1, tiers=L1).deleted == (key(1),)
    shelf.store.unpin("", keys(1, 2, 3), shelf.now_ns)
    assert shelf.store.pins("") == {key(1): 1}
    answer = shelf.delete(1, 2)
    assert (answer.pinned, answer.deleted) == ((key(1),), (key(2),))


def test_the_only_copy_of_a_pinned_chunk_stays_in_l1():
    shelf = Shelf(l2_bytes=0)
    shelf.put(1)
    shelf.store.pin("", keys(1))
    assert shelf.delete(1, tiers=L1).pinned == (key(1),)


def test_l2_evicts_what_is_not_pinned_and_sleeps_when_all_is():
    shelf = Shelf(l2_bytes=8 * 5)
    shelf.store.pin("", keys(1, 2, 3, 4))
    shelf.put(1, 2, 3, 4)
    assert shelf.where(1, 2, 3, 4) == [BOTH] * 4
    shelf.store.unpin("", keys(2), shelf.now_ns)
    shelf.play()
    assert shelf.where(1, 2, 3, 4) == [BOTH, L1, BOTH, BOTH]


def test_a_copy_without_room_in_l2_is_counted():
    shelf = Shelf(l2_bytes=8, l2_watermark_percent=100)
    shelf.store.pin("", keys(1))
    shelf.put(1)
    shelf.put(2)
    assert shelf.where(1, 2) == [BOTH, L1]
    assert shelf.store.num_refused_copies == 1


def test_prefetch_fills_free_room_below_the_watermark_and_evicts_nothing():
    shelf = Shelf(l1_bytes=8 * 10)
    shelf.put(1, 2, 3)
    shelf.delete(1, 2, 3, tiers=L1)
    shelf.put(4, 5, 6, 7, 8)
    assert shelf.store.prefetch("", keys(9, 1, 1, 2, 3), shelf.now_ns) == 2
    assert shelf.delete(1).in_use == (key(1),)
    shelf.play()
    assert shelf.where(1, 2, 3, 4, 8) == [BOTH, BOTH, L2, BOTH, BOTH]
    assert shelf.store.prefetch("", keys(3), shelf.now_ns) == 0


def test_a_new_server_has_an_empty_l1_and_the_old_l2_and_pins():
    shelf = Shelf()
    shelf.put(1, 2)
    shelf.store.pin("", keys(1))
    shelf.store.restart()
    assert shelf.store.incarnation == 2
    assert sorted(each[0] for _, each in shelf.removed) == [1, 2]
    assert shelf.where(1, 2) == [L2, L2]
    assert shelf.store.pins("") == {key(1): 1}


@pytest.mark.parametrize("until_ns", [0, 18, 18 + 500])
def test_what_is_under_way_when_the_server_ends_comes_to_nothing(until_ns):
    shelf = Shelf()
    announced = []
    shelf.store.store([("", key(1))], 0, lambda _, stored: announced.extend(stored))
    shelf.play(until_ns)
    told_before = list(announced)
    shelf.store.restart()
    shelf.play()
    assert announced == told_before
    assert shelf.where(1) == [frozenset()]
    assert shelf.store.l1.used_bytes == shelf.store.l2.used_bytes == 0
    assert shelf.put(1) == [1]


def test_a_lease_of_the_old_server_holds_nothing_in_the_new_one():
    shelf = Shelf()
    shelf.put(1, 2)
    shelf.delete(2, tiers=L1)
    lease = shelf.store.acquire("", keys(1, 2), 0)
    shelf.store.restart()
    shelf.put(1)
    assert shelf.delete(1, 2).in_use == (key(2),)
    shelf.store.release(lease, shelf.now_ns)
    assert shelf.delete(1, 2).deleted == (key(2),)
    assert shelf.store.l1.used_bytes == 0
