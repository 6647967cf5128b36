"""Answers as they flow: byte for byte to the client, understood beside the stream."""

import asyncio
import json
from typing import Any

import openai
import pytest

from lifecycle.vocabulary import CallEnd
from proxy.answer_facts import AnswerFacts
from proxy.call_listener import ForwardOutcome
from proxy.forward import Send, forward_call
from proxy.request_body import Receive, Scope, read_body
from proxy.upstream import Upstream
from tests.proxy.data_path import (
    BOTH,
    CHAT,
    JSON,
    Handler,
    Ledger,
    answering,
    cutting,
    found,
    path,
    streaming,
)
from tests.proxy.live_server import RawClient, fetch
from tests.proxy.scripted_upstream import (
    DONE,
    Exchange,
    chat_answer,
    chat_chunks,
    openai_like,
    sse,
)

CRAB = "🦀".encode()
TORTURE: dict[str, list[bytes]] = {
    "plain": chat_chunks(["Hel", "lo"]),
    "crlf": [chunk.replace(b"\n", b"\r\n") for chunk in chat_chunks(["a"])],
    "comments": [b": keep-alive\n\n", b"event: x\nid: 7\nretry: 10\ndata: {}\n\n", *chat_chunks(["a"])],
    "split utf-8": [
        b'data: {"choices":[{"index":0,"delta":{"content":"' + CRAB[:2],
        CRAB[2:] + b'"}}]}\n\n',
        DONE,
    ],
    "multi-line": [b'data: {"choices":\ndata: []}\n\n', DONE],
    "five megabytes": [b"data: " + b"x" * 2_500_000, b"y" * 2_500_000 + b"\n\n", DONE],
    "no final newline": [b"data: {}\n\n", b"data: [DONE]"],
    "no done": chat_chunks(["a"])[:-1],
    "two dones": [*chat_chunks(["a"]), DONE],
    "garbage": [b"\x00\xff\n\r\n\r", b"data: nonsense\n\n"],
    "one byte at a time": [bytes([byte]) for byte in b"".join(chat_chunks(["a"])[:2])],
}


@BOTH
@pytest.mark.parametrize("name", TORTURE)
async def test_streams_pass_byte_for_byte(handler: Handler, name: str) -> None:
    async with path(streaming(TORTURE[name]), handler) as p:
        response = await fetch(p.port, b"POST", CHAT, JSON, b"{}")
        assert (await p.outcome()).end is CallEnd.COMPLETED
    assert response.complete
    assert response.body == b"".join(TORTURE[name])


async def test_the_observer_hears_everything_of_a_stream_in_order() -> None:
    async with path(streaming(chat_chunks(["Hel", "lo"], cached_tokens=4))) as p:
        response = await fetch(p.port, b"POST", CHAT, JSON, b"{}")
        await p.outcome()
    assert p.ledger.told == ["head 200", "first token", "completed"]
    assert p.ledger.facts is not None
    assert p.ledger.facts.choices[0].content == "Hello"
    assert p.ledger.facts.usage.cached_tokens == 4
    assert response.header(b"x-kv-context") == [b"c1"]


async def test_a_whole_answer_has_no_first_token_of_its_own() -> None:
    async with path(openai_like) as p:
        response = await fetch(p.port, b"POST", CHAT, JSON, b'{"stream": false}')
        await p.outcome()
    assert json.loads(response.body) == chat_answer("Hello")
    assert p.ledger.told == ["head 200", "completed"]


async def test_events_arrive_while_the_engine_still_generates() -> None:
    go_on = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.start_stream()
        await exchange.chunk(chat_chunks(["a"])[1])
        await go_on.wait()
        await exchange.chunk(DONE)
        await exchange.end_stream()

    async with path(script) as p:
        client = await RawClient.connect(p.port)
        await client.request(b"POST", CHAT, JSON, b"{}")
        await client.read_head()
        assert await client.read_chunk() == chat_chunks(["a"])[1]
        assert p.ledger.told == ["head 200", "first token"]
        go_on.set()
        assert await client.read_chunk() == DONE
        # Whoever has read the end finds it already on the books.
        assert p.ledger.told[-1] == "completed"
        client.close()


async def test_token_ids_we_asked_for_do_not_reach_the_client() -> None:
    def with_ids(text: str) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        return sse({"id": "c", "prompt_token_ids": [1, 2], "choices": [{**choice, "token_ids": [3]}]})

    plain = sse({"id": "c", "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})
    whole = b": ping\n\n" + with_ids("a") + DONE
    async with path(streaming([whole[:25], whole[25:60], whole[60:]]), cutting) as p:
        response = await fetch(p.port, b"POST", CHAT, [*JSON, (b"accept-encoding", b"gzip")], b"{}")
        await p.outcome()
        assert p.engine.exchanges[0].header(b"accept-encoding") == []
    assert response.body == b": ping\n\n" + plain + DONE
    assert p.ledger.facts is not None
    assert p.ledger.facts.prompt_token_ids == (1, 2)
    assert p.ledger.facts.choices[0].token_ids == (3,)


async def test_token_ids_leave_a_whole_answer_and_its_length_fits() -> None:
    answer = chat_answer("Hi")
    with_ids = {**answer, "prompt_token_ids": [1], "choices": [{**answer["choices"][0], "token_ids": [2]}]}
    body = json.dumps(with_ids).encode()
    async with path(answering(200, body, JSON), cutting) as p:
        response = await fetch(p.port, b"POST", CHAT, JSON, b"{}")
    assert response.complete
    assert json.loads(response.body) == answer


class Saboteur(Ledger):
    """An observer that fails whenever it can."""

    def on_head(self, status: int) -> None:
        raise RuntimeError("head")

    def on_first_token(self) -> None:
        raise RuntimeError("first token")

    def on_end(self, end: CallEnd, facts: AnswerFacts, reason: str) -> None:
        raise RuntimeError("end")


async def test_a_broken_observer_harms_no_answer() -> None:
    def broken_headers() -> list[tuple[bytes, bytes]]:
        raise RuntimeError("headers")

    async def sabotaged(
        scope: Scope, receive: Receive, send: Send, upstream: Upstream, _: Ledger
    ) -> ForwardOutcome:
        body = await read_body(scope, receive)
        return await forward_call(
            scope, receive, send, upstream, body, listener=found(Saboteur()), response_headers=broken_headers
        )

    async with path(streaming(chat_chunks(["a"])), sabotaged) as p:
        response = await fetch(p.port, b"POST", CHAT, JSON, b"{}")
        assert (await p.outcome()).end is CallEnd.COMPLETED
    assert response.body == b"".join(chat_chunks(["a"]))


@BOTH
async def test_the_openai_client_works_unchanged(handler: Handler) -> None:
    question = [{"role": "user", "content": "hi"}]
    async with (
        path(openai_like, handler) as p,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{p.port}/v1", api_key="k") as client,
    ):
        create: Any = client.chat.completions.create
        whole = await create(model="m", messages=question)
        stream = await create(model="m", messages=question, stream=True)
        streamed = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        with pytest.raises(openai.NotFoundError, match="Not Found"):
            await client.files.list()
        assert [model.id async for model in client.models.list()] == ["m"]
    assert whole.choices[0].message.content == streamed == "Hello"
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
