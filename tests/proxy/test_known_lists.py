"""What is kept of a list says where it begins, and what instructions it was sent with."""

import pytest

from proxy.known_lists import KnownList, Standing, system_of
from proxy.list_chains import cumulative, digests_of, link
from tests.proxy.conversations import Message, chat, system, user


def known(messages: list[Message]) -> KnownList:
    call = chat(messages)
    return KnownList(("t", "m"), "a", "c", call, cumulative(digests_of(call.messages)))


@pytest.mark.parametrize("num_more", [0, 1, 5])
def test_a_list_is_anchored_at_its_first_message_behind_the_head(num_more: int) -> None:
    whole = known([system(), *(user(str(n)) for n in range(num_more))])
    assert whole.num_messages == 1 + num_more
    assert whole.anchor == link(whole.chain, min(2, 1 + num_more))


def test_instructions_are_the_same_wherever_the_conversation_stands() -> None:
    one, other = chat([system("a"), user("x")]), chat([system("a"), user("y"), user("z")])
    assert system_of(one) == system_of(other) == known([system("a"), user("x")]).system
    assert system_of(one) != system_of(chat([system("b"), user("x")]))
    assert system_of(chat([user("x")])) == b""


def test_a_shared_system_prompt_is_no_message_of_the_context() -> None:
    def standing(shared: int) -> Standing:
        return Standing(
            shared=shared,
            num_head=1,
            whole=False,
            longer=True,
            same_head=True,
            other_system=False,
            lost_tools=False,
            has_tools=True,
            other_window=False,
        )

    assert not standing(1).goes_on
    assert standing(2).goes_on
