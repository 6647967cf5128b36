"""Numbers without gaps, whatever threads do; what is lost takes no number with it."""

import gc
import threading

import pytest

from kvtether.ledger import Entry, Ledger


class Queue:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.room = True

    def __call__(self, entry: Entry) -> bool:
        if self.room:
            self.entries.append(entry)
        return self.room


def op() -> dict[str, object]:
    return {"op": "append", "seq": 0, "ctx": "c", "n": 1}


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_threads_number_without_gaps_and_queue_in_order(queue):
    ledger = Ledger("c", queue)
    threads = [
        threading.Thread(target=lambda: [ledger.record(op(), 0.0) for _ in range(200)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry.operation["seq"] for entry in queue.entries] == list(range(1, 801))


def test_each_ledger_numbers_under_a_source_of_its_own(queue):
    one, other = Ledger("c", queue), Ledger("c", queue)
    one.record(op(), 0.0)
    other.record(op(), 0.0)
    assert [e.operation["seq"] for e in queue.entries] == [1, 1]
    assert one.source != other.source
    assert len(one.source) <= 128


def test_what_is_settled_does_not_ride(queue):
    ledger = Ledger("c", queue)
    for _ in range(3):
        ledger.record(op(), 0.0)
    ledger.settle(ledger.source, 2)
    assert [e.settled for e in queue.entries] == [True, True, False]
    _, last, unsettled = ledger.before_call()
    assert (last, [o["seq"] for o in unsettled]) == (3, [3])


def test_a_full_queue_costs_no_number_and_the_next_call_heals(queue):
    ledger = Ledger("c", queue)
    ledger.record(op(), 0.0)
    queue.room = False
    ledger.record(op(), 0.0)
    queue.room = True
    ledger.record(op(), 0.0)
    assert len(queue.entries) == 1, "spans would count from a list that the proxy does not know"
    assert ledger.before_call()[1] == 1
    ledger.record(op(), 0.0)
    assert [e.operation["seq"] for e in queue.entries] == [1, 2]


def test_who_gives_up_begins_anew_after_the_next_call(queue):
    ledger = Ledger("c", queue)
    ledger.record(op(), 0.0)
    (entry,) = queue.entries
    ledger.give_up()
    assert entry.settled
    ledger.record(op(), 0.0)
    assert queue.entries == [entry]
    source, last, unsettled = ledger.before_call()
    assert (last, unsettled) == (0, [])
    assert source != entry.source
    ledger.record(op(), 0.0)
    assert queue.entries[-1].operation["seq"] == 1
    ledger.settle(entry.source, 1)
    assert not queue.entries[-1].settled, "another source's answer says nothing"


def test_giving_up_nothing_loses_nothing(queue):
    ledger = Ledger("c", queue)
    ledger.record(op(), 0.0)
    ledger.settle(ledger.source, 1)
    ledger.give_up()
    assert not ledger.lost


def test_it_is_known_whether_a_context_began(queue):
    ledger = Ledger("c", queue)
    assert not ledger.opening
    ledger.record(op(), 0.0)
    assert ledger.opening
    ledger.settle(ledger.source, 1)
    ledger.record(op(), 0.0)
    assert not ledger.opening


def test_a_ledger_goes_with_its_context(queue):
    import weakref

    ledger = Ledger("c", queue)
    ref = weakref.ref(ledger)
    del ledger
    gc.collect()
    assert ref() is None
