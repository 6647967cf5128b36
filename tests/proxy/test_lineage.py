"""Calls find back to the context they came from, and only to it."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from proxy.known_lists import Relation
from proxy.lineage import LineageIndex
from tests.proxy.conversations import (
    HASHER,
    Message,
    assistant,
    chat,
    fresh,
    system,
    tool,
    user,
)

TENANT = "t"


class Books:
    """An index and the shorthand to feed it."""

    def __init__(self, **limits: int) -> None:
        self.index = LineageIndex(**limits)

    def call(
        self, context: str, messages: list[Message], answer: Message | None = None, **fields: Any
    ) -> str:
        """A call of the context; without an answer it stays in flight."""
        call_id = fresh("call")
        self.index.observe_call(TENANT, context, call_id, chat(messages, **fields))
        if answer is not None:
            self.end(context, call_id, answer)
        return call_id

    def end(self, context: str, call_id: str, answer: Message | None) -> None:
        answers = [HASHER.shape(answer)] if answer is not None else []
        self.index.observe_end(TENANT, context, call_id, answers)

    def find(self, messages: list[Message], **fields: Any) -> tuple[Relation, str, int]:
        match = self.index.find(TENANT, chat(messages, **fields))
        return match.relation, match.context_id, match.shared


BASE = [system(), user("fix the bug")]


def test_the_first_call_belongs_to_nobody() -> None:
    assert Books().find(BASE) == (Relation.UNRELATED, "", 0)


@pytest.mark.parametrize("answer", [assistant("Sure."), assistant(None, "call_8f3a91c2")])
def test_an_echoed_answer_continues_its_context(answer: Message) -> None:
    books = Books()
    books.call("a", BASE, answer)
    assert books.find([*BASE, answer, user("go on")]) == (Relation.CONTINUES, "a", 2)


def test_an_answer_sent_back_a_little_differently_continues_too() -> None:
    books = Books()
    books.call("a", BASE, assistant("<think>hm</think>Sure.  "))
    assert books.find([*BASE, assistant("Sure."), user("go on")]) == (Relation.CONTINUES, "a", 2)
    assert books.find([*BASE, assistant("Sure thing"), user("go on")]) == (Relation.CONTINUES, "a", 2)


def test_a_call_that_broke_off_is_retried_or_gone_on_with() -> None:
    books = Books()
    books.end("a", books.call("a", BASE), None)
    assert books.find(BASE) == (Relation.RETRIES, "a", 2)
    assert books.find([*BASE, user("hello?")]) == (Relation.CONTINUES, "a", 2)


def test_the_same_list_while_it_is_in_flight_or_answered_is_a_fork() -> None:
    books = Books()
    call_id = books.call("a", BASE)
    assert books.find(BASE) == (Relation.FORKS, "a", 2)
    books.end("a", call_id, assistant("Sure."))
    assert books.find(BASE) == (Relation.FORKS, "a", 2), "many a conversation begins with the same words"


def test_a_longer_list_that_comes_again_drops_its_answer() -> None:
    books = Books()
    history = [*BASE, assistant("One."), user("two?")]
    call_id = books.call("a", history)
    assert books.find(history) == (Relation.FORKS, "a", 4)
    books.end("a", call_id, assistant("Two."))
    assert books.find(history) == (Relation.RETRIES, "a", 4)


def test_a_list_that_lacks_the_latest_answer_is_a_fork() -> None:
    books = Books()
    history = [*BASE, assistant("One."), user("two?")]
    books.call("a", BASE, history[2])
    books.call("a", history, assistant("Two."))
    assert books.find([*BASE, assistant("One."), user("other?")]) == (Relation.FORKS, "a", 3)
    assert books.find([*history, user("instead")]) == (Relation.FORKS, "a", 4)


def test_an_edit_in_the_middle_keeps_the_context() -> None:
    books = Books()
    history = [*BASE, assistant(None, "call_11aa22bb"), tool("call_11aa22bb", "long output"), user("next")]
    books.call("a", history, assistant(None, "call_33cc44dd"))
    shorter = [*history[:3], tool("call_11aa22bb", "[cut]"), user("next"), assistant(None, "call_33cc44dd")]
    assert books.find([*shorter, tool("call_33cc44dd")]) == (Relation.EDITS, "a", 3)


def test_an_edit_is_recognised_by_the_answers_text_as_well() -> None:
    books = Books()
    history = [*BASE, assistant("One."), user("two?")]
    books.call("a", history, assistant("Two, as promised."))
    edited = [*BASE, assistant("1"), user("two?"), assistant("Two, as promised."), user("three?")]
    assert books.find(edited) == (Relation.EDITS, "a", 2)


def test_a_rewritten_answer_and_an_edited_middle_are_an_edit_and_no_fork() -> None:
    books = Books()
    history = [*BASE, assistant("I call f."), user("Observation: long"), assistant("Again."), user("Seen: 2")]
    books.call("a", history, assistant("And once more.", "call_1a2b3c4d"))
    edited = [*history[:3], user("(forgotten)"), *history[4:], assistant("I call f, in words."), user("3")]
    assert books.find(edited) == (Relation.EDITS, "a", 3)
    other = [*history[:3], user("(forgotten)"), assistant("Else."), user("quite another end")]
    assert books.find(other) == (Relation.FORKS, "a", 3)


def test_a_system_prompt_that_changes_every_turn_does_not_lose_the_context() -> None:
    books = Books()
    books.call("a", [system("it is 10:00"), user("long task")], assistant("Working on it."))
    later = [system("it is 10:01"), user("long task"), assistant("Working on it."), user("and?")]
    assert books.find(later) == (Relation.EDITS, "a", 0)


def test_a_commonplace_answer_alone_proves_nothing() -> None:
    books = Books()
    books.call("a", [system("one"), user("x")], assistant("OK"))
    assert books.find([system("two"), user("y"), assistant("OK"), user("z")])[0] is Relation.UNRELATED


@pytest.mark.parametrize("call_id", ["functions.ls:0", "call_0", "call-12", "0"])
def test_call_ids_that_only_count_prove_nothing_alone(call_id: str) -> None:
    books = Books()
    books.call("a", [system("one"), user("x")], assistant(None, call_id))
    other = [system("two"), user("y"), assistant(None, call_id), tool(call_id, "other")]
    assert books.find(other)[0] is Relation.UNRELATED


def test_a_random_call_id_is_enough() -> None:
    books = Books()
    books.call("a", BASE, assistant(None, "call_9e107d9d372b"))
    summary = [
        system("new"),
        user("summary"),
        assistant(None, "call_9e107d9d372b"),
        tool("call_9e107d9d372b"),
    ]
    assert books.find(summary) == (Relation.EDITS, "a", 0)


def test_odd_call_ids_do_no_harm() -> None:
    books = Books()
    books.call("a", BASE, assistant("Sure."))
    odd = [*BASE, assistant(None, "\ud800"), tool("\ud800")]
    assert books.find(odd)[:2] == (Relation.CONTINUES, "a")


def test_a_shared_head_is_no_kinship() -> None:
    books = Books()
    books.call("a", BASE, assistant("Sure."))
    assert books.find([system(), user("another task")])[0] is Relation.UNRELATED
    assert books.find([system()])[0] is Relation.UNRELATED


def test_other_tools_share_no_tokens_to_fork_from() -> None:
    books = Books()
    books.call("a", BASE, assistant("Sure."))
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert books.find([*BASE, user("x")], tools=tools)[0] is Relation.UNRELATED
    going_on = [*BASE, assistant("Sure."), user("x")]
    assert books.find(going_on, tools=tools) == (Relation.EDITS, "a", 2), "an edit of all that was before"


def test_tenants_and_models_do_not_meet() -> None:
    books = Books()
    books.call("a", BASE, assistant("Sure."))
    going_on = [*BASE, assistant("Sure."), user("x")]
    assert books.index.find("other", chat(going_on)).relation is Relation.UNRELATED
    assert books.find(going_on, model="m2")[0] is Relation.UNRELATED


def test_a_fork_and_its_parent_keep_apart() -> None:
    books = Books()
    first = assistant("First.")
    books.call("parent", BASE, first)
    books.call("child", [*BASE, user("side quest")], assistant("Quest."))
    assert books.find([*BASE, first, user("x")])[:2] == (Relation.CONTINUES, "parent")
    side = [*BASE, user("side quest"), assistant("Quest."), user("y")]
    assert books.find(side)[:2] == (Relation.CONTINUES, "child")


def test_the_longest_known_list_is_the_one_gone_on_with() -> None:
    books = Books()
    history = [*BASE, assistant("First."), user("more")]
    books.call("long", history, assistant("Second."))
    books.call("again", BASE, assistant("Other."))
    assert books.find([*history, assistant("Second."), user("x")])[:2] == (Relation.CONTINUES, "long")


def test_any_choice_of_several_may_be_taken_up() -> None:
    books = Books()
    call_id = books.call("a", BASE, n=2)
    one, two = assistant("One."), assistant(None, "call_5577aabb")
    books.index.observe_end(TENANT, "a", call_id, [HASHER.shape(one), HASHER.shape(two)])
    assert books.find([*BASE, one, user("x")])[:2] == (Relation.CONTINUES, "a")
    assert books.find([*BASE, two, tool("call_5577aabb")])[:2] == (Relation.CONTINUES, "a")


def test_what_is_closed_is_nobodys_any_more() -> None:
    books = Books()
    books.call("a", BASE, assistant(None, "call_77aa88bb"))
    books.index.forget(TENANT, "a")
    assert books.find([*BASE, assistant(None, "call_77aa88bb")])[0] is Relation.UNRELATED
    assert len(books.index) == 0


def test_memory_is_bounded_and_the_latest_stay() -> None:
    books = Books(max_contexts=10)
    for number in range(50):
        books.call(f"c{number}", [user(f"task {number}")], assistant(f"answer {number}"))
    assert len(books.index) == 10
    assert books.find([user("task 49"), assistant("answer 49"), user("x")])[1] == "c49"
    assert books.find([user("task 0"), assistant("answer 0"), user("x")])[0] is Relation.UNRELATED
    small = Books(max_messages=100)
    for number in range(50):
        small.call(f"c{number}", [user(f"{number}.{i}") for i in range(30)])
    assert len(small.index) == 3


class Agents(RuleBasedStateMachine):
    """Any number of agents work side by side; a model that knows who is who checks every attribution."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Books()
        self.lists: dict[str, list[Message]] = {}
        self.started = [system("shared head")]

    def _turn(self, context: str, messages: list[Message], with_tool: bool) -> None:
        call_id = fresh("call_7d8f")
        answer = assistant(fresh("answer"), call_id) if with_tool else assistant(fresh("answer"))
        self.books.call(context, messages, answer)
        follow_up = tool(call_id, fresh("result")) if with_tool else user(fresh("question"))
        self.lists[context] = [*messages, answer, follow_up]

    @rule(with_tool=st.booleans())
    def start(self, with_tool: bool) -> None:
        messages = [*self.started, user(fresh("task"))]
        assert self.books.find(messages)[0] is Relation.UNRELATED
        self._turn(fresh("context"), messages, with_tool)

    @rule(data=st.data(), with_tool=st.booleans())
    def go_on(self, data: st.DataObject, with_tool: bool) -> None:
        if self.lists:
            context = data.draw(st.sampled_from(list(self.lists)))
            messages = self.lists[context]
            assert self.books.find(messages) == (Relation.CONTINUES, context, len(messages) - 2)
            self._turn(context, messages, with_tool)

    @rule(data=st.data(), with_tool=st.booleans())
    def edit(self, data: st.DataObject, with_tool: bool) -> None:
        """Replace something behind the head and before the latest answer."""
        if self.lists:
            context = data.draw(st.sampled_from(list(self.lists)))
            messages = list(self.lists[context])
            start = data.draw(st.integers(1, len(messages) - 3))
            end = data.draw(st.integers(start + 1, len(messages) - 2))
            messages[start:end] = [user(fresh("summary"))]
            relation, found, shared = self.books.find(messages)
            assert (relation, found) == (Relation.EDITS, context)
            assert shared == start
            self._turn(context, messages, with_tool)

    @rule(data=st.data(), with_tool=st.booleans())
    def fork(self, data: st.DataObject, with_tool: bool) -> None:
        """Leave an agent's list behind its first task and before its latest answer."""
        if self.lists:
            parent = data.draw(st.sampled_from(list(self.lists)))
            messages = self.lists[parent]
            upto = data.draw(st.integers(2, len(messages) - 2))
            child = [*messages[:upto], user(fresh("side task"))]
            relation, found, shared = self.books.find(child)
            assert relation is Relation.FORKS
            # A relative that shares as much is as good a parent.
            assert shared == upto
            assert self.lists[found][:upto] == messages[:upto]
            self._turn(fresh("context"), child, with_tool)

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if self.lists:
            context = data.draw(st.sampled_from(list(self.lists)))
            self.books.index.forget(TENANT, context)
            del self.lists[context]

    @invariant()
    def no_more_contexts_than_there_are(self) -> None:
        assert len(self.books.index) == len(self.lists)

    def teardown(self) -> None:
        for context in self.lists:
            self.books.index.forget(TENANT, context)
        index = self.books.index
        for postings in (index._lists, index._anchors, index._echoes, index._calls):
            assert len(postings) == 0


TestAgents = Agents.TestCase
TestAgents.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
