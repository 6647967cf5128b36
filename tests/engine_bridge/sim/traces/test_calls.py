"""Lists and what lies between them: a change says what it takes to come from one to the other."""

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.sim.traces.calls import Change, ChangeKind, Message, Role, changes_between, shared_prefix

messages = st.builds(
    Message,
    id=st.sampled_from("abc"),
    role=st.just(Role.USER),
    num_tokens=st.just(7),
    answer_of=st.sampled_from([-1, 3]),
)
lists = st.lists(messages, max_size=5)


@given(lists, lists)
def test_changes_applied_to_the_old_list_give_the_length_of_the_new_one(
    old: list[Message], new: list[Message]
) -> None:
    changes = changes_between(old, new)
    length = len(old)
    for change in changes:
        if change.kind is ChangeKind.APPEND:
            assert change.start == length
            length += change.num_messages
        else:
            assert change.start + change.num_messages == length, "an edit reaches to the end"
            assert change.num_tokens == 7 * change.num_messages
            length = change.start
    assert length == len(new)
    assert (changes == ()) == (old == new)


@given(lists, lists, lists)
def test_a_prefix_is_shared_as_far_as_it_goes(
    head: list[Message], a: list[Message], b: list[Message]
) -> None:
    kept = shared_prefix(head + a, head + b)
    assert kept >= len(head)
    assert (head + a)[:kept] == (head + b)[:kept]
    assert (head + a)[kept : kept + 1] != (head + b)[kept : kept + 1] or head + a == head + b


def test_two_answers_with_one_id_are_not_one_message() -> None:
    one, other = Message("a", Role.ASSISTANT, 4, 1), Message("a", Role.ASSISTANT, 4, 2)
    assert changes_between([one], [other]) == (
        Change(ChangeKind.REPLACE, 0, 1, 4),
        Change(ChangeKind.APPEND, 0, 1),
    )
