"""Timers run in order; a link is shared evenly and loses no byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.sim.transfers import Agenda, Link

GIGABYTE = 1_000_000_000


def play(agenda, link, until=1 << 62):
    while (
        at_ns := min((t for t in (agenda.next_ns(), link.next_ns()) if t is not None), default=until)
    ) < until:
        agenda.run(at_ns)
        link.run(at_ns)


def test_actions_run_by_time_and_then_in_the_order_they_came():
    agenda, ran = Agenda(), []
    for name, at_ns in (("b", 5), ("a", 3), ("c", 5)):
        agenda.at(at_ns, lambda ns, name=name: ran.append((name, ns)))
    assert agenda.next_ns() == 3
    agenda.run(5)
    assert ran == [("a", 3), ("b", 5), ("c", 5)]
    assert agenda.next_ns() is None


def test_an_action_may_call_for_another_at_once():
    agenda, ran = Agenda(), []
    agenda.at(1, lambda ns: agenda.at(ns, ran.append))
    agenda.run(1)
    assert ran == [1]


def test_alone_a_transfer_has_the_whole_link():
    agenda = Agenda()
    link, ends = Link(agenda, GIGABYTE, 10), []
    link.start(100, 0, ends.append)
    play(agenda, link)
    assert ends == [110]


def test_two_transfers_share_it():
    agenda = Agenda()
    link, ends = Link(agenda, GIGABYTE), []
    link.start(100, 0, lambda ns: ends.append(("long", ns)))
    link.start(40, 20, lambda ns: ends.append(("short", ns)))
    play(agenda, link)
    # 20 bytes alone; then both at half speed until the 40 are through at 20 + 80; 40 bytes are left.
    assert ends == [("short", 100), ("long", 140)]


def test_a_link_without_bandwidth_is_refused():
    with pytest.raises(ValueError, match="bandwidth"):
        Link(Agenda(), 0)


@given(
    st.lists(st.tuples(st.integers(0, 5_000), st.integers(1, 5_000)), min_size=1, max_size=12),
    st.integers(1, 3 * GIGABYTE),
)
def test_transfers_end_no_sooner_than_alone_and_no_later_than_one_after_the_other(jobs, bandwidth):
    agenda = Agenda()
    link, ends = Link(agenda, bandwidth), {}
    for number, (at_ns, size) in enumerate(jobs):
        agenda.at(
            at_ns, lambda ns, n=number, size=size: link.start(size, ns, lambda end: ends.update({n: end}))
        )
    play(agenda, link)
    assert len(ends) == len(jobs)
    assert link.num_active == 0
    assert link.bytes_moved == sum(size for _, size in jobs)
    for number, (at_ns, size) in enumerate(jobs):
        assert ends[number] >= at_ns + size * GIGABYTE // bandwidth
    last = max(at_ns for at_ns, _ in jobs)
    total = sum(size for _, size in jobs)
    assert max(ends.values()) <= last + -(-total * GIGABYTE // bandwidth) + len(jobs)


@given(st.lists(st.integers(1, 1_000), min_size=2, max_size=8))
def test_of_transfers_that_start_together_the_smaller_end_first(sizes):
    agenda = Agenda()
    link, ends = Link(agenda, GIGABYTE), []
    for size in sizes:
        link.start(size, 0, lambda ns, size=size: ends.append((ns, size)))
    play(agenda, link)
    assert [size for _, size in ends] == sorted(sizes)
