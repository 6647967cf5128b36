"""Which context a harness's run goes on with, and what ends when a tool returns."""

import asyncio

import pytest

from kvtether import Client, Context, current
from kvtether.agent_contexts import MAX_CONTEXTS, AgentContexts, conversation, waiting
from tests.sdk.ops_server import SECONDS, lifecycle_of


class Asked(Exception):
    """A tool stops to ask a human."""


@pytest.fixture
def contexts(client: Client) -> AgentContexts:
    return AgentContexts("coder", "flow-1", client)


def ops(server, name):
    return [op["op"] for op in server.applied if op["ctx"] == name]


def waits(server, name):
    return [op["kind"] for op in server.applied if op["ctx"] == name and op["op"] == "waiting"]


def test_a_name_is_one_context_with_the_labels_and_without_a_name_each_is_new(contexts):
    one = contexts.named("t")
    assert contexts.named("t") is one
    assert (one.name, one.agent, one.flow) == ("t", "coder", "flow-1")
    assert contexts.named(None) is not contexts.named(None)


def test_the_latest_contexts_are_remembered(contexts):
    first, second = contexts.named("first"), contexts.named("second")
    for number in range(MAX_CONTEXTS - 2):
        contexts.named(str(number))
    assert contexts.named("first") is first
    contexts.named("one more")
    assert contexts.named("first") is first
    assert contexts.named("second") is not second


def test_a_run_goes_on_with_the_active_context_else_with_the_one_named(contexts, client):
    around = Context("around", client=client)
    with around.active():
        assert contexts.begin("t") is around
    assert contexts.named("around") is around
    begun = contexts.begin("t", agent="writer")
    assert begun is contexts.begin("t")
    assert begun.agent == "coder"


def test_runs_inside_tools_are_spawned_by_the_caller_and_end_with_the_tool(contexts, server, client):
    caller = contexts.named("main")
    caller.headers()
    with contexts.tool(caller, "ask", "call-1"):
        first, second = contexts.begin("main"), contexts.begin("main", agent="helper")
        assert (first.name, second.name) == ("main:call-1", "main:call-1.1")
        assert (first.agent, second.agent) == ("coder", "helper")
        said = lifecycle_of(first.headers())
        assert (said["parent"], said.get("fork_at")) == ("main", None)
        second.headers()
        contexts.over(first.name, goes_on=False)
        assert client.flush(SECONDS)
        assert ops(server, first.name) == []
    assert client.flush(SECONDS)
    assert ops(server, first.name) == ops(server, second.name) == ["close"]
    assert waits(server, "main") == ["tool", "subagent", "subagent"]
    assert contexts.begin("main") is caller


def test_a_run_that_inherits_the_callers_list_is_a_fork_of_it(contexts):
    caller = contexts.named("main")
    caller.headers()
    caller.messages.extend(["a", "b"])
    with contexts.tool(caller, "task", "call-1"):
        child = contexts.begin(inherits="main")
    assert (child.parent, child.fork_at, list(child.messages)) == ("main", 2, ["a", "b"])


def test_an_error_ends_what_began_in_the_tool_and_a_question_to_a_human_does_not(contexts, server, client):
    caller = contexts.named("main")
    caller.headers()

    def fails(call_id: str, error: Exception) -> None:
        with contexts.tool(caller, "ask", call_id, pauses=(Asked,)):
            contexts.begin().headers()
            raise error

    with pytest.raises(ValueError):
        fails("c1", ValueError())
    with pytest.raises(Asked):
        fails("c2", Asked())
    assert client.flush(SECONDS)
    assert ops(server, "main:c1") == ["close"]
    assert ops(server, "main:c2") == []
    assert waits(server, "main")[-1] == "human"


def test_a_run_that_is_over_waits_for_its_user_or_ends_unless_its_end_is_anothers(contexts, server, client):
    for name in ("goes-on", "ends", "active"):
        contexts.named(name).headers()
    contexts.over("goes-on", goes_on=True)
    contexts.over("ends", goes_on=False)
    with contexts.named("active").active():
        contexts.over("active", goes_on=False)
    assert client.flush(SECONDS)
    assert [ops(server, name) for name in ("goes-on", "ends", "active")] == [
        ["waiting"],
        ["close"],
        ["waiting"],
    ]


def test_an_agent_that_a_conversation_is_handed_to_has_a_context_beside(contexts, server, client):
    root = contexts.named("main")
    root.headers()
    beside = contexts.beside(root, "writer")
    assert contexts.beside(root, "writer") is beside
    assert (beside.name, beside.parent, beside.agent) == ("main:writer", "main", "writer")
    named = contexts.beside(beside, "reader", name="task-9")
    assert (named.name, named.parent) == ("task-9", "main:writer")
    assert contexts.beside(root, "writer", name="main") is root
    assert contexts.beside(None, "lead", name="alone").agent == "coder"
    for each in (beside, named):
        each.headers()
    contexts.close("main")
    assert client.flush(SECONDS)
    assert ops(server, "main") == ["waiting", "close"]
    assert ops(server, "main:writer") == ops(server, "task-9") == ["close"]
    assert contexts.named("main") is not root


def test_a_one_off_is_nobodys(contexts):
    said = lifecycle_of(contexts.one_off("summariser").headers())
    assert (said["one_off"], said["agent"]) == (True, "summariser")
    assert "parent" not in said


def test_a_conversation_holds_for_what_happens_inside(contexts, server, client):
    assert (conversation(), current()) == (None, None)
    waiting("tool", "nobody's")
    with contexts.conversation("main") as root:
        root.headers()
        assert conversation() is root is current()
        waiting("tool", "pytest")
        with contexts.subagent(current(), "ask", "c1"):
            assert conversation() is current()
            assert conversation().name == "main:c1"
        with contexts.subagent(None, "ask", "c2"):
            assert conversation() is root
        assert conversation() is root
    assert (conversation(), current()) == (None, None)
    assert client.flush(SECONDS)
    assert waits(server, "main") == ["tool", "tool", "subagent"]


def test_tasks_have_tools_of_their_own(contexts):
    caller = contexts.named("main")

    async def run(call_id: str) -> str:
        with contexts.tool(caller, "ask", call_id):
            await asyncio.sleep(0)
            return contexts.begin().name

    async def both() -> list[str]:
        return await asyncio.gather(run("a"), run("b"))

    assert asyncio.run(both()) == ["main:a", "main:b"]
