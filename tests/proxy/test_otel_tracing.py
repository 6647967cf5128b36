"""A trace joins client, proxy and engine: a real collector's view, and the headers that the engine got."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from proxy.config import TracingConfig
from proxy.otel_tracing import traces_url
from proxy.trace_context import read_traceparent
from tests.proxy.live_server import RawClient
from tests.proxy.otlp_collector import Collector, attributes, collector
from tests.proxy.scripted_upstream import Exchange
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import Whole, lifecycle, user, whole_proxy

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SERVER, CLIENT = Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT
SECRET = "Xyzzy"


def traced(seen: Collector, sample: float = 1.0) -> TracingConfig:
    return TracingConfig(endpoint=seen.url, sample=sample)


def engine_parent(exchange: Exchange) -> Any:
    (value,) = exchange.header(b"traceparent")
    return read_traceparent(value)


async def test_the_engines_parent_is_our_span_and_ours_is_the_clients(tmp_path: Path) -> None:
    headers = {
        **lifecycle(ctx="a", call="c"),
        "traceparent": f"00-{TRACE}-{PARENT}-03",
        "tracestate": "vendor=1,  other=2",
        "baggage": "who=me;x",
        "x-request-id": "r-1",
    }
    async with collector() as seen:
        async with whole_proxy(tmp_path, tracing=traced(seen)) as it:
            it.toy.answer = lambda body: SECRET
            await it.chat([user(SECRET)], headers, stream=True, stream_options={"include_usage": True})
            exchange = it.engine.exchanges[-1]
        (server,), (client,) = seen.of_kind(SERVER), seen.of_kind(CLIENT)
    assert server.trace_id.hex() == client.trace_id.hex() == TRACE
    assert server.parent_span_id.hex() == PARENT
    assert client.parent_span_id == server.span_id
    got = engine_parent(exchange)
    assert (got.trace_id, got.span_id) == (int(TRACE, 16), int.from_bytes(client.span_id, "big"))
    assert got.flags == 3
    assert exchange.header(b"tracestate") == [b"vendor=1,  other=2"]
    assert exchange.header(b"baggage") == [b"who=me;x"]
    assert seen.paths == ["/v1/traces"]
    assert {r["service.name"] for r in seen.resources} == {"kvtether"}
    assert (server.name, client.name) == ("POST /v1/chat/completions", f"chat {NAME}")
    expected = {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "kvtether.request_id": "r-1",
        "kvtether.tenant": "default",
        "kvtether.mode": "enforce",
        "kvtether.context": "a",
        "kvtether.call": "c",
        "kvtether.outcome": "completed",
    }
    assert {k: attributes(server).get(k) for k in expected} == expected
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": NAME,
        "gen_ai.response.id": "chatcmpl-toy",
        "gen_ai.conversation.id": "a",
        "gen_ai.usage.input_tokens": len(it.toy.prompts[-1]),
        "gen_ai.response.finish_reasons": ["stop"],
        "http.response.status_code": 200,
    }
    assert {k: attributes(client).get(k) for k in expected} == expected
    assert attributes(client)["gen_ai.response.time_to_first_chunk"] > 0
    assert server.start_time_unix_nano <= client.start_time_unix_nano
    assert client.end_time_unix_nano <= server.end_time_unix_nano <= time.time_ns()
    assert SECRET.encode() not in b"".join(seen.raw)


async def test_a_call_without_a_trace_begins_one_that_the_engine_joins(tmp_path: Path) -> None:
    async with collector() as seen:
        async with whole_proxy(tmp_path, tracing=traced(seen)) as it:
            await it.data.get("/v1/models")
            got = engine_parent(it.engine.exchanges[-1])
        (server,), (client,) = seen.of_kind(SERVER), seen.of_kind(CLIENT)
    assert server.parent_span_id == b""
    assert got.span_id == int.from_bytes(client.span_id, "big")
    assert got.trace_id == int.from_bytes(server.trace_id, "big")
    assert got.flags & 1


@pytest.mark.parametrize("given", [[f"00-{TRACE}-{PARENT}"], ["x"], [f"00-{TRACE}-{PARENT}-01"] * 2])
async def test_what_cannot_be_continued_passes_untouched(tmp_path: Path, given: list[str]) -> None:
    async with collector() as seen:
        async with whole_proxy(tmp_path, tracing=traced(seen)) as it:
            await it.data.get("/v1/models", headers=[("traceparent", value) for value in given])
            assert it.engine.exchanges[-1].header(b"traceparent") == [v.encode() for v in given]
        (server,) = seen.of_kind(SERVER)
        assert server.trace_id.hex() != TRACE
        assert not seen.of_kind(CLIENT)


async def test_a_trace_that_its_client_does_not_record_passes_untouched(tmp_path: Path) -> None:
    async with collector() as seen:
        async with whole_proxy(tmp_path, tracing=traced(seen)) as it:
            given = f"00-{TRACE}-{PARENT}-00"
            await it.data.get("/v1/models", headers={"traceparent": given})
            assert it.engine.exchanges[-1].header(b"traceparent") == [given.encode()]
        assert seen.spans == []


async def test_a_call_that_is_not_sampled_is_not_sampled_by_the_engine_either(tmp_path: Path) -> None:
    async with collector() as seen:
        async with whole_proxy(tmp_path, tracing=traced(seen, sample=0.0)) as it:
            await it.data.get("/v1/models")
            assert engine_parent(it.engine.exchanges[-1]).flags == 0
            await it.data.get("/v1/models", headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        assert [s.trace_id.hex() for s in seen.of_kind(SERVER)] == [TRACE]


async def test_what_went_wrong_is_marked_and_a_client_that_left_is_no_fault(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        if exchange.target == b"/reset":
            exchange.writer.transport.abort()
        elif exchange.target == b"/hold":
            await asyncio.Event().wait()
        else:
            await exchange.respond(404, b"")

    async with collector() as seen:
        async with whole_proxy(tmp_path, script=script, ready=False, tracing=traced(seen)) as it:
            await it.data.get("/reset")
            await it.data.get("/missing")
            await _hang_up(it)
        spans = {attributes(span)["url.path"]: span for span in seen.of_kind(SERVER)}
        reset, missing, hold = spans["/reset"], spans["/missing"], spans["/hold"]
    assert (reset.status.code, attributes(reset)["error.type"]) == (Status.STATUS_CODE_ERROR, "502")
    assert "broke the connection" in reset.status.message
    assert (missing.status.code, attributes(missing)["error.type"]) == (Status.STATUS_CODE_UNSET, "404")
    assert (hold.status.code, attributes(hold)["error.type"]) == (Status.STATUS_CODE_UNSET, "aborted")


async def _hang_up(it: Whole) -> None:
    client = await RawClient.connect(it.data.base_url.port or 0)
    await client.request(b"GET", b"/hold")
    async with it.patience():
        while not any(e.target == b"/hold" for e in it.engine.exchanges):
            await it.admin.get("/livez")
        client.hang_up()
        while it.runtime.metrics.in_flight._value.get():
            await it.admin.get("/livez")


async def test_a_collector_that_is_away_costs_nobody_an_answer(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, tracing=TracingConfig(endpoint="http://127.0.0.1:9")) as it:
        assert (await it.chat([user("hi")])).status_code == 200
        body = json.dumps({"model": NAME, "messages": [user("hi")]})
        assert (await it.data.post("/v1/chat/completions", content=body)).status_code == 200


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://h:4318", "http://h:4318/v1/traces"),
        ("http://h:4318/", "http://h:4318/v1/traces"),
        ("http://h/otlp/v1/traces", "http://h/otlp/v1/traces"),
    ],
)
def test_the_path_may_be_left_out(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url
