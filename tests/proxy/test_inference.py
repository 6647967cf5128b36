"""What a call is for is told by the texts it quotes, and by nothing that stands everywhere."""

import json

from proxy.answer_facts import ChoiceFact, ToolCallFact
from proxy.followed_call import FollowedCall
from proxy.inference import CALLS_KEPT, COMMONPLACE, MARKS_A_CONTEXT, Inference
from proxy.known_lists import Relation
from tests.proxy.conversations import HASHER, Message, assistant, chat, system, tool, user

TOOLS = [{"type": "function", "function": {"name": "shell"}}]
TASK = "Find out why the nightly build fails, and repair it. Tell nobody before it is done!"
OUTPUT = "error: the linker found no symbol of the name start\nerror: exit status one of the linker"
HISTORY = [system("You repair builds for a living."), user(TASK), assistant(None, "c1"), tool("c1", OUTPUT)]
TRANSCRIPT = f"Summarise:\nuser: {TASK}\ntool: {OUTPUT}"
SUMMARY = "The nightly build failed because the linker could not see the entry point."
ORDER = "Look through the linker scripts of the last three releases, and list what changed."


class Books:
    """An inference that one agent was told to, with tools."""

    def __init__(self) -> None:
        self.texts = Inference(HASHER)
        self.call("agent", HISTORY)

    def call(self, context: str, messages: list[Message], tenant: str = "t", old: int = 0) -> None:
        self.texts.observe_call(tenant, context, chat(messages, tools=TOOLS), old)

    def said(self, text: str, own: bool = True) -> None:
        self.texts.observe_end("t", "agent", [ChoiceFact(index=0, content=text)], own=own)

    def ordered(self, **arguments: object) -> None:
        called = ToolCallFact("c2", "task", json.dumps(arguments))
        self.texts.observe_end("t", "agent", [ChoiceFact(index=0, tool_calls=(called,))])

    def told(self, call: FollowedCall, tenant: str = "t") -> tuple[Relation, str] | None:
        found = self.texts.find(tenant, call)
        return None if found is None else (found.relation, found.context_id)


def test_a_transcript_without_tools_is_a_one_off_beside_it() -> None:
    books = Books()
    assert books.told(chat([user(TRANSCRIPT)])) == (Relation.ONE_OFF, "agent")
    assert books.told(chat([system("You write titles."), user(TASK)])) == (Relation.ONE_OFF, "agent")


def test_whoever_has_tools_is_no_one_off() -> None:
    assert Books().told(chat([user(TRANSCRIPT)], tools=TOOLS)) is None


def test_what_quotes_nobody_is_nothing_known() -> None:
    books = Books()
    assert books.told(chat([user("What is the capital of the moon, if it has one?")])) is None
    assert books.told(chat([system("only a system prompt, which is nobody's")])) is None
    assert books.told(chat([])) is None


def test_tenants_do_not_hear_of_each_other() -> None:
    assert Books().told(chat([user(TRANSCRIPT)]), tenant="other") is None


def test_session_level_keys_part() -> None:
    texts = Inference(HASHER)
    texts.observe_call("t", "agent", chat(HISTORY, tools=TOOLS), 0, (("user", b"one"),))
    quoting = chat([user(TRANSCRIPT)])
    assert texts.find("t", quoting, (("user", b"other"),)) is None
    assert texts.find("t", quoting, (("user", b"one"),)) is not None
    assert texts.find("t", quoting) is not None


def test_a_list_that_begins_with_the_summary_goes_on_with_the_history() -> None:
    books = Books()
    books.said(SUMMARY, own=False)
    shorter = [HISTORY[0], user(f"What was done before: {SUMMARY}"), user("Go on, please.")]
    assert books.told(chat(shorter, tools=TOOLS)) == (Relation.COMPACTS, "agent")
    with_summary_in_front = [system(f"You repair builds for a living.\n{SUMMARY}"), user("Go on, please.")]
    assert books.told(chat(with_summary_in_front, tools=TOOLS)) == (Relation.COMPACTS, "agent")
    assert books.told(chat(shorter)) is None, "without the tools it is not the same agent"


