"""Whatever breaks, ends early or is not followed: the answer is the engine's, and the log says so."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lifecycle.core.events import CallArrived, CallEnded, CallMapped, UntrackedForwarded
from lifecycle.errors import LogUnavailable
from lifecycle.vocabulary import CallEnd, Mode
from proxy.config import ModeRule
from proxy.data_app import DataApp
from proxy.hooks_api import HooksApi
from proxy.normalise import Normalising
from proxy.ops_api import OpsApi
from tests.lifecycle.lives import GatedLog
from tests.proxy.live_server import RawClient, fetch, serve
from tests.proxy.scripted_upstream import Exchange, chat_chunks
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import CHAT, Whole, assistant, lifecycle, port_of, sent, user, whole_proxy

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
        it.runtime.tracking.calls.finder = Broken()  # type: ignore[assignment]
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
