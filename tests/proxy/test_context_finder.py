"""Calls find their contexts from one to the next, by what was remembered of those before."""

from itertools import count
from typing import Any

import msgspec
import pytest

from lifecycle.vocabulary import IdentityRung
from proxy.answer_facts import AnswerFacts, ChoiceFact, ToolCallFact
from proxy.context_finder import ContextFinder
from proxy.harness_identity import HarnessCall, read_harness_call
from proxy.identity import Identity, LineageIndex
from proxy.known_lists import Relation
from proxy.lifecycle_fields import LifecycleFields
from tests.proxy.conversations import HASHER, Message, assistant, chat, system, tool, user

TOOLS = [{"type": "function", "function": {"name": "shell"}}]
SYSTEM = system("You repair builds for a living.")
TASK = user("Find out why the nightly build fails, and repair it before the morning.")
BASE = [SYSTEM, TASK]


DONE = ChoiceFact(index=0, content="Done.")


class Story:
    """Calls in a row, each answered at once unless it is said otherwise."""

    def __init__(self) -> None:
        self.finder = ContextFinder(LineageIndex(), HASHER)
        self.numbers = count(1)

    def call(
        self,
        messages: list[Message],
        headers: dict[str, str] | None = None,
        answer: ChoiceFact | None = DONE,
        **fields: Any,
    ) -> Identity:
        said = self.said(headers or {}, fields)
        number = str(next(self.numbers))
        asked = chat(messages, **fields)
        found = self.finder.find("t", LifecycleFields(), asked, said)
        identity = msgspec.structs.replace(found, context_id=found.context_id or f"ctx-{number}")
        self.finder.given("t", identity, number, asked, said)
        if answer is not None:
            facts = AnswerFacts(choices=(answer,))
            self.finder.answered("t", identity, number, asked, facts)
        return identity

    @staticmethod
    def said(headers: dict[str, str], fields: dict[str, Any]) -> HarnessCall:
        return read_harness_call([(n.encode(), v.encode()) for n, v in headers.items()], fields)


def calls(call_id: str, **arguments: str) -> ChoiceFact:
    arguments_text = str(arguments).replace("'", '"')
    return ChoiceFact(index=0, tool_calls=(ToolCallFact(call_id, "f", arguments_text),))


CLAUDE = {"x-claude-code-session-id": "s"}
CODEX = {"thread-id": "t", "session-id": "t"}
OPENCODE = {"x-session-id": "ses"}


@pytest.mark.parametrize("headers", [CLAUDE, CODEX, OPENCODE, {"x-dynamo-session-id": "d"}])
def test_a_named_session_is_one_context_whatever_its_list_does(headers: dict[str, str]) -> None:
    story = Story()
    first = story.call(BASE, headers, tools=TOOLS)
    on = story.call([*BASE, assistant("Done."), user("and?")], headers, tools=TOOLS)
    cut = story.call([SYSTEM, user("In short: nothing."), user("go on")], headers, tools=TOOLS)
    assert first.context_id == on.context_id == cut.context_id != ""
    assert [i.relation for i in (first, on, cut)] == [
        Relation.UNRELATED,
        Relation.CONTINUES,
        Relation.EDITS,
    ]
    assert on.rung is first.rung is not IdentityRung.NEW
    assert next(iter(headers)) in on.reason


@pytest.mark.parametrize("headers", [CLAUDE, OPENCODE, CODEX])
def test_a_title_under_the_sessions_name_is_a_one_off_beside_it(headers: dict[str, str]) -> None:
    story = Story()
    main = story.call(BASE, headers, tools=TOOLS)
    title = story.call([system("You write titles."), user("Title this, please.")], headers)
    assert title.one_off
    assert (title.parent, title.relation) == (main.context_id, Relation.ONE_OFF)
    assert title.context_id != main.context_id
    assert "beside it" in title.reason
    on = story.call([*BASE, assistant("Done."), user("and?")], headers, tools=TOOLS)
    assert (on.context_id, on.relation) == (main.context_id, Relation.CONTINUES)


