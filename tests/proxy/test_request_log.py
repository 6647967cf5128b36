"""One id finds everything that a request brought about; one line says how it went, and quotes nobody."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from prometheus_client import CollectorRegistry

from engine_bridge.errors import CacheUnavailable
from lifecycle.vocabulary import Mode
from proxy.log_output import add_request_id
from proxy.request_log import RequestLog
from proxy.request_metrics import RequestMetrics
from proxy.system import RandomIds
from tests.lifecycle.fake_cache import FakeCache
from tests.proxy.live_server import RawClient
from tests.proxy.scripted_upstream import Exchange
from tests.proxy.several_engines import several_engines
from tests.proxy.toy_model import CHUNK, NAME
from tests.proxy.whole_proxy import Whole, lifecycle, user, whole_proxy

SECRET = "Xyzzy"
"""What nobody may read in a log."""


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs(processors=[add_request_id]) as said:
        yield said


def of_requests(lines: list[Any]) -> list[Any]:
    return [line for line in lines if line["event"] == "request"]


async def until_line(it: Whole, lines: list[Any], number: int) -> Any:
    """The line comes when the answer's last byte was sent: a client may be faster."""
    async with it.patience():
        while len(of_requests(lines)) < number:
            await it.admin.get("/livez")
    return of_requests(lines)[number - 1]


async def unmapped(it: Whole, headers: dict[str, str]) -> httpx.Response:
    """A call before an engine that never says what it serves: nobody waits for its books."""
    body = {"model": "m", "messages": [user(SECRET)]}
    return await it.data.post("/v1/chat/completions", json=body, headers=headers)


async def test_a_call_has_one_line_with_what_an_operator_asks_for(tmp_path: Path, lines: list[Any]) -> None:
    async with whole_proxy(tmp_path) as it:
        answer = await it.chat([user(SECRET)], {**lifecycle(ctx="a", call="c"), "x-request-id": "mine-1"})
        line = await until_line(it, lines, 1)
        assert answer.headers["x-request-id"] == "mine-1"
        expected = {
            "request_id": "mine-1",
            "log_level": "info",
            "method": "POST",
            "path": "/v1/chat/completions",
            "status": 200,
            "outcome": "completed",
            "tenant": "default",
            "model": NAME,
            "mode": "enforce",
            "ctx": "a",
            "call": "c",
            "output_tokens": 2,
            "engine_id": "chatcmpl-toy",
        }
        assert {name: line.get(name) for name in expected} == expected
        assert line["ms"] >= line["first_byte_ms"] >= 0
        assert line["ms"] >= line["held_ms"] >= 0
        assert line["input_tokens"] == len(it.toy.prompts[0])
    assert SECRET not in str(lines)


async def test_with_several_engines_the_line_names_the_one_that_took_it(
    tmp_path: Path, lines: list[Any]
) -> None:
    async with several_engines(tmp_path) as it:
        place = await it.served([user("a")], lifecycle(ctx="a"))
        assert (await until_line(it, lines, 1))["backend"] == place
        other = "b" if place == "a" else "a"
        await it.engines[place].kill()
        await it.served([user("a")], lifecycle(ctx="a"))
        assert (await until_line(it, lines, 2))["backend"] == other
    lines.clear()
    async with several_engines(tmp_path, ("only",)) as it:
        await it.chat([user("a")], lifecycle(ctx="a"))
        assert "backend" not in await until_line(it, lines, 1)


