"""One tier against a dictionary: bytes add up, locks hold, the least recently touched goes first."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_bridge.sim.tiers import LruOrder, Tier

SIZE = 10


def chunk(number):
    return ("", bytes([number]) * 32)


def chunks(*numbers):
    return [chunk(number) for number in numbers]


def tier_with(*numbers, capacity=8):
    tier = Tier(capacity * SIZE, SIZE, LruOrder())
    tier.reserve(chunks(*numbers))
    tier.commit(chunks(*numbers))
    return tier


def evict_all(tier, may_go=lambda _: True):
    gone = []
    while lost := tier.evict(1, may_go):
        gone += lost
    return gone


def test_of_one_request_the_last_chunk_goes_first():
    assert evict_all(tier_with(1, 2, 3)) == chunks(3, 2, 1)


def test_the_least_recently_touched_goes_first():
    tier = tier_with(1, 2, 3)
    tier.touch(chunks(2, 3))
    assert evict_all(tier) == chunks(1, 3, 2)


def test_a_share_of_all_chunks_goes_at_least_one():
    assert tier_with(1, 2, 3, 4).evict(50, lambda _: True) == chunks(4, 3)
    assert tier_with(1, 2, 3).evict(1, lambda _: True) == chunks(3)


def test_what_is_locked_or_kept_stays():
    tier = tier_with(1, 2, 3, 4)
    tier.lock(chunks(4))
    assert evict_all(tier, lambda each: each != chunk(3)) == chunks(2, 1)
    assert not tier.delete(chunk(4))
    tier.unlock(chunks(4))
    assert tier.delete(chunk(4))
    assert not tier.delete(chunk(4))


def test_room_is_taken_for_all_or_for_none():
    tier = tier_with(1, 2, capacity=4)
    assert not tier.reserve(chunks(3, 4, 5))
    assert tier.free_bytes == 2 * SIZE
    assert tier.reserve(chunks(3, 4))
    assert chunk(3) not in tier
    assert tier.is_being_written(chunk(3))
    tier.commit(chunks(3))
    tier.abandon(chunks(4))
    assert chunk(3) in tier
    assert tier.free_bytes == SIZE


@pytest.mark.parametrize(("number", "percent", "above"), [(7, 80, False), (8, 80, True), (0, 1, False)])
def test_the_watermark_is_reached_at_it(number, percent, above):
    assert tier_with(*range(number), capacity=10).is_above(percent) is above


def test_a_tier_that_is_not_there_takes_nothing():
    tier = Tier(0, SIZE, LruOrder())
    assert not tier.reserve(chunks(1))
    assert not tier.is_above(80)


numbers = st.lists(st.integers(0, 15), unique=True, max_size=6)


class TierMachine(RuleBasedStateMachine):
    """The model: committed chunks with their locks, oldest touch first, and what is being written or lent."""

    def __init__(self):
        super().__init__()
        self.tier = Tier(12 * SIZE, SIZE, LruOrder())
        self.locks = {}
        self.writing = []
        self.lent = 0

    @property
    def room(self):
        return 12 - len(self.locks) - sum(map(len, self.writing)) - self.lent

    @rule(wanted=numbers)
    def reserve(self, wanted):
        busy = {number for written in self.writing for number in written}
        new = [number for number in wanted if number not in self.locks and number not in busy]
        assert self.tier.missing(chunks(*wanted)) == chunks(*new)
        fits = len(new) <= self.room
        assert self.tier.reserve(chunks(*new)) is fits
        if fits and new:
            self.writing.append(new)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def commit(self, data):
        written = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        self.tier.commit(chunks(*written))
        self.locks |= dict.fromkeys(reversed(written), 0)

    @precondition(lambda self: self.writing)
    @rule()
    def abandon(self):
        self.tier.abandon(chunks(*self.writing.pop()))

    @rule(count=st.integers(1, 4))
    def lend(self, count):
        fits = count <= self.room
        assert self.tier.lend(count * SIZE) is fits
        self.lent += count * fits

    @precondition(lambda self: self.lent)
    @rule()
    def take_back(self):
        self.tier.take_back(SIZE)
        self.lent -= 1

    @rule(wanted=numbers)
    def touch(self, wanted):
        self.tier.touch(chunks(*wanted))
        for number in reversed(wanted):
            if number in self.locks:
                self.locks[number] = self.locks.pop(number)

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def lock(self, data):
        number = data.draw(st.sampled_from(sorted(self.locks)))
        self.tier.lock(chunks(number))
        self.locks[number] += 1

    @precondition(lambda self: any(self.locks.values()))
    @rule()
    def unlock(self):
        number = next(number for number, count in self.locks.items() if count)
        self.tier.unlock(chunks(number))
        self.locks[number] -= 1

    @rule(number=st.integers(0, 15))
    def delete(self, number):
        may = self.locks.get(number) == 0
        assert self.tier.delete(chunk(number)) is may
        if may:
            del self.locks[number]

    @rule(percent=st.integers(1, 100), kept=st.integers(0, 15))
    def evict(self, percent, kept):
        count = max(1, len(self.locks) * percent // 100)
        free = [number for number, locked in self.locks.items() if not locked and number != kept][:count]
        assert self.tier.evict(percent, lambda each: each != chunk(kept)) == chunks(*free)
        for number in free:
            del self.locks[number]

    @rule()
    def clear(self):
        assert sorted(self.tier.clear()) == sorted(chunks(*self.locks))
        self.locks, self.writing, self.lent = {}, [], 0

    @invariant()
    def bytes_add_up(self):
        usage = self.tier.usage()
        assert usage.num_chunks == len(self.tier) == len(self.locks)
        assert usage.reserved_bytes == (sum(map(len, self.writing)) + self.lent) * SIZE
        assert usage.used_bytes == len(self.locks) * SIZE + usage.reserved_bytes
        assert usage.used_bytes + self.tier.free_bytes == usage.capacity_bytes
        assert self.tier.free_bytes >= 0
        assert usage.num_stored - usage.num_evicted - usage.num_deleted >= usage.num_chunks

    @invariant()
    def the_same_chunks_are_found(self):
        assert set(self.tier) == set(chunks(*self.locks))
        assert all(self.tier.is_locked(chunk(number)) == (count > 0) for number, count in self.locks.items())


TestTierMachine = TierMachine.TestCase
