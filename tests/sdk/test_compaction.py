"""A compaction is a call of its own, and then an edit."""

import pytest

from kvtether import Context, current
from tests.sdk.ops_server import SECONDS, lifecycle_of


@pytest.fixture
def ctx(client):
    ctx = Context("c", client=client)
    ctx.messages.extend([*"sabcdef"])
    ctx.headers()
    return ctx


def test_messages_give_way_to_their_summary(server, client, ctx):
    with ctx.compact(1, 5) as job:
        assert current() is job.summariser
        said = lifecycle_of(job.summariser.headers())
        job.replace(["summary"])
    assert current() is None
    assert ctx.messages == ["s", "summary", "e", "f"]
    assert said["one_off"] is True
    assert said["parent"] == "c"
    assert client.flush(SECONDS)
    assert [(o["op"], o["span"], o["n"]) for o in server.applied] == [("replace", [1, 5], 1)]


async def test_a_summariser_may_begin_with_the_list(server, client, ctx):
    async with ctx.compact(1, 5, upto=5, agent="summariser") as job:
        assert job.summariser.messages == [*"sabcd"]
        said = lifecycle_of(job.summariser.headers())
        job.replace(["summary"])
    assert (said["fork_at"], said["agent"]) == (5, "summariser")
    assert await client.aflush(SECONDS)
    assert [(o["ctx"], o["op"]) for o in server.applied] == [
        (job.summariser.name, "fork"),
        (job.summariser.name, "one_off"),
        ("c", "replace"),
    ]


def test_a_summary_that_fails_changes_nothing(server, client, ctx):
    with pytest.raises(ZeroDivisionError), ctx.compact(1, 5) as job:
        job.replace([1 / 0 * len(job.summariser.headers())])
    assert ctx.messages == [*"sabcdef"]
    assert client.flush(SECONDS)
    assert server.requests == []


def test_an_agent_that_keeps_its_own_list(server, client):
    ctx = Context("c", client=client)
    ctx.append(6)
    ctx.headers()
    with ctx.compact(1, 5) as job:
        job.replace(["summary", "more"])
    assert ctx.length == 4
    assert not ctx.keeps_list
    assert client.flush(SECONDS)
    assert server.kinds("c") == ["replace"]
