"""Who said what a call's context is, in the order of trust."""

from lifecycle.vocabulary import IdentityRung
from proxy.identity import Identity, identify
from proxy.known_lists import Relation
from proxy.lifecycle_fields import FieldOrigin, LifecycleFields
from proxy.lineage import LineageIndex
from tests.proxy.conversations import HASHER, assistant, chat, system, user

BASE = [system(), user("task")]
ANSWER = assistant("Sure.")


def known() -> LineageIndex:
    index = LineageIndex()
    index.observe_call("t", "a", "call", chat(BASE))
    index.observe_end("t", "a", "call", [HASHER.shape(ANSWER)])
    return index


GOING_ON = chat([*BASE, ANSWER, user("next")])


def test_what_the_client_says_stands_above_what_its_messages_tell() -> None:
    fields = LifecycleFields(ctx="b", parent="a", fork_at=1, origin=FieldOrigin.HEADER)
    assert identify("t", fields, GOING_ON, known()) == Identity(
        rung=IdentityRung.EXPLICIT, reason="header", context_id="b", parent="a", fork_at=1
    )


def test_a_parent_without_a_name_asks_for_a_new_context() -> None:
    found = identify("t", LifecycleFields(parent="a"), GOING_ON, known())
    assert (found.rung, found.context_id, found.parent, found.fork_at) == (IdentityRung.NEW, "", "a", None)


def test_the_messages_tell_the_rest() -> None:
    found = identify("t", LifecycleFields(), GOING_ON, known())
    assert found == Identity(
        rung=IdentityRung.LINEAGE,
        reason="answer_echoed",
        context_id="a",
        relation=Relation.CONTINUES,
    )


def test_a_fork_asks_for_a_new_context_below_its_parent() -> None:
    found = identify("t", LifecycleFields(), chat([*BASE, user("side")]), known())
    assert found == Identity(
        rung=IdentityRung.LINEAGE,
        reason="answer_missing",
        parent="a",
        fork_at=2,
        relation=Relation.FORKS,
    )


def test_an_unknown_list_is_new() -> None:
    found = identify("t", LifecycleFields(), chat([user("x")]), known())
    assert (found.rung, found.context_id, found.parent) == (IdentityRung.NEW, "", "")
    assert found.reason


def test_an_unnamed_one_off_is_always_a_context_of_its_own() -> None:
    found = identify("t", LifecycleFields(one_off=True), GOING_ON, known())
    assert (found.rung, found.context_id, found.one_off) == (IdentityRung.NEW, "", True)
    assert (found.parent, found.fork_at) == ("a", 3)
    alone = identify("t", LifecycleFields(one_off=True), chat([user("x")]), known())
    assert (alone.parent, alone.fork_at) == ("", None)
