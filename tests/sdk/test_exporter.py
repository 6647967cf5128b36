"""Operations arrive in order and once, whatever happens on the way; whoever records one never waits."""

import logging
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtether.connection import Connection
from kvtether.exporter import NO_SUCH_CONTEXT, Exporter, Patience
from kvtether.ledger import Ledger
from tests.sdk.ops_server import SECONDS, ops_server


@pytest.fixture
def sending(server):
    sending = Exporter(lambda: Connection(server.url, ""))
    yield sending
    sending.stop()


def append(ledger, linger=0.0, n=1):
    ledger.record({"op": "append", "seq": 0, "ctx": ledger.name, "n": n}, linger)


def test_operations_arrive_in_order(server, sending):
    ledgers = [Ledger(name, sending.take) for name in "abc"]
    for n in range(100):
        for ledger in ledgers:
            append(ledger, n=n + 1)
    assert sending.flush(SECONDS)
    for ledger in ledgers:
        assert [op["n"] for op in server.applied if op["ctx"] == ledger.name] == list(range(1, 101))
        assert ledger.settled == 100


def test_a_fork_leaves_behind_what_its_parent_did_and_before_what_it_does_next(server, sending):
    parent, child = Ledger("p", sending.take), Ledger("c", sending.take)
    server.answer.clear()
    append(parent)
    server.until(lambda it: bool(it.requests))  # the rest comes while this one is under way
    append(parent)
    child.record({"op": "fork", "seq": 0, "ctx": "c", "parent": "p"}, 0.0)
    append(parent)
    server.answer.set()
    assert sending.flush(SECONDS)
    assert [(op["ctx"], op["op"]) for op in server.applied] == [
        ("p", "append"),
        ("p", "append"),
        ("c", "fork"),
        ("p", "append"),
    ]


def test_a_fork_waits_for_a_parent_that_has_to_wait(server, sending):
    parent, child = Ledger("p", sending.take), Ledger("c", sending.take)
    unknown = iter([True, False])

    def verdicts(source, ops):
        if ops[0]["ctx"] == "p" and next(unknown):
            return [{"status": "rejected", "reason": NO_SUCH_CONTEXT} for _ in ops]
        return [{"status": "applied"} for _ in ops]

    server.verdicts = verdicts
    append(parent)
    server.until(lambda it: bool(it.requests))
    child.record({"op": "fork", "seq": 0, "ctx": "c", "parent": "p"}, 0.0)
    assert sending.flush(SECONDS)
    assert [r["ops"][0]["ctx"] for r in server.requests] == ["p", "p", "c"]


def test_what_waits_for_a_call_goes_by_itself_in_the_end(server, sending):
    append(Ledger("c", sending.take), linger=0.01)
    server.until(lambda it: it.kinds() == ["append"])


def test_a_call_that_left_hurries_what_waits(server, sending):
    append(Ledger("c", sending.take), linger=1000.0)
    sending.kick()
    server.until(lambda it: it.kinds() == ["append"])


def test_what_arrived_otherwise_is_not_sent(server, sending):
    ledger = Ledger("c", sending.take)
    append(ledger, linger=1000.0)
    ledger.settle(ledger.source, 1)
    assert sending.flush(SECONDS)
    assert server.requests == []


def test_a_server_that_fails_is_tried_again(server, sending, caplog):
    server.status = 503
    ledger = Ledger("c", sending.take)
    append(ledger)
    server.until(lambda it: len(it.requests) >= 2)
    append(ledger)
    server.status = 200
    server.until(lambda it: [op["seq"] for op in it.applied] == [1, 2])
    assert sending.flush(SECONDS)
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert not sending.failing


def test_who_flushes_is_told_at_once_that_it_failed(server, sending):
    ledger = Ledger("c", sending.take)
    server.status = 503
    append(ledger, linger=1000.0)
    assert not sending.flush(SECONDS)
    server.status = 200
    assert sending.flush(SECONDS), "it does not wait for the next attempt that is planned"
    assert ledger.settled == 1


@settings(max_examples=25)
@given(st.data())
def test_whatever_fails_every_operation_is_applied_once_and_in_order(data):
    """The server may hang up when it has applied, or put off; contexts may be unknown for a while."""
    impatient = (0.0005, 0.001)
    whims = data.draw(st.lists(st.sampled_from(["ok", "fail", "unknown", "later"]), max_size=12))
    steps = data.draw(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), min_size=1, max_size=30))
    left = iter(whims)
    with ops_server() as server:

        def verdicts(source, ops):
            whim = next(left, "ok")
            server.status = 200
            if whim == "unknown":
                return [{"status": "rejected", "reason": NO_SUCH_CONTEXT} for _ in ops]
            results = [server.apply(source, op) for op in (ops if whim != "later" else ops[:1])]
            if whim == "later":
                put_off = {"status": "rejected", "reason": "too many", "retry_after": 0.001}
                results += [put_off, *({"status": "held"} for _ in ops[2:])] if ops[1:] else []
            if whim == "fail":
                raise OSError("the connection ends without an answer")
            return results

        server.verdicts = verdicts
        patience = Patience(failing=impatient, unknown=impatient)
        sending = Exporter(lambda: Connection(server.url, ""), patience)
        ledgers = {name: Ledger(name, sending.take) for name in "ab"}
        for number, (name, urgent) in enumerate(steps):
            append(ledgers[name], linger=0.001, n=number)
            if urgent:
                sending.kick()
        for _ in range(len(whims) + 1):
            if sending.flush(SECONDS):
                break
        sending.stop()
        for name in "ab":
            recorded = [number for number, (ctx, _) in enumerate(steps) if ctx == name]
            assert [op["n"] for op in server.applied if op["ctx"] == name] == recorded