def test_a_probe_that_comes_first_gives_its_place_to_the_agent() -> None:
    story = Story()
    probe = story.call([user("quota")], CLAUDE, max_tokens=1)
    main = story.call(BASE, CLAUDE, tools=TOOLS)
    assert (main.context_id, main.one_off) == (probe.context_id, False)
    again = story.call([user("quota")], CLAUDE, max_tokens=1)
    assert again.one_off


def test_another_agent_under_the_same_name_has_a_context_of_its_own() -> None:
    story = Story()
    main = story.call(BASE, CLAUDE, tools=TOOLS)
    other = [system("You search the web."), user("What is a linker?")]
    search = story.call(other, CLAUDE, tools=TOOLS)
    on = story.call([*other, assistant("Done."), user("more")], CLAUDE, tools=TOOLS)
    assert search.context_id == on.context_id != main.context_id
    assert (search.parent, search.one_off) == (main.context_id, False)
    back = story.call([*BASE, assistant("Done."), user("and?")], CLAUDE, tools=TOOLS)
    assert back.context_id == main.context_id


def test_a_session_without_tools_stays_one() -> None:
    story = Story()
    first = story.call(BASE, OPENCODE)
    on = story.call([*BASE, assistant("Done."), user("and?")], OPENCODE)
    assert (on.context_id, on.one_off) == (first.context_id, False)


def test_one_that_gives_its_tools_up_for_good_is_followed_beside_its_name() -> None:
    story = Story()
    main = story.call(BASE, OPENCODE, tools=TOOLS)
    bare = [*BASE, assistant("Done."), user("in words, please")]
    once = story.call(bare, OPENCODE)
    on = story.call([*bare, assistant("Done."), user("and more words")], OPENCODE)
    third = story.call(
        [*bare, assistant("Done."), user("and more words"), assistant("Done."), user("x")], OPENCODE
    )
    assert (once.one_off, on.one_off, third.one_off) == (True, False, False)
    assert on.context_id == third.context_id != main.context_id


def test_claudes_subagents_and_codex_threads_are_named_and_begun_by_their_parents() -> None:
    story = Story()
    main = story.call(BASE, CLAUDE, tools=TOOLS)
    child = story.call([system("sub"), user("look")], {**CLAUDE, "x-claude-code-agent-id": "a"}, tools=TOOLS)
    assert (child.context_id, child.parent) == ("claude-code:s:a", main.context_id)
    assert (child.relation, child.fork_at) == (Relation.SUBAGENT, None)
    root = story.call(BASE, CODEX, tools=TOOLS)
    forked = {"thread-id": "f", "session-id": "t", "x-codex-parent-thread-id": "t"}
    fork = story.call([*BASE, assistant("Done."), user("side")], forked, tools=TOOLS)
    assert (fork.parent, fork.fork_at, fork.relation) == (root.context_id, 2, Relation.FORKS)


def test_codex_says_what_is_a_request_for_a_summary() -> None:
    story = Story()
    main = story.call(BASE, {**CODEX, "x-codex-window-id": "t:0"}, tools=TOOLS)
    compacts = {**CODEX, "x-codex-turn-metadata": '{"request_kind": "compaction"}'}
    asking = [*BASE, assistant("Done."), user("Sum it up.")]
    summary = story.call(asking, compacts, ChoiceFact(index=0, content="In short, it is done by now."))
    assert (summary.one_off, summary.parent, summary.fork_at) == (True, main.context_id, None)
    after = [SYSTEM, user("In short, it is done by now."), user("next")]
    on = story.call(after, {**CODEX, "x-codex-window-id": "t:1"}, tools=TOOLS)
    assert (on.context_id, on.relation) == (main.context_id, Relation.COMPACTS)
    assert "window" in on.reason


