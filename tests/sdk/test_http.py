"""Real clients with the hooks, before a proxy, before a plain server, and before what is neither."""

import asyncio
import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import httpx2
import openai
import pytest

import kvtether.http
from kvtether import Client, Context
from tests.sdk.ops_server import SECONDS, lifecycle_of

BODY = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


@pytest.fixture
def model(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="key", http_client=kvtether.http.client(), max_retries=0
    ) as model:
        yield model


def ask(model: openai.OpenAI, messages: Any) -> str:
    reply = model.chat.completions.create(model="m", messages=messages)
    return str(reply.choices[0].message.content)


def test_calls_carry_their_context_and_its_operations(server, client, model):
    with Context("c", client=client) as ctx:
        ctx.messages.append({"role": "user", "content": "a"})
        ctx.messages.append({"role": "assistant", "content": ask(model, ctx.messages)})
        server.answer.clear()  # what is sent beside the calls does not arrive
        ctx.messages.append({"role": "user", "content": "b"})
        ctx.messages.append({"role": "assistant", "content": ask(model, ctx.messages)})
        ctx.messages[:2] = [{"role": "user", "content": "summary"}]
        ask(model, ctx.messages)
        server.answer.set()
    assert client.flush(SECONDS)
    assert server.kinds() == ["append", "append", "append", "replace", "close"]
    (_, plain), *riding = server.calls
    assert plain == {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    assert [op["op"] for op in riding[1][1].pop("kv_lifecycle")["ops"]] == ["append", "replace"]
    assert riding[1][1] == {"model": "m", "messages": [*ctx.messages]}
    assert lifecycle_of(riding[1][0])["ctx"] == "c"


def test_other_requests_stay_as_they_are(server, client):
    with kvtether.http.client() as http:
        http.post(f"{server.url}/v1/chat/completions", json=BODY)
        with Context("c", client=client).active():
            http.post(f"{server.url}/v1/embeddings", json=BODY)
        with Context("c", client=Client("http://elsewhere/v1")).active():
            http.post(f"{server.url}/v1/chat/completions", json=BODY)
        with Context("c", client=client).active() as ctx:
            said = ctx.headers()
            http.post(f"{server.url}/v1/chat/completions", json=BODY, headers=said)
    assert [lifecycle_of(h) if "x-kv-lifecycle" in h else None for h, _ in server.calls] == [
        None,
        None,
        None,
        lifecycle_of(said),
    ]
    assert [body for _, body in server.calls] == [BODY] * 4


def recorded(server, client) -> Context:
    """A context with an operation that has not arrived, before a proxy that is known to be one."""
    ctx = Context("c", client=client)
    ctx.headers()
    client.saw(f"{server.url}/v1/chat/completions", {"x-kv-context": "c"})
    server.answer.clear()
    ctx.append()
    return ctx


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_every_byte_of_a_body_stays(server, client, library):
    content = b'{ "model" : "m",\t"messages":[{"role":"user","content":"\\u00fc \xc3\xbc"}] }\n'
    with recorded(server, client).active(), library.Client(event_hooks=kvtether.http.hooks()) as http:
        seen = []
        http.event_hooks["request"].append(lambda request: seen.append(b"".join(request.stream)))
        http.post(
            f"{server.url}/v1/chat/completions", content=content, headers={"content-type": "application/json"}
        )
    server.answer.set()
    (sent,) = seen
    ours, _, theirs = sent.partition(b'},"model"')
    assert json.loads(ours.removeprefix(b'{"kv_lifecycle":') + b"}")["ops"][0]["op"] == "append"
    assert b'{ "model"' + theirs == content


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"{}", {"content-type": "application/json"}),
        (b'{"model": "m"}', {}),
        (
            gzip.compress(b'{"a": 1}', mtime=0),
            {"content-type": "application/json", "content-encoding": "gzip"},
        ),
        (iter([b'{"model": "m"}']), {"content-type": "application/json", "content-length": "14"}),
    ],
)
def test_where_nothing_can_ride_it_goes_the_other_way(server, client, content, headers):
    expected = content if isinstance(content, bytes) else b'{"model": "m"}'
    ctx = recorded(server, client)
    seen = []
    with ctx.active(), httpx.Client(event_hooks=kvtether.http.hooks()) as http:
        http.event_hooks["request"].append(lambda request: seen.append((request.headers, request.read())))
        http.event_hooks["request"].append(stop)
        with pytest.raises(StopIteration):
            http.post(f"{server.url}/v1/chat/completions", content=content, headers=headers)
    assert [(h["x-kv-lifecycle"] != "", body) for h, body in seen] == [(True, expected)]
    server.answer.set()
    server.until(lambda it: it.kinds() == ["append"])