def test_a_summary_that_the_agent_gave_itself_counts_too_unless_it_is_its_answer() -> None:
    books = Books()
    books.said(SUMMARY)
    again = [HISTORY[0], user(f"This session goes on. {SUMMARY}")]
    assert books.told(chat(again, tools=TOOLS)) == (Relation.COMPACTS, "agent")
    replayed = [HISTORY[0], user("Something else begins here, or so it seems."), assistant(SUMMARY)]
    assert books.told(chat(replayed, tools=TOOLS)) is None


def test_what_an_answer_only_repeats_is_no_summary() -> None:
    books = Books()
    books.said(f"{TASK} {HISTORY[0]['content']}", own=False)
    assert books.told(chat([HISTORY[0], user(TASK)], tools=TOOLS)) is None


def test_a_subagent_is_told_what_stands_in_a_tool_call() -> None:
    books = Books()
    books.ordered(description="scripts", prompt=ORDER)
    child = [system("You look things up."), user(ORDER)]
    assert books.told(chat(child)) == (Relation.SUBAGENT, "agent")
    framed = [system("You look things up."), user(f"A task from your lead: {ORDER}")]
    assert books.told(chat(framed, tools=TOOLS)) == (Relation.SUBAGENT, "agent")
    behind_its_surroundings = [user("The working directory is a repository of builds."), user(ORDER)]
    assert books.told(chat(behind_its_surroundings, tools=TOOLS)) == (Relation.SUBAGENT, "agent")


def test_whoever_was_sent_may_come_a_little_later_and_not_much_later() -> None:
    books = Books()
    books.ordered(prompt=ORDER)
    books.call("agent", [*HISTORY, assistant(None, "c2"), tool("c2", "it is under way")], old=4)
    assert books.told(chat([user(ORDER)], tools=TOOLS)) == (Relation.SUBAGENT, "agent")
    for number in range(CALLS_KEPT):
        books.ordered(command=f"print the figures of part {number} once more")
    assert books.told(chat([user(ORDER)], tools=TOOLS)) is None


def test_a_summary_that_quotes_an_order_among_much_else_is_a_one_off() -> None:
    books = Books()
    books.ordered(prompt=ORDER)
    assert books.told(chat([user(f"{TRANSCRIPT}\nassistant: {ORDER}")])) == (Relation.ONE_OFF, "agent")


def test_boilerplate_tells_of_nobody() -> None:
    books = Books()
    for number in range(COMMONPLACE):
        books.call(f"agent {number}", HISTORY)
    assert books.told(chat([user(TRANSCRIPT)])) is None


def test_whoever_is_forgotten_is_quoted_in_vain() -> None:
    books = Books()
    books.said(SUMMARY)
    books.ordered(prompt=ORDER)
    books.texts.forget("t", "agent")
    books.texts.forget("t", "never there")
    assert books.told(chat([user(TRANSCRIPT)])) is None
    assert len(books.texts) == 0
    for postings in (books.texts._said, books.texts._asked, books.texts._answers):
        assert len(postings) == 0
    books.texts.observe_end("t", "agent", [ChoiceFact(index=0, content=SUMMARY)])
    assert len(books.texts) == 0


def test_memory_is_bounded_and_the_latest_stay() -> None:
    texts = Inference(HASHER, max_marks=100)
    for number in range(200):
        lines = "\n".join(f"line {line} of what agent {number} was told" for line in range(20))
        texts.observe_call("t", f"agent {number}", chat([user(lines)], tools=TOOLS), 0)
        answer = f"agent {number} has done all that it was told to do"
        texts.observe_end("t", f"agent {number}", [ChoiceFact(index=0, content=answer)])
    assert len(texts) <= 10
    assert len(texts._said) + len(texts._answers) <= 150
    quoting = chat([user("line 3 of what agent 199 was told")])
    assert texts.find("t", quoting) is not None
    assert texts.find("t", chat([user("line 3 of what agent 5 was told")])) is None


def test_a_context_keeps_its_latest_texts() -> None:
    texts = Inference(HASHER)
    messages: list[Message] = []
    for number in range(2 * MARKS_A_CONTEXT):
        messages.append(user(f"something new was said as number {number} of many"))
        texts.observe_call("t", "agent", chat(messages[-2:], tools=TOOLS), max(0, min(number, 1)))
    assert len(texts._said) == MARKS_A_CONTEXT
