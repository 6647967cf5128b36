"""What an agent says of its contexts, and what its calls carry because of it."""

import asyncio
import threading
from contextlib import ExitStack

import pytest

from kvtether import Client, Context, current
from proxy.lifecycle_fields import read_lifecycle_fields
from tests.sdk.ops_server import SECONDS, lifecycle_of


def told(server, ctx=None):
    """Operations as they arrived, without what they all have."""
    return [
        {k: v for k, v in op.items() if k not in ("seq", "ctx")}
        for op in server.applied
        if ctx in (None, op["ctx"])
    ]


def test_every_primitive_arrives_as_it_was_said(server, client):
    ctx = Context("run-7:main", client=client)
    ctx.headers()
    ctx.append()
    ctx.append(3)
    ctx.replace(1, 3, 1)
    ctx.remove(0, 1)
    ctx.pin("system", ttl=60.0, priority=2)
    ctx.pin((0, 2))
    ctx.unpin("system")
    ctx.waiting("tool", "pytest", eta=20)
    ctx.resumed()
    ctx.outcome((0, 1), "verified")
    ctx.close()
    assert client.flush(SECONDS)
    assert told(server) == [
        {"op": "append", "n": 1},
        {"op": "append", "n": 3},
        {"op": "replace", "span": [1, 3], "n": 1},
        {"op": "remove", "span": [0, 1]},
        {"op": "pin", "span": "system", "ttl": 60.0, "priority": 2},
        {"op": "pin", "span": [0, 2], "ttl": 300.0},
        {"op": "unpin", "span": "system"},
        {"op": "waiting", "kind": "tool", "tool": "pytest", "eta": 20},
        {"op": "resumed"},
        {"op": "outcome", "span": [0, 1], "result": "verified"},
        {"op": "close"},
    ]
    assert [op["seq"] for op in server.applied] == list(range(1, 12))


def test_a_call_says_whose_it_is_in_words_the_proxy_takes(server, client):
    ctx = Context('run "7"/main', agent="coder", flow="flöw", client=client)
    first = ctx.headers()
    server.answer.clear()  # what is on its way is named
    ctx.append()
    headers = ctx.headers(call="c-18", waiting="tool", tool="pytest", eta=20.5, close=True)
    for said in (first, headers):
        raw = [(name.encode(), value.encode()) for name, value in said.items()]
        assert read_lifecycle_fields(raw).errors == ()
    fields = read_lifecycle_fields([(n.encode(), v.encode()) for n, v in headers.items()])
    assert (fields.ctx, fields.call, fields.agent, fields.flow) == ('run "7"%2Fmain', "c-18", "coder", "flöw")
    assert (fields.waiting, fields.tool, fields.eta, fields.close) == ("tool", "pytest", 20.5, True)
    assert (fields.source, fields.seq) == (ctx._ledger.source, 1)
    server.answer.set()
    assert client.flush(SECONDS)
    assert "seq" not in lifecycle_of(ctx.headers()), "nothing is on its way"


def test_a_header_is_never_longer_than_the_proxy_reads(client):
    parent = Context("ö" * 256, agent="ä" * 256, flow="ü" * 256, client=client)
    header = parent.spawn(name="é" * 256).headers(waiting="tool", tool="ß" * 256)
    assert len(header["x-kv-lifecycle"]) <= 4096
    assert lifecycle_of(header)["parent"] == "ö" * 256


def test_calls_have_names_of_their_own(client):
    ctx = Context(client=client)
    assert lifecycle_of(ctx.headers())["call"] != lifecycle_of(ctx.headers())["call"]


def test_the_first_call_tells_the_list_it_begins_with(server, client):
    ctx = Context("c", client=client)
    ctx.messages.extend(["system", "question"])
    ctx.messages[0] = "another system"
    assert "seq" not in lifecycle_of(ctx.headers())
    ctx.messages.append("answer")
    assert client.flush(SECONDS)
    assert told(server) == [{"op": "append", "n": 1}]


def test_a_pin_waits_for_the_first_call(server, client):
    ctx = Context("c", client=client)
    ctx.pin("system")
    ctx.waiting("human")
    assert client.flush(SECONDS)
    assert server.requests == []
    ctx.headers()
    assert client.flush(SECONDS)
    assert told(server) == [{"op": "pin", "span": "system", "ttl": 300.0}]