def stop(request: httpx.Request) -> None:
    raise StopIteration


async def test_tasks_share_one_async_client(server, client):
    http = kvtether.http.async_client()
    model = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key", http_client=http)

    async def agent(name: str) -> None:
        async with Context(name, client=client) as ctx:
            for n in range(3):
                ctx.messages.append({"role": "user", "content": f"{name}{n}"})
                reply = await model.chat.completions.create(model="m", messages=ctx.messages)
                ctx.messages.append({"role": "assistant", "content": reply.choices[0].message.content})

    async with model, asyncio.TaskGroup() as tasks:
        for name in "abc":
            tasks.create_task(agent(name))
    assert await client.aflush(SECONDS)
    for name in "abc":
        assert server.kinds(name) == ["append"] * 5 + ["close"]
    for headers, body in server.calls:
        assert body["messages"][0]["content"] == f"{lifecycle_of(headers)['ctx']}0"


def test_a_key_and_an_address_need_not_be_told(server, model):
    client = Client()
    with Context("c", client=client) as ctx:
        ctx.messages.append({"role": "user", "content": "a"})
        ask(model, ctx.messages)
        ctx.messages.append({"role": "user", "content": "b"})
        ask(model, ctx.messages)
    assert client.flush(SECONDS)
    assert server.kinds() == ["append", "close"]
    client.close()


# -- without a proxy -------------------------------------------------------------------------------------


def agent(model: openai.OpenAI, client: Client, turns: int = 3) -> list[Any]:
    with Context("c", client=client) as ctx:
        for n in range(turns):
            ctx.messages.append({"role": "user", "content": f"question {n}"})
            ctx.messages.append({"role": "assistant", "content": ask(model, ctx.messages)})
        with ctx.fork(1, name="f") as fork:
            ask(model, fork.messages)
        with ctx.compact(0, 4) as job:
            job.replace([{"role": "user", "content": ask(model, [{"role": "user", "content": "sum up"}])}])
        ask(model, ctx.messages)
        assert ctx.before_edit(0, 1) is None
        return list(ctx.messages)


@pytest.mark.parametrize("status", [404, 500, 401, 200, 0])
def test_a_plain_server_gets_plain_calls(server, model, caplog, status):
    """`status` is its answer to operations: not found, broken, not allowed, some page, none at all."""
    server.is_proxy = False
    server.status = status or 200
    server.verdicts = lambda source, ops: [] if len(ops) != 1 else [1]  # type: ignore[list-item]
    if not status:
        server.answer.clear()
    client = Client(f"{server.url}/v1", "key")
    agent(model, client)
    with_it = [body for _, body in server.calls]
    server.calls.clear()
    agent(model, Client())
    assert with_it == [body for _, body in server.calls]
    assert not any("kv_lifecycle" in body for body in with_it)
    server.answer.set()
    client.close()
    warnings = [r for r in caplog.records if r.name == "kvtether"]
    assert len(warnings) <= 1


def test_a_proxy_that_goes_takes_the_body_field_with_it(server, client, model):
    with Context("c", client=client) as ctx:
        ask(model, [{"role": "user", "content": "a"}])
        server.is_proxy = False
        server.answer.clear()
        ctx.append()
        ask(model, [{"role": "user", "content": "a"}])
        ctx.append()
        ask(model, [{"role": "user", "content": "a"}])
        server.answer.set()
    assert ["kv_lifecycle" in body for _, body in server.calls] == [False, True, False]
