"""The engine's surface: its bytes both ways in every mode, whose they are, and which engine they go to."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from lifecycle.vocabulary import Mode
from proxy.config import TenantConfig
from tests.proxy.api_keys import bearer, keys
from tests.proxy.live_server import fetch
from tests.proxy.scripted_upstream import Exchange, chat_chunks
from tests.proxy.several_engines import several_engines
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import CHAT, assistant, lifecycle, port_of, sent, user, whole_proxy

AWKWARD = (
    b'{ "model" : "toy",\n"messages":[{"role":"user","content":"\\ud800 \\u00e9 \xf0\x9f\x98\x80"}],'
    b'"seed":1.0e2,"x":1e400,"x":2, "n":1 }'
)
MODES = list(Mode)


# -- bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_bodies_reach_the_engine_as_they_are_and_answers_the_client(tmp_path: Path, mode: Mode) -> None:
    answers: list[bytes] = []

    async def script(exchange: Exchange) -> None:
        body = await exchange.read_body()
        if exchange.target != CHAT.encode():
            await exchange.respond_json({"data": [{"id": NAME}], "version": "1"})
        elif b'"stream": true' in body:
            await exchange.start_stream()
            for chunk in chat_chunks(["é", "b"]):
                await exchange.chunk(chunk)
            await exchange.end_stream()
        else:
            answers.append(b'{"odd" :  1.0e5, "choices": []}')
            await exchange.respond(200, answers[-1], [(b"Content-Type", b"application/json")])

    async with whole_proxy(tmp_path, mode, script=script) as it:
        headers = [(b"content-type", b"application/json")]
        got = await fetch(port_of(it), b"POST", CHAT.encode(), headers, AWKWARD)
        assert (got.status, got.body) == (200, answers[-1])
        stream = AWKWARD.replace(b'"n":1', b'"stream": true')
        got = await fetch(port_of(it), b"POST", CHAT.encode(), headers, stream)
        assert got.body == b"".join(chat_chunks(["é", "b"]))
        bodies = [e.body for e in it.engine.exchanges if e.target == CHAT.encode()]
        labelled = re.compile(rb',"session_id":"s_[-\w]+"')
        assert [labelled.subn(b"", b) for b in bodies] == [
            (b, int(mode is Mode.ENFORCE)) for b in (AWKWARD, stream)
        ]
        added = {n for n, _ in got.headers} & {
            b"x-kv-context",
            b"x-kv-call",
            b"x-kv-mapping",
            b"server-timing",
        }
        assert bool(added) == (mode is not Mode.BYPASS)


@pytest.mark.parametrize("mode", MODES)
async def test_what_is_ours_and_what_is_forbidden_is_cut_out_in_every_mode(
    tmp_path: Path, mode: Mode
) -> None:
    async with whole_proxy(tmp_path, mode) as it:
        body = {
            "model": NAME,
            "messages": [user("hi")],
            "kv_lifecycle": {"ctx": "a"},
            "kv_transfer_params": {
                "lmcache.max_offload_tokens": "boom",
                "lmcache.other": 1,
                "prompt_token_ids": [1],
                "cached_token_stats": True,
            },
        }
        for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages"):
            await it.data.post(path, json=body)
            got = sent(it)
            assert "kv_lifecycle" not in got
            assert got["kv_transfer_params"] == {"cached_token_stats": True}
        await it.data.post(
            CHAT, json={**body, "kv_transfer_params": {"cached_token_stats": "yes", "max_offload_tokens": 1}}
        )
        assert not sent(it).get("kv_transfer_params")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": 1}'])
async def test_what_is_no_chat_call_is_the_engines_to_judge(tmp_path: Path, content: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        if exchange.method == "POST":
            await exchange.respond(422, b"no", [(b"Content-Type", b"text/plain")])
        else:
            await exchange.respond_json({"data": [{"id": NAME}], "version": "1"})

    async with whole_proxy(tmp_path, script=script) as it:
        answer = await it.data.post(CHAT, content=content)
        assert (answer.status_code, answer.content) == (422, b"no")
        assert it.engine.exchanges[-1].body == content


# -- tenants ----------------------------------------------------------------------------------------------


async def test_salts_separate_tenants_and_a_clients_salt_counts_within_its_own(tmp_path: Path) -> None:
    salted = (TenantConfig(name="a", isolation="salt"),)
    async with whole_proxy(tmp_path, api_keys=keys(), tenants=salted) as it:

        async def salt_of(key: str, salt: object = None) -> object:
            fields = {} if salt is None else {"cache_salt": salt}
            await it.chat([user("hi")], bearer(key), **fields)
            return sent(it).get("cache_salt")

        own = await salt_of("a")
        assert isinstance(own, str)
        assert own
        assert await salt_of("a") == own
        assert await salt_of("b") is None
        chosen = [await salt_of("a", "x"), await salt_of("b", "x"), await salt_of("b", "y")]
        assert len({own, "x", "y", *chosen}) == 6
        assert await salt_of("b", own) != own
        namespaces = {s.namespace.salt for s in it.runtime.tracker.contexts.states.values()}
        assert {own, "", *chosen} <= namespaces


async def test_a_salted_tenant_stays_apart_whatever_fails(tmp_path: Path) -> None:
    salted = (TenantConfig(name="a", isolation="salt"),)
    async with whole_proxy(tmp_path, api_keys=keys(), tenants=salted) as it:
        await it.chat([user("hi")], bearer("a"))
        own = sent(it)["cache_salt"]
        it.runtime.modes.of = None  # type: ignore[method-assign,assignment]
        await it.chat([user("hi")], bearer("a"))
        assert sent(it)["cache_salt"] == own
        for path in ("/v1/completions", "/v1/messages"):
            await it.data.post(path, json={"model": NAME, "prompt": "x"}, headers=bearer("a"))
            assert sent(it)["cache_salt"] == own


async def test_keys_and_scopes(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, api_keys=keys()) as it:
        body = {"model": NAME, "messages": [user("hi")]}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            answer = await it.data.post(CHAT, json=body, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "kvtether_unauthenticated"
        assert it.toy.bodies == []
        assert (await it.data.post(CHAT, json=body, headers={"x-api-key": "secret-a"})).status_code == 200
        assert not [e for e in it.engine.exchanges if e.header(b"authorization") or e.header(b"x-api-key")]
        for path in ("/reset_prefix_cache", "/sleep?level=1", "/v1/load_lora_adapter", "/collective_rpc"):
            answer = await it.data.post(path, headers=bearer("a"))
            assert (answer.status_code, answer.json()["error"]["type"]) == (403, "kvtether_forbidden")
            assert (await it.data.post(path, headers=bearer("admin"))).status_code == 200


# -- headers ----------------------------------------------------------------------------------------------


async def test_the_answer_says_what_we_made_of_the_call(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        answer = await it.chat([user("hi")], lifecycle(ctx="a", call="c-1"))
        assert answer.headers["x-kv-context"] == "a"
        assert answer.headers["x-kv-call"] == "c-1"
        assert answer.headers["x-kv-mapping"] in ("exact", "none")
        assert "kvtether;dur=" in answer.headers["server-timing"]
        assert "x-kv-lifecycle-error" not in answer.headers
        first = await it.chat([user("a call without a name")])
        again = await it.chat([user("a call without a name"), assistant("ok"), user("go on")])
        assert first.headers["x-kv-context"] == again.headers["x-kv-context"]
        assert first.headers["x-kv-call"] != again.headers["x-kv-call"]
        stranger = await it.chat([user("somebody else")])
        assert stranger.headers["x-kv-context"] != first.headers["x-kv-context"]


async def test_malformed_fields_never_fail_a_call_and_are_said(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        answer = await it.chat([user("hi")], {"x-kv-lifecycle": 'ctx="a", fork_at="x", )('})
        assert answer.status_code == 200
        assert answer.headers["x-kv-lifecycle-error"]
        answer = await it.chat([user("hi")], kv_lifecycle={"ctx": 7, "seq": "x"})
        assert answer.status_code == 200
        assert "ctx" in answer.headers["x-kv-lifecycle-error"]


async def test_many_at_once_are_each_answered_with_their_own(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        it.toy.answer = lambda body: body["messages"][-1]["content"] + " is what you said"

        async def one(n: int) -> httpx.Response:
            body = {"model": NAME, "messages": [user(f"number {n}")], "stream": bool(n % 2)}
            return await it.data.post(CHAT, json=body, headers=lifecycle(ctx=f"c{n % 7}", call=f"{n}"))

        answers: Sequence[httpx.Response] = await asyncio.gather(*(one(n) for n in range(40)))
        for n, answer in enumerate(answers):
            assert answer.headers["x-kv-call"] == str(n)
            assert "is what you said" in answer.text or "s what you said" in answer.text
        await it.runtime.mailboxes.settled()
        states = it.runtime.tracker.contexts.states.values()
        assert sum(len(s.attempts) for s in states) == 40
        assert not any(s.flights for s in states)


# -- several engines --------------------------------------------------------------------------------------


async def test_what_changes_an_engine_must_name_it(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        for headers in ({}, {"x-kv-backend": "nobody"}):
            answer = await it.data.post("/reset_prefix_cache", headers=headers)
            assert answer.status_code == 400
            assert "one of a, b" in answer.json()["error"]["message"]
        await it.data.post("/reset_prefix_cache", headers={"x-kv-backend": "b"})
        (reached,) = it.engines["b"].calls()
        assert reached.target == b"/reset_prefix_cache"
        assert reached.header(b"x-kv-backend") == []
        assert it.engines["a"].calls() == []


async def test_any_other_request_may_name_its_engine(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        for name in ("a", "b", "b"):
            await it.data.get("/metrics", headers={"x-kv-backend": name})
        seen = {
            name: sum(e.target == b"/metrics" for e in engine.exchanges)
            for name, engine in it.engines.items()
        }
        assert seen == {"a": 1, "b": 2}
        assert (await it.data.get("/metrics")).status_code