def test_a_fork_begins_with_its_parents_messages(server, client):
    parent = Context("p", agent="coder", flow="run-7", client=client)
    parent.messages.extend([*"abcd"])
    parent.headers()
    child = parent.fork(3, name="c", agent="tester")
    assert child.messages == [*"abc"]
    child.messages.append("x")
    assert parent.messages == [*"abcd"]
    assert client.flush(SECONDS)
    assert told(server, "c") == [
        {"op": "fork", "parent": "p", "upto": 3, "agent": "tester", "flow": "run-7"},
        {"op": "append", "n": 1},
    ]
    said = lifecycle_of(child.headers())
    assert (said["ctx"], said["parent"], said["fork_at"], said["agent"]) == ("c", "p", 3, "tester")


def test_a_fork_of_what_was_never_sent_is_a_context_of_its_own(server, client):
    parent = Context("p", client=client)
    parent.messages.append("a")
    child = parent.fork()
    assert child.messages == ["a"]
    said = lifecycle_of(child.headers())
    assert said["parent"] == "p"
    assert "fork_at" not in said
    assert client.flush(SECONDS)
    assert server.requests == []


def test_a_spawned_context_begins_empty(client):
    parent = Context("p", agent="coder", flow="run-7", client=client)
    said = lifecycle_of(parent.spawn(agent="tester").headers())
    assert (said["parent"], said["agent"], said["flow"]) == ("p", "tester", "run-7")
    assert "fork_at" not in said


def test_a_one_off_ends_with_its_call(server, client):
    parent = Context("p", client=client)
    parent.messages.extend([*"ab"])
    parent.headers()
    with parent.one_off(name="s") as single:
        assert lifecycle_of(single.headers())["one_off"] is True
    with parent.one_off(upto=1, name="f") as forked:
        assert lifecycle_of(forked.headers())["fork_at"] == 1
    with parent.one_off(upto=1, name="unused"):
        pass
    assert client.flush(SECONDS)
    assert server.kinds("s") == []
    assert server.kinds("f") == ["fork", "one_off"]
    assert server.kinds("unused") == ["fork", "one_off", "close"]


def test_a_context_closes_once_and_a_call_opens_it_again(server, client):
    with Context("c", client=client) as ctx:
        ctx.headers()
        ctx.close()
    ctx.headers()
    ctx.close()
    assert client.flush(SECONDS)
    assert server.kinds() == ["close", "close"]


def test_what_never_called_leaves_nothing(server, client):
    with Context("c", client=client) as ctx:
        ctx.append()
        ctx.resumed()
    assert client.flush(SECONDS)
    assert server.requests == []


def test_it_closes_when_the_block_fails(server, client):
    with pytest.raises(ZeroDivisionError), Context("c", client=client) as ctx:
        ctx.append(len(ctx.headers()) // 0)
    assert current() is None
    assert client.flush(SECONDS)
    assert server.kinds() == ["close"]


def test_the_current_context_is_the_innermost(client):
    outer, inner = Context("o", client=client), Context("i", client=client)
    assert current() is None
    with outer:
        assert current() is outer
        with inner.active():
            assert current() is inner
        assert current() is outer
    assert current() is None


def test_threads_have_current_contexts_of_their_own(client):
    seen = []
    with Context("c", client=client):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen == [None]


async def test_tasks_have_current_contexts_of_their_own(client):
    ready = asyncio.Barrier(3)

    async def work(name):
        async with Context(name, client=client) as ctx:
            await ready.wait()
            assert current() is ctx
            assert await asyncio.to_thread(current) is ctx

    async with asyncio.TaskGroup() as tasks:
        for name in "abc":
            tasks.create_task(work(name))
    assert current() is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda c: c.append(-1),
        lambda c: c.replace(2, 1, 1),
        lambda c: c.replace(0, 1, -1),
        lambda c: c.remove(-1, 2),
        lambda c: c.pin("tail"),
        lambda c: c.pin((2, 1)),
        lambda c: c.pin("system", ttl=0),
        lambda c: c.waiting("godot"),
        lambda c: c.headers(waiting="godot"),
        lambda c: c.outcome((0, 1), "fine"),
        lambda c: c.fork(-1),
        lambda c: c.before_edit(3, 1),
    ],
)
def test_what_makes_no_sense_is_said(client, wrong):
    ctx = Context("c", client=client)
    ctx.headers()
    with pytest.raises(ValueError):
        wrong(ctx)


def test_nothing_to_do_is_not_told(server, client):
    ctx = Context("c", client=client)
    ctx.headers()
    ctx.append(0)
    ctx.remove(1, 1)
    ctx.replace(1, 1, 0)
    assert client.flush(SECONDS)
    assert server.requests == []
    assert ctx.before_edit(1, 1) == 0