def test_duplicates_count_as_there(server, sending):
    ledger = Ledger("c", sending.take)
    server.verdicts = lambda source, ops: [{"status": "duplicate"} for _ in ops]
    append(ledger)
    assert sending.flush(SECONDS)
    assert ledger.settled == 1


def test_refused_for_now_comes_again_and_what_is_behind_it_too(server, sending):
    ledger = Ledger("c", sending.take)
    first = iter([True, False, False, False])

    def verdicts(source, ops):
        if next(first):
            later = {"status": "rejected", "reason": "too many", "retry_after": 0.01}
            return [later, *({"status": "held"} for _ in ops[1:])]
        return [{"status": "applied"} for _ in ops]

    server.verdicts = verdicts
    append(ledger, linger=0.02)
    append(ledger, linger=0.02)
    assert sending.flush(SECONDS)
    assert ledger.settled == 2
    assert [op["seq"] for op in server.requests[-1]["ops"]][-1] == 2


def test_refused_for_good_is_over(server, sending):
    ledger = Ledger("c", sending.take)
    server.verdicts = lambda source, ops: [{"status": "rejected", "reason": "no list"} for _ in ops]
    append(ledger)
    assert sending.flush(SECONDS)
    assert ledger.settled == 1
    assert not ledger.lost


def test_a_context_whose_call_never_comes_is_given_up(server):
    sending = Exporter(lambda: Connection(server.url, ""), Patience(unknown=(0.001, 0.002)))
    ledger, other = Ledger("c", sending.take), Ledger("d", sending.take)

    def verdicts(source, ops):
        if ops[0]["ctx"] == "c":
            return [{"status": "rejected", "reason": NO_SUCH_CONTEXT} for _ in ops]
        return [{"status": "applied"} for _ in ops]

    server.verdicts = verdicts
    append(ledger)
    append(other)
    assert sending.flush(SECONDS)
    assert ledger.lost
    assert other.settled == 1
    sending.stop()


def test_a_request_that_cannot_be_read_is_not_sent_for_ever(server, sending):
    ledger, other = Ledger("c", sending.take), Ledger("d", sending.take)
    append(other)
    assert sending.flush(SECONDS)
    server.status = 400
    append(ledger)
    assert sending.flush(SECONDS)
    assert ledger.lost
    server.status = 200
    append(other)
    assert sending.flush(SECONDS)
    assert [len(r["ops"]) for r in server.requests] == [1, 1, 1]
    assert not other.lost


def test_who_refuses_everything_is_no_proxy(server, sending, caplog):
    server.status = 400
    for name in "abc":
        append(Ledger(name, sending.take))
        assert sending.flush(SECONDS)
    assert len(server.requests) == 1
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_a_context_that_has_to_wait_holds_up_no_other(server, sending):
    waiting, other = Ledger("c", sending.take), Ledger("d", sending.take)
    waiting.not_before = float("inf")
    append(waiting)
    sending.kick()
    append(other)
    server.until(lambda it: it.kinds("d") == ["append"])
    assert server.kinds("c") == []


def test_nobody_there_ends_it_until_somebody_is_seen(server, sending, caplog):
    server.status = 404
    ledger = Ledger("c", sending.take)
    append(ledger)
    assert sending.flush(SECONDS)
    for _ in range(5):
        ledger.before_call()
        append(ledger)
        assert sending.flush(SECONDS)
    assert len(server.requests) == 1
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    server.status = 200
    sending.found()
    ledger.before_call()
    append(ledger)
    assert sending.flush(SECONDS)
    assert server.kinds() == ["append"]


def test_memory_is_bounded_while_nothing_leaves(server):
    sending = Exporter(lambda: Connection(server.url, ""), capacity=500)
    server.answer.clear()
    ledgers = [Ledger(f"c{n}", sending.take) for n in range(10)]
    for _ in range(60):
        for ledger in ledgers:
            append(ledger)
    kept = sum(ledger.last for ledger in ledgers)
    assert kept <= 500
    assert all(ledger.lost for ledger in ledgers)
    server.answer.set()
    assert sending.flush(SECONDS)
    assert len(server.applied) == kept
    sending.stop()


def test_it_ends_and_begins_again(server, sending):
    others = threading.enumerate()
    ledger = Ledger("c", sending.take)
    append(ledger)
    assert sending.flush(SECONDS)
    sending.stop()
    assert not [t for t in threading.enumerate() if t.name == "kvtether" and t not in others]
    append(ledger)
    assert sending.flush(SECONDS)
    assert server.kinds() == ["append", "append"]


def test_nothing_recorded_needs_no_thread(sending):
    assert sending.flush(0.0)
    sending.kick()
    sending.stop()
