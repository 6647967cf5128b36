"""The engine's surface: its bytes both ways in every mode, whatever becomes of the lifecycle beside it."""

import asyncio
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from lifecycle.core.directives import Admit
from lifecycle.core.events import CallArrived, CallEnded, CallMapped, UntrackedForwarded
from lifecycle.errors import LogUnavailable
from lifecycle.vocabulary import CallEnd, DirectiveOutcome, Mode
from proxy.config import KeyConfig, ModeRule, TenantConfig
from proxy.data_app import DataApp
from proxy.hooks_api import HooksApi
from proxy.normalise import Normalising
from proxy.ops_api import OpsApi
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.lives import GatedLog
from tests.proxy.live_server import RawClient, fetch, serve
from tests.proxy.scripted_upstream import Exchange, chat_chunks
from tests.proxy.several_engines import several_engines
from tests.proxy.toy_model import CHUNK, NAME
from tests.proxy.whole_proxy import Whole, assistant, lifecycle, system, user, whole_proxy

CHAT = "/v1/chat/completions"
AWKWARD = (
    b'{ "model" : "toy",\n"messages":[{"role":"user","content":"\\ud800 \\u00e9 \xf0\x9f\x98\x80"}],'
    b'"seed":1.0e2,"x":1e400,"x":2, "n":1 }'
)
MODES = list(Mode)
KEYS = {"KEY_A": "secret-a", "KEY_B": "secret-b", "KEY_ADMIN": "secret-admin"}


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def keys() -> tuple[KeyConfig, ...]:
    return (
        KeyConfig(tenant="a", key_sha256=sha("secret-a")),
        KeyConfig(tenant="b", key_sha256=sha("secret-b")),
        KeyConfig(tenant="ops", key_sha256=sha("secret-admin"), admin=True),
    )


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer secret-{name}"}


def port_of(it: Whole) -> int:
    return int(it.up.data_url.rpartition(":")[2])


def sent(it: Whole) -> dict[str, Any]:
    """The last body that the engine got."""
    body: dict[str, Any] = json.loads(it.toy.bodies[-1])
    return body


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


# -- hints ------------------------------------------------------------------------------------------------


async def settled_admissions(it: Whole) -> list[Any]:
    return [
        r.result
        for r in it.runtime.tracker.contexts.directives.values()
        if isinstance(r.directive, Admit) and r.result is not None
    ]