def test_operations_ride_once_a_proxy_was_seen(server, client):
    ctx = Context("c", client=client)
    assert ctx.call()["extra_body"] is None
    ctx.append()
    assert ctx.call()["extra_body"] is None
    client.saw(f"{server.url}/v1/chat/completions", {"x-kv-context": "c"})
    assert client.flush(SECONDS)
    server.answer.clear()  # whatever is sent meanwhile is not known to have arrived
    ctx.replace(0, 1, 1)
    body = ctx.call()["extra_body"]["kv_lifecycle"]
    assert [op["op"] for op in body["ops"]] == ["replace"]
    assert body["source"] == ctx._ledger.source
    assert "seq" not in body, "the proxy has not to wait for what comes with the call"
    server.answer.set()
    assert client.flush(SECONDS)
    assert ctx.call()["extra_body"] is None, "nothing is left to ride"


def test_what_arrived_by_a_call_is_not_sent_again(server, client):
    ctx = Context("c", client=client)
    client.saw(f"{server.url}/v1/chat/completions", {"x-kv-context": "c"})
    ctx.headers()
    ctx._ledger.not_before = float("inf")  # until an answer tells that the context is there
    ctx.append()
    said = ctx.call()
    call_id = said["extra_body"]["kv_lifecycle"]["call"]
    client.saw(f"{server.url}/v1/chat/completions", {"x-kv-context": "c", "x-kv-call": call_id})
    assert client.flush(SECONDS)
    assert server.requests == []


def test_what_the_proxy_could_not_read_is_sent_again(server, client):
    ctx = Context("c", client=client)
    client.saw(f"{server.url}/v1/chat/completions", {"x-kv-context": "c"})
    ctx.headers()
    ctx._ledger.not_before = float("inf")
    ctx.append()
    call_id = ctx.call()["extra_body"]["kv_lifecycle"]["call"]
    answer = {"x-kv-context": "c", "x-kv-call": call_id, "x-kv-lifecycle-error": "ops: not a list"}
    client.saw(f"{server.url}/v1/chat/completions", answer)
    assert client.flush(SECONDS)
    assert server.kinds() == ["append"]


def test_too_much_to_ride_goes_the_other_way(server, client):
    ctx = Context("c", client=client)
    client.saw(f"{server.url}/v1/chat/completions", {"x-kv-context": "c"})
    ctx.headers()
    server.answer.clear()
    for _ in range(2000):
        ctx.append()
    said = ctx.call()
    assert said["extra_body"] is None
    assert lifecycle_of(said["extra_headers"])["seq"] == 2000
    server.answer.set()
    assert client.flush(SECONDS)
    assert len(server.applied) == 2000


def test_nothing_rides_past_a_fork_that_has_not_arrived(server, client):
    parent = Context("p", client=client)
    client.saw(f"{server.url}/v1/chat/completions", {"x-kv-context": "p"})
    parent.messages.extend([*"abc"])
    parent.headers()
    server.answer.clear()
    parent.fork(name="c")
    parent.messages[:] = ["summary"]
    assert parent.call()["extra_body"] is None
    server.answer.set()
    assert client.flush(SECONDS)
    assert [(op["ctx"], op["op"]) for op in server.applied] == [("c", "fork"), ("p", "replace")]
    server.answer.clear()
    parent.append()
    assert parent.call()["extra_body"] is not None
    server.answer.set()


@pytest.fixture
def costly(server):
    def verdicts(source, ops):
        if "dry_run" not in server.requests[-1]["path"]:
            return [{"status": "applied"} for _ in ops]
        return [{"prefill_tokens": 100 * op["span"][0]} if op["span"][0] else {} for op in ops]

    server.verdicts = verdicts
    return server


async def test_the_cost_of_an_edit_is_asked_behind_what_was_done_before(costly, client):
    ctx = Context("c", client=client)
    assert ctx.before_edit(1, 2) is None
    ctx.headers()
    ctx.append()
    assert await ctx.abefore_edit(1, 2) == 100
    assert ctx.before_edit(2, 3, n=1) == 200
    assert ctx.before_edit(0, 3) is None
    asked = [r["ops"][0]["op"] for r in costly.requests]
    assert asked == ["append", "remove", "replace", "remove"]


def test_a_cost_that_nobody_knows(server, client):
    ctx = Context("c", client=client)
    ctx.headers()
    server.status = 500
    assert ctx.before_edit(0, 1) is None
    nowhere = Context("c", client=Client())
    nowhere.headers()
    assert nowhere.before_edit(0, 1) is None


def test_many_threads_share_one_context(server, client):
    ctx = Context("c", client=client)
    ctx.headers()

    def work():
        for n in range(50):
            ctx.messages.append(n)
            ctx.call()

    with ExitStack() as stack:
        for _ in range(4):
            thread = threading.Thread(target=work)
            stack.callback(thread.join)
            thread.start()
    assert client.flush(SECONDS)
    assert [op["seq"] for op in server.applied] == list(range(1, 201))
    assert ctx.length == 200