def test_the_last_word_of_a_session_is_none_of_its_turns_and_ends_it() -> None:
    story = Story()
    dynamo = {"x-dynamo-session-id": "d"}
    story.call(BASE, dynamo, tools=TOOLS)
    last = story.call([user("bye")], {**dynamo, "x-dynamo-session-final": "true"}, max_tokens=1)
    assert (last.one_off, last.ends) == (True, "dynamo:d")


def test_a_last_word_that_is_a_turn_stays_one() -> None:
    story = Story()
    dynamo = {"x-dynamo-session-id": "d"}
    first = story.call(BASE, dynamo, tools=TOOLS)
    final = {**dynamo, "x-dynamo-session-final": "true"}
    last = story.call([*BASE, assistant("Done."), user("thanks")], final, tools=TOOLS)
    assert (last.context_id, last.one_off, last.ends) == (first.context_id, False, "")


def test_session_level_keys_group_and_lineage_parts_within() -> None:
    story = Story()
    one = story.call(BASE, {"x-litellm-session-id": "1"}, tools=TOOLS)
    other = story.call(BASE, {"x-litellm-session-id": "2"}, tools=TOOLS)
    assert other.relation is Relation.UNRELATED, "the same words, and another session"
    going_on = [*BASE, assistant("Done."), user("and?")]
    on = story.call(going_on, {"x-litellm-session-id": "2"}, tools=TOOLS)
    assert (on.context_id, on.rung) == (other.context_id, IdentityRung.GROUP)
    same = story.call(going_on, {"x-litellm-session-id": "1"}, tools=TOOLS)
    assert same.context_id == one.context_id
    second = [SYSTEM, user("Another task of the same session.")]
    beside = story.call(second, {"x-litellm-session-id": "1"}, tools=TOOLS)
    assert beside.context_id not in (one.context_id, other.context_id)


def test_without_any_name_texts_tell_a_compaction_from_beginning_to_end() -> None:
    story = Story()
    main = story.call(BASE, answer=calls("call_1a2b3c4d"), tools=TOOLS)
    results = [*BASE, assistant(None, "call_1a2b3c4d"), tool("call_1a2b3c4d", "the linker is broken")]
    story.call(results, tools=TOOLS)
    asked = [user(f"Summarise this conversation.\nuser: {TASK['content']}")]
    summary = story.call(asked, answer=ChoiceFact(index=0, content="The nightly build fails in its linker."))
    assert (summary.rung, summary.one_off, summary.parent) == (
        IdentityRung.INFERENCE,
        True,
        main.context_id,
    )
    after = story.call([SYSTEM, user("So far: The nightly build fails in its linker.")], tools=TOOLS)
    assert (after.context_id, after.relation) == (main.context_id, Relation.COMPACTS)


def test_without_any_name_texts_tell_a_subagent() -> None:
    story = Story()
    main = story.call(BASE, answer=calls("call_1", prompt="Read the last three linker logs."), tools=TOOLS)
    child = story.call([system("sub"), user("Read the last three linker logs.")], tools=TOOLS[:1])
    assert (child.relation, child.parent, child.one_off) == (Relation.SUBAGENT, main.context_id, False)


def test_a_one_off_that_goes_on_after_all_becomes_a_context() -> None:
    story = Story()
    story.call(BASE, tools=TOOLS)
    asked = [user(f"Summarise this conversation.\nuser: {TASK['content']}")]
    once = story.call(asked)
    again = story.call(asked)
    on = story.call([*asked, assistant("Done."), user("shorter")])
    assert (once.one_off, again.one_off, on.one_off) == (True, True, False)
    assert on.context_id not in (once.context_id, again.context_id)


def test_a_broken_off_call_leaves_nothing_to_find() -> None:
    finder = ContextFinder(LineageIndex(), HASHER)
    asked, said = chat(BASE), HarnessCall()
    identity = Identity(rung=IdentityRung.NEW, reason="", context_id="a")
    finder.given("t", identity, "1", asked, said)
    assert finder.answered("t", identity, "1", asked, None) == []
    assert finder.find("t", LifecycleFields(), asked, said).relation is Relation.RETRIES