async def test_without_a_usable_id_one_is_made(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        made = set()
        for given in ({}, {"x-request-id": "has space"}, {"x-request-id": "y" * 129}):
            answer = await it.chat([user("hi")], given)
            made.add(answer.headers["x-request-id"])
        assert len(made) == 3
        assert all(re.fullmatch(r"req_[A-Za-z0-9_-]{16}", each) for each in made)


async def test_the_engine_gets_what_the_client_sent_and_no_id_of_ours(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat([user("hi")])
        await it.chat([user("hi")], {"x-request-id": "has space"})
        first, second = it.engine.exchanges[-2:]
        assert first.header(b"x-request-id") == []
        assert second.header(b"x-request-id") == [b"has space"]


async def test_an_id_that_the_engine_gives_passes_and_none_is_added_beside_it(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        headers = [(b"content-type", b"application/json"), (b"X-Request-Id", b"the engine's")]
        await exchange.respond(200, b"{}", headers)

    async with whole_proxy(tmp_path, script=script, ready=False) as it:
        answer = await unmapped(it, {"x-request-id": "mine"})
        assert answer.headers.get_list("x-request-id") == ["the engine's"]


async def test_a_byte_pipe_adds_nothing(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, Mode.BYPASS) as it:
        answer = await it.chat([user("hi")], {"x-request-id": "mine"})
        assert "x-request-id" not in answer.headers
        assert "x-request-id" not in (await it.data.get("/v1/models")).headers


async def test_answers_of_our_own_carry_the_id(tmp_path: Path, lines: list[Any]) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        exchange.writer.transport.abort()

    async with whole_proxy(tmp_path, script=script, ready=False) as it:
        answer = await unmapped(it, {"x-request-id": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (502, "mine")
        line = await until_line(it, lines, 1)
        assert (line["status"], line["outcome"]) == (502, "failed")
        assert line["reason"] == "the engine broke the connection before it answered"
        refused = await it.data.post("/kv/v1/ops", content=b"nonsense", headers={"x-request-id": "two"})
        assert (refused.status_code, refused.headers["x-request-id"]) == (400, "two")
    assert SECRET not in str(lines)


async def test_what_the_engine_says_of_a_bad_call_is_not_in_the_log(tmp_path: Path, lines: list[Any]) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        body = json.dumps({"error": {"message": f"you wrote {SECRET}"}}).encode()
        await exchange.respond(400, body, [(b"content-type", b"application/json")])

    async with whole_proxy(tmp_path, script=script, ready=False) as it:
        answer = await unmapped(it, {})
        assert SECRET in answer.text
        line = await until_line(it, lines, 1)
        assert (line["outcome"], line["reason"]) == ("failed", "the engine answered 400")
    assert SECRET not in str(lines)


async def test_a_client_that_goes_is_an_abort(tmp_path: Path, lines: list[Any]) -> None:
    async with whole_proxy(tmp_path) as it:
        it.toy.holds = lambda body: True
        client = await RawClient.connect(it.data.base_url.port or 0)
        body = json.dumps({"model": NAME, "messages": [user("hi")], "stream": True}).encode()
        await client.request(b"POST", b"/v1/chat/completions", [(b"X-Request-Id", b"gone")], body)
        await client.read_head()
        await client.read_chunk()
        client.hang_up()
        line = await until_line(it, lines, 1)
        assert (line["request_id"], line["outcome"], line["status"]) == ("gone", "aborted", 200)


async def test_lists_of_models_and_the_like_are_for_debugging(tmp_path: Path, lines: list[Any]) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.data.get("/v1/models")
        assert (await until_line(it, lines, 1))["log_level"] == "debug"
        await it.data.post("/kv/v1/nothing")
        assert (await until_line(it, lines, 2))["log_level"] == "debug"


async def test_whatever_happens_to_a_call_later_carries_its_id(tmp_path: Path, lines: list[Any]) -> None:
    """The books are written behind the call, by tasks that work for many calls."""

    class Deaf(FakeCache):
        async def locate(self, namespace: Any, keys: Any) -> Any:
            if keys:
                raise CacheUnavailable("nobody answers")
            return []

    async with whole_proxy(tmp_path, cache=Deaf(chunk_size=CHUNK)) as it:
        for number in range(3):
            message = user(f"something that is long enough to fill some chunks {number}")
            await it.chat([message], {**lifecycle(ctx="a"), "x-request-id": f"r{number}"})

        def warned() -> set[str]:
            return {str(line.get("request_id")) for line in lines if line["log_level"] == "warning"}

        async with it.patience():
            while not {"r0", "r1", "r2"} <= warned():
                await it.admin.get("/livez")


async def test_what_nobody_foresaw_is_told_too(lines: list[Any]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a bug")

    registry = CollectorRegistry()
    wrapped = RequestLog(app, RequestMetrics(registry), RandomIds())
    scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
    with pytest.raises(RuntimeError):
        await wrapped(scope, None, None)  # type: ignore[arg-type]
    assert of_requests(lines)[0]["outcome"] == "unexpected"


async def test_a_model_of_half_a_surrogate_pair_has_its_line_too(tmp_path: Path, lines: list[Any]) -> None:
    async with whole_proxy(tmp_path) as it:
        body = b'{"model": "\\ud800x", "messages": [{"role": "user", "content": "hi"}]}'
        assert (await it.data.post("/v1/chat/completions", content=body)).status_code == 200
        assert (await until_line(it, lines, 1)).get("model", "?x") == "?x"
