"""Changes lead from any list to any other, and leave alone what is in both."""

from hypothesis import given
from hypothesis import strategies as st

from kvtether import list_changes
from kvtether.list_changes import Change, changes

LISTS = st.lists(st.sampled_from("abcdef"), max_size=12)


def applied(old, new, found):
    """The old list with the changes made, each new message taken from where it ends up."""
    result = list(old)
    for start, stop, n in found:
        assert 0 <= start <= stop <= len(result)
        result[start:stop] = new[start : start + n]
    return result


@given(LISTS, LISTS)
def test_changes_lead_from_one_list_to_the_other(old, new):
    assert applied(old, new, changes(old, new)) == new


@given(LISTS)
def test_no_change_is_no_change(messages):
    assert changes(messages, list(messages)) == []


@given(LISTS, LISTS)
def test_what_was_added_is_one_change(old, added):
    assert changes(old, old + added) == ([Change(len(old), len(old), len(added))] if added else [])


def test_removals_are_told_apart():
    assert changes([*"abcdefg"], [*"acdfg"]) == [Change(1, 2, 0), Change(3, 4, 0)]


def test_messages_are_compared_by_what_they_say():
    old = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    new = [{"content": "a", "role": "user"}, {"role": "assistant", "content": "c"}]
    assert changes(old, new) == [Change(1, 2, 1)]


def test_messages_may_be_told_apart_by_a_key():
    old = [{"id": 1, "cost": 3}, {"id": 2, "cost": 4}]
    assert changes(old, [{"id": 1, "cost": 9}, {"id": 3}], lambda m: m["id"]) == [Change(1, 2, 1)]


def test_what_cannot_be_compared_is_another():
    class Odd:
        def __eq__(self, other):
            raise TypeError("not with me")

        __hash__ = None

    odd = Odd()
    assert changes([odd], [odd]) == []
    assert changes([odd], [Odd()]) == [Change(0, 1, 1)]


def test_very_long_lists_are_one_change():
    half = int(list_changes.MAX_PAIRS**0.5) + 1
    old = [f"old {i}" for i in range(half)]
    new = [f"new {i}" for i in range(half)]
    new[3] = old[5]
    assert changes(old, new) == [Change(0, half, half)]
