"""What two lists have in common is found however it is asked for, and what is known is not computed again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.list_chains import cumulative, digests_of, link, num_head, shared_digests, shared_messages
from tests.proxy.conversations import chat, system, user

short = st.lists(st.sampled_from([bytes([n]) * 16 for n in range(3)]), max_size=12).map(b"".join)


@pytest.mark.parametrize(("n", "k"), [(0, 0), (1, 1), (7, 3), (64, 63), (64, 64)])
def test_shared_beginnings_are_counted(n: int, k: int) -> None:
    one = digests_of(chat([user(str(i)) for i in range(n)]).messages)
    other = digests_of(chat([user(str(i) if i < k else f"x{i}") for i in range(n + 5)]).messages)
    assert shared_digests(one, other) == k
    assert shared_messages(cumulative(one), cumulative(other)) == k


@given(short, short)
def test_a_known_beginning_changes_nothing(one: bytes, other: bytes) -> None:
    plain = cumulative(one)
    assert cumulative(one, other, cumulative(other)) == plain
    shared = shared_digests(one, other)
    assert shared == shared_messages(plain, cumulative(other))
    assert one[: shared * 16] == other[: shared * 16]


def test_a_link_names_a_whole_beginning() -> None:
    chain = cumulative(digests_of(chat([user("a"), user("b")]).messages))
    swapped = cumulative(digests_of(chat([user("b"), user("a")]).messages))
    assert link(chain, 2) != link(swapped, 2)
    assert link(chain, 1) == cumulative(digests_of(chat([user("a")]).messages))


def test_the_head_is_what_stands_before_the_first_other_message() -> None:
    assert (
        num_head(chat([system(), {"role": "developer", "content": "x"}, user("a"), system()]).messages) == 2
    )
    assert num_head(chat([system()]).messages) == 1