async def test_a_one_off_is_kept_out_of_the_store(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        prompt = [system("you sum up what you are told"), user("a long story of which nothing is kept" * 3)]
        await it.chat(prompt, lifecycle(ctx="once", one_off=True))
        assert sent(it)["kv_transfer_params"] == {"lmcache.max_offload_tokens": 0}
        assert it.cache.chunks == {}
        assert it.toy.bodies[-1].startswith(json.dumps({"model": NAME})[:-1].encode())


async def test_a_forked_one_off_keeps_what_its_parent_has_proven(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        parent = [system("you are the parent"), user("tell me something long enough to fill some chunks")]
        await it.chat(parent, lifecycle(ctx="p"))
        keys_ = it.toy.keys(parent)
        namespace = it.context("p").namespace
        index = it.runtime.tracker.contexts.index
        await it.until(lambda: index.verified_chunks(namespace, b"".join(keys_)) == len(keys_))
        own = [*parent, assistant("ok"), user("sum up what was said so far, in one sentence")]
        await it.chat(own, lifecycle(ctx="s", parent="p", fork_at=2, one_off=True))
        boundary = sent(it)["kv_transfer_params"]["lmcache.max_offload_tokens"]
        assert boundary % CHUNK == 0
        assert 0 < boundary <= len(it.toy.tokens(parent))
        assert set(it.cache.chunks) >= set(keys_)
        past = set(it.toy.keys(own)) - set(keys_)
        assert past
        assert not past & set(it.cache.chunks)


async def test_observe_sends_no_hint_and_says_what_it_would_have_done(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, Mode.OBSERVE) as it:
        await it.chat([user("sum up")], lifecycle(ctx="once", one_off=True))
        assert "kv_transfer_params" not in sent(it)
        await it.until(lambda: bool(it.runtime.tracker.contexts.directives))
        await it.until(lambda: all(r.result for r in it.runtime.tracker.contexts.directives.values()))
        (result,) = await settled_admissions(it)
        assert (result.outcome, result.reason) == (DirectiveOutcome.SUPPRESSED, "observe mode")
        assert not it.cache.asked


async def test_a_held_out_context_is_observed_among_enforced_ones(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, holdout=1.0) as it:
        await it.chat([user("sum up")], lifecycle(ctx="once", one_off=True))
        assert "kv_transfer_params" not in sent(it)


async def test_a_plan_that_comes_too_late_does_not_hold_the_call_and_expires(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, plan_wait_seconds=0.02) as it:
        log = GatedLog(it.runtime.event_log)
        it.runtime.tracker._log = log
        log.gate.clear()
        body = {"model": NAME, "messages": [user("sum up")]}
        answer = await it.data.post(CHAT, json=body, headers=lifecycle(ctx="once", one_off=True))
        assert answer.json()["choices"][0]["message"]["content"] == "ok"
        assert "kv_transfer_params" not in sent(it)
        log.gate.set()
        await it.until(
            lambda: any(r.result is not None for r in it.runtime.tracker.contexts.directives.values())
        )
        (result,) = await settled_admissions(it)
        assert result.outcome is DirectiveOutcome.EXPIRED


async def test_a_cache_without_the_hint_is_not_sent_one(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, cache=FakeCache(frozenset({"reclaim"}), CHUNK)) as it:
        await it.chat([user("sum up")], lifecycle(ctx="once", one_off=True))
        assert "kv_transfer_params" not in sent(it)


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


# -- failures ---------------------------------------------------------------------------------------------


async def untracked(it: Whole) -> list[str]:
    await it.until(lambda: it.runtime.tracker.contexts.index.namespaces() != [])
    return [e.reason for e in await it.events(UntrackedForwarded)]


class Broken:
    """Whatever is asked of it fails."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is broken")


@pytest.mark.parametrize("part", ["tracking", "hasher", "modes"])
async def test_whatever_breaks_the_answer_is_the_engines(tmp_path: Path, part: str) -> None:
    async with whole_proxy(tmp_path) as it:
        runtime = it.runtime
        parts: dict[str, Any] = {
            "tracking": runtime.tracking,
            "modes": runtime.modes,
            "hasher": runtime.hasher,
        }
        parts[part] = Broken()
        app = DataApp(
            runtime.backends,
            runtime.placing,
            lambda upstream: upstream,
            runtime.auth,
            parts["tracking"],
            parts["modes"],
            parts["hasher"],
            runtime.metrics,
            OpsApi(runtime.declarations, runtime.auth, runtime.limits),
            HooksApi(runtime.hooks, runtime.auth),
            runtime.limits,
            Normalising(runtime.config, lambda model: model, lambda model, tenant: Mode.OBSERVE, print),
            frozenset(),
            10_000_000,
        )
        body = json.dumps({"model": NAME, "messages": [user("hi")]}).encode()
        async with serve(app) as port:
            answer = await fetch(port, b"POST", CHAT.encode(), (), body)
        assert answer.status == 200
        assert json.loads(answer.body)["choices"][0]["message"]["content"] == "ok"
        assert it.toy.bodies[-1] == body
        assert part == "tracking" or await untracked(it)


async def test_an_identity_that_cannot_be_found_leaves_the_call_untracked(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        it.runtime.tracking.calls.finder._lineage = Broken()  # type: ignore[assignment]
        answer = await it.chat([user("hi")])
        assert answer.json()["choices"][0]["message"]["content"] == "ok"
        assert await untracked(it)
        assert not it.runtime.tracker.contexts.states


async def test_a_mapper_that_fails_leaves_the_call_unmapped(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        service = it.runtime.models[NAME].service
        assert service is not None
        service._mapper = Broken()  # type: ignore[assignment]
        answer = await it.chat([user("hi")], lifecycle(ctx="a"))
        assert answer.json()["choices"][0]["message"]["content"] == "ok"
        (mapped,) = await it.events(CallMapped)
        assert "RuntimeError" in mapped.reason
        assert it.context("a").unmapped
        assert not it.context("a").flights


async def test_while_the_log_is_away_answers_come_and_what_was_seen_waits(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat([user("hi")], lifecycle(ctx="a", call="1"))
        log = GatedLog(it.runtime.event_log)
        it.runtime.tracker._log = log
        log.away = LogUnavailable("disk full")
        answer = await it.chat([user("hi"), assistant("ok"), user("2")], lifecycle(ctx="a", call="2"))
        assert answer.json()["choices"][0]["message"]["content"] == "ok"
        fresh = {"model": NAME, "messages": [user("new")]}
        answer = await it.data.post("/v1/chat/completions", json=fresh, headers=lifecycle(ctx="new"))
        assert answer.json()["choices"][0]["message"]["content"] == "ok"
        assert it.runtime.tracker.degraded
        assert it.runtime.tracker.degraded in (await it.admin.get("/readyz")).json()["problems"]
        log.away = None
        await it.until(lambda: not it.runtime.tracker.degraded)
        state = it.context("a")
        assert set(state.attempts) == {"1", "2"}
        assert not state.flights
        await it.runtime.mailboxes.settled()
        assert it.context("new").attempts
        assert [ended.end for ended in await it.events(CallEnded)] == [CallEnd.COMPLETED] * 3
        assert not await untracked(it)


async def test_a_log_that_cannot_be_opened_or_read_leaves_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    path.write_bytes(b"this is no database" * 100)
    async with whole_proxy(tmp_path, log_url=f"sqlite:///{path}") as it:
        answer = await it.chat([user("hi")])
        assert answer.status_code == 200
        problems = (await it.admin.get("/readyz")).json()["problems"]
        assert any("event log" in p for p in problems)
        assert it.runtime.objection(it.runtime.tracking.namespace(NAME, ""))


# -- the end of a call ------------------------------------------------------------------------------------


async def test_a_hang_up_is_recorded_as_aborted_and_stops_the_engine(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        if exchange.target != CHAT.encode():
            await exchange.respond_json({"data": [{"id": NAME}], "version": "1"})
            return
        await exchange.start_stream()
        await exchange.chunk(chat_chunks(["a"])[1])
        await asyncio.Event().wait()

    async with whole_proxy(tmp_path, script=script) as it:
        client = await RawClient.connect(port_of(it))
        body = json.dumps({"model": NAME, "messages": [user("hi")], "stream": True}).encode()
        await client.request(b"POST", CHAT.encode(), [(b"x-kv-lifecycle", b'ctx="a"')], body)
        await client.read_head()
        await client.read_chunk()
        client.hang_up()
        await it.until(lambda: bool(it.runtime.tracker.contexts.states) and not it.context("a").flights)
        await it.runtime.mailboxes.settled()
        (end,) = await it.events(CallEnded)
        assert end.end is CallEnd.ABORTED
        await asyncio.wait_for(it.engine.exchanges[-1].hung_up.wait(), 10)


async def test_an_engine_that_is_not_there_is_a_failed_call(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        it.engine._server.close()  # type: ignore[union-attr]
        for task in list(it.engine._connections):
            task.cancel()
        answer = await it.chat([user("hi")], lifecycle(ctx="a"))
        assert answer.status_code == 502
        (end,) = await it.events(CallEnded)
        assert end.end is CallEnd.FAILED


async def test_a_retry_is_another_attempt_of_the_same_call(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        for _ in range(2):
            await it.chat([user("hi")], lifecycle(ctx="a", call="c"))
        assert [e.attempt for e in await it.events(CallArrived)] == [1, 2]
        assert it.context("a").attempts == {"c": 2}
        assert not it.context("a").flights


# -- untracked --------------------------------------------------------------------------------------------


async def test_inference_that_is_not_followed_is_noted(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, modes=(ModeRule(mode=Mode.BYPASS, model="other"),)) as it:
        await it.data.post("/v1/score", json={"model": NAME, "input": "x"})
        reasons = await untracked(it)
        assert any("/v1/score" in r for r in reasons)
        await it.data.post("/v1/messages/count_tokens", json={"model": NAME, "messages": []})
        assert (await it.data.get("/v1/models")).status_code == 200
        assert (await it.data.get("/nowhere?x=1")).json() == {"path": "/nowhere"}
        assert await untracked(it) == reasons
        await it.chat([user("hi")])
        assert it.runtime.tracker.contexts.states


async def test_bypass_takes_effect_on_the_next_call_and_ends_on_the_one_after(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        assert "x-kv-context" in (await it.chat([user("hi")])).headers
        await it.admin.post("/kv/v1/bypass")
        position = it.runtime.tracker.contexts.position
        answer = await it.chat([user("hi")], lifecycle(ctx="once", one_off=True))
        assert not {"x-kv-context", "server-timing"} & set(answer.headers)
        assert "kv_transfer_params" not in sent(it)
        await it.until(lambda: it.runtime.tracker.contexts.position > position)
        assert not [r for r in (await it.recorded())[position:] if isinstance(r.event, CallArrived)]
        assert await it.events(UntrackedForwarded)
        await it.admin.post("/kv/v1/bypass?on=false")
        assert "x-kv-context" in (await it.chat([user("hi")])).headers


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


async def test_what_an_engine_quotes_of_a_prompt_is_not_recorded(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        toy = it.engine.script

        async def script(exchange: Exchange) -> None:
            if exchange.method == "POST":
                await exchange.read_body()
                await exchange.respond_json({"error": {"message": "you wrote Xyzzy"}}, 400)
            else:
                await toy(exchange)

        it.engine.script = script
        assert "Xyzzy" in (await it.chat([user("Xyzzy")], lifecycle(ctx="a"))).text
        recorded = await it.recorded()
        assert [r.event.detail for r in recorded if isinstance(r.event, CallEnded)] == [
            "the engine answered 400"
        ]
        assert "Xyzzy" not in str(recorded)


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
