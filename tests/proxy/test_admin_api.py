"""Everything that is true, read back and steered; only by those who may."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from lifecycle.core.events import ContextCreated
from lifecycle.errors import LogUnavailable
from lifecycle.vocabulary import Mode
from proxy.config import Listener
from tests.lifecycle.lives import GatedLog
from tests.proxy.api_keys import bearer, keys
from tests.proxy.live_server import fetch
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import Whole, assistant, lifecycle, user, whole_proxy

LIST = [user("a first message that is long enough for a chunk or two"), assistant("ok"), user("two")]


async def get(it: Whole, path: str, status: int = 200) -> Any:
    answer = await it.admin.get(path)
    assert answer.status_code == status, answer.text
    if status >= 400:
        assert answer.headers["content-type"] == "application/problem+json"
        assert {"type", "title", "status", "detail", "instance"} <= answer.json().keys()
    return answer.json()


async def post(it: Whole, path: str, body: object = None) -> Any:
    answer = await it.admin.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_health_says_whether_the_cache_may_be_touched(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        assert await get(it, "/livez") == {"status": "alive"}
        ready = await get(it, "/readyz")
        assert (ready["status"], ready["control"], ready["level"]) == ("ready", True, 1)
        assert ready["problems"] == []
        assert (ready["mode"], ready["bypass_all"]) == ("enforce", False)
        it.runtime.blocks.live = False
        assert "events" in (await get(it, "/readyz"))["problems"][0]
    async with whole_proxy(tmp_path, models=()) as it:
        assert any("no model" in p for p in (await get(it, "/readyz"))["problems"])


async def test_a_context_with_all_that_is_known_of_it_and_no_text(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx="a", call="c-1", agent="tester", flow="f"))
        uid = it.context("a").uid
        namespace = it.context("a").namespace
        index = it.runtime.tracker.contexts.index
        run = b"".join(it.toy.keys(LIST))
        await it.until(lambda: index.verified_chunks(namespace, run) * 32 == len(run))
        shown = await get(it, f"/kv/v1/contexts/{uid}")
        assert (shown["context_id"], shown["agent"], shown["flow"]) == ("a", "tester", "f")
        assert shown["state"] == "waiting"
        messages = [v for v in shown["versions"] if v["index"] >= 0]
        assert [v["role"] for v in messages] == ["user", "assistant", "user"]
        ends = [v["tokens"][1] for v in messages]
        assert ends == sorted(ends)
        in_order = [c["key"] for v in shown["versions"] for c in v["chunks"]]
        assert in_order[: len(run) // 32] == [key.hex() for key in it.toy.keys(LIST)]
        assert all("OURS" in c["flags"] for v in messages for c in v["chunks"])
        assert "long enough" not in json.dumps(shown)
        events = (await get(it, f"/kv/v1/contexts/{uid}/events"))["events"]
        assert events[0]["event"]["type"] == ContextCreated.__struct_config__.tag
        assert [e["version"] for e in events] == list(range(1, len(events) + 1))
        rest = await get(it, f"/kv/v1/contexts/{uid}/events?after=1&limit=1")
        assert [e["version"] for e in rest["events"]] == [2]
        assert rest["after"] == 2
        call = await get(it, "/kv/v1/calls/c-1")
        assert call["contexts"] == [{"uid": uid, "attempts": 1, "in_flight": []}]
        chunk = await get(it, f"/kv/v1/chunks/{it.toy.keys(LIST)[0].hex()}")
        assert chunk["books"][0]["references"] >= 1
        assert chunk["books"][0]["model"] == NAME


async def test_lists_are_paged_and_filtered(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, api_keys=keys()) as it:
        it.admin.headers.update(bearer("admin"))
        for n in range(7):
            await it.chat([user(f"{n}")], {**lifecycle(ctx=f"c{n}"), **bearer("a" if n % 2 else "b")})
        seen: list[str] = []
        cursor = ""
        for _ in range(3):
            page = await get(it, f"/kv/v1/contexts?limit=3&cursor={cursor}")
            seen += [row["context_id"] for row in page["items"]]
            cursor = page["next"]
        assert cursor == ""
        assert sorted(seen) == [f"c{n}" for n in range(7)]
        of_a = await get(it, "/kv/v1/contexts?tenant=a")
        assert {row["tenant"] for row in of_a["items"]} == {"a"}
        assert len(of_a["items"]) == 3
        (named,) = (await get(it, "/kv/v1/contexts?ctx=c4"))["items"]
        await post(it, f"/kv/v1/contexts/{named['uid']}/close")
        (closed,) = (await get(it, "/kv/v1/contexts?state=closed"))["items"]
        assert closed["uid"] == named["uid"]
        assert (await get(it, "/kv/v1/contexts?cursor=nonsense"))["items"] == []


async def test_directives_and_tiers(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, Mode.OBSERVE) as it:
        await it.chat(LIST, lifecycle(ctx="a"))
        namespace = it.context("a").namespace
        index = it.runtime.tracker.contexts.index
        await it.until(lambda: index.stats(namespace).verified > 0)
        uid = it.context("a").uid
        await post(it, f"/kv/v1/contexts/{uid}/close")
        contexts = it.runtime.tracker.contexts
        await it.until(
            lambda: bool(contexts.directives) and all(r.result for r in contexts.directives.values())
        )
        items = (await get(it, "/kv/v1/directives"))["items"]
        assert {i["kind"] for i in items} == {"reclaim"}
        assert {i["outcome"] for i in items} == {"suppressed"}
        assert all(i["reason"] for i in items)
        assert (await get(it, "/kv/v1/directives?outcome=applied"))["items"] == []
        assert len((await get(it, "/kv/v1/directives?outcome=suppressed"))["items"]) == len(items)
        tiers = await get(it, "/kv/v1/tiers")
        assert tiers["capabilities"]["driver"] == "fake"
        assert tiers["namespaces"][0]["model"] == NAME
        diagnostics = await get(it, "/kv/v1/diagnostics")
        assert diagnostics["models"][0]["mapped"]
        assert diagnostics["log_position"] == contexts.position
        assert it.cache.asked == []


async def test_pins_are_set_and_given_back_by_hand(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx="a"))
        uid = it.context("a").uid
        answer = await post(it, f"/kv/v1/contexts/{uid}/pin", {"span": "0:2", "ttl": 60})
        assert answer["status"] == "applied"
        await it.until(lambda: bool(it.cache.holds))
        assert it.cache.tokens[-1] is not None
        assert len((await get(it, f"/kv/v1/contexts/{uid}"))["pins_held"]) == 1
        assert (await post(it, f"/kv/v1/contexts/{uid}/unpin", {"span": "0:2"}))["status"] == "applied"
        await post(it, f"/kv/v1/contexts/{uid}/pin", {"span": "0:1"})
        await it.until(lambda: bool(it.context("a").pins))
        released = await post(it, "/kv/v1/release-all")
        assert released["pins"] == 1
        assert not it.context("a").pins
        for body in (b"{", b'{"span": "x"}', b'{"span": "0:1", "x": 1}', b"{}"):
            answer = await it.admin.post(f"/kv/v1/contexts/{uid}/pin", content=body)
            assert answer.status_code == 400, body


async def test_the_dead_are_freed_on_demand_the_living_stay(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx="a"))
        stats = await post(it, f"/kv/v1/contexts/{it.context('a').uid}/reclaim")
        assert stats["dead"] == 0
        assert stats["live"] > 0
        assert set(it.toy.keys(LIST)) <= set(it.cache.chunks)


async def test_modes_change_at_run_time_and_nonsense_changes_nothing(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:

        async def patch(body: object) -> httpx.Response:
            return await it.admin.patch("/kv/v1/config", json=body)

        changed = (await patch({"mode": "observe", "modes": [{"mode": "enforce", "model": "x"}]})).json()
        assert changed["mode"] == "observe"
        assert changed["modes"] == [{"mode": "enforce", "model": "x", "tenant": ""}]
        for wrong in ({"mode": "often"}, {"holdout": 2}, {"nonsense": 1}, []):
            assert (await patch(wrong)).status_code == 400
        assert (await patch({})).json() == changed
        assert (await patch({"holdout": 0.5})).json()["holdout"] == 0.5
        assert (await post(it, "/kv/v1/bypass"))["bypass_all"] is True
        assert (await post(it, "/kv/v1/bypass?on=false"))["bypass_all"] is False
        assert (await it.admin.post("/kv/v1/bypass?on=perhaps")).status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/kv/v1/contexts/nobody", 404),
        ("GET", "/kv/v1/contexts/nobody/events", 404),
        ("POST", "/kv/v1/contexts/nobody/close", 404),
        ("GET", "/kv/v1/calls/nothing", 404),
        ("GET", "/kv/v1/chunks/xyz", 400),
        ("GET", "/kv/v1/chunks/00", 400),
        ("GET", "/kv/v1/contexts?limit=x", 400),
        ("GET", "/nowhere", 404),
        ("DELETE", "/kv/v1/bypass", 405),
    ],
)
async def test_what_is_not_there_is_a_problem(tmp_path: Path, method: str, path: str, status: int) -> None:
    async with whole_proxy(tmp_path, ready=False) as it:
        answer = await it.admin.request(method, path)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == status
        assert answer.json()["instance"] == path.partition("?")[0]


async def test_only_the_admin_scope_comes_in(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, ready=False, api_keys=keys()) as it:
        for path in ("/livez", "/readyz", "/metrics"):
            assert (await it.admin.get(path)).status_code == 200
        paths = ["/kv/v1/contexts", "/kv/v1/events", "/kv/v1/openapi.json", "/nowhere"]
        for path in paths:
            assert (await it.admin.get(path)).status_code == 401
            assert (await it.admin.get(path, headers=bearer("a"))).status_code == 403
        assert (await it.admin.get("/kv/v1/contexts", headers=bearer("admin"))).status_code == 200


async def test_no_other_sites_page_steers_us(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, ready=False) as it:
        port = int(it.up.admin_url.rpartition(":")[2])
        own = b"127.0.0.1:%d" % port

        async def status(host: bytes, *headers: tuple[bytes, bytes]) -> int:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            lines = [b"POST /kv/v1/bypass HTTP/1.1", b"Host: " + host, b"Content-Length: 0"]
            lines += [b"Connection: close", *(n + b": " + v for n, v in headers)]
            writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            return int(answer.split(b" ")[1])

        assert await status(own) == 200
        assert await status(b"localhost") == 200
        assert await status(own, (b"Origin", b"http://" + own)) == 200
        assert await status(b"evil.example") == 403
        assert await status(own, (b"Origin", b"http://evil.example")) == 403
        assert await status(own, (b"Origin", b"null")) == 403
        await it.admin.post("/kv/v1/bypass?on=false")
        assert not it.runtime.modes.bypass_all
        assert (await fetch(port, b"GET", b"/livez")).status == 403


async def test_events_come_as_backlog_and_live_from_any_position(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat([user("one")], lifecycle(ctx="a", call="1"))
        start = it.runtime.tracker.contexts.position

        async def follow(path: str, count: int, started: asyncio.Event) -> list[tuple[int, Any]]:
            seen: list[tuple[int, Any]] = []
            async with it.admin.stream("GET", path) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                started.set()
                position = 0
                async for line in answer.aiter_lines():
                    if line.startswith("id: "):
                        position = int(line.removeprefix("id: "))
                    elif line.startswith("data: "):
                        seen.append((position, json.loads(line.removeprefix("data: "))))
                    if len(seen) == count:
                        break
            return seen

        async def and_live(path: str, count: int) -> list[tuple[int, Any]]:
            started = asyncio.Event()
            following = asyncio.ensure_future(follow(path, count, started))
            await asyncio.wait_for(started.wait(), 10)
            await it.chat([user("two")], lifecycle(ctx=f"b{count}"))
            return await asyncio.wait_for(following, 10)

        both = await and_live("/kv/v1/events?after=0", start + 3)
        assert [p for p, _ in both] == list(range(1, start + 4))
        assert all(e["position"] == p for p, e in both)
        begin = it.runtime.tracker.contexts.position
        live = await and_live("/kv/v1/events", 2)
        assert live[0][0] > start
        assert [p for p, _ in live] == sorted(p for p, _ in live)
        later = await and_live(f"/kv/v1/events?after={begin}", 1)
        assert later[0][0] == begin + 1
        assert "two" not in json.dumps([*both, *live])
        for _ in range(50):
            await asyncio.sleep(0)
        await it.chat([user("three")])
        await asyncio.sleep(0.05)
        listeners = it.runtime.tracker.listeners
        assert not [each for each in listeners if "_event_stream" in getattr(each, "__qualname__", "")]


async def test_while_the_log_is_away_nothing_is_said_to_be_done(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx="a"))
        uid = it.context("a").uid
        log = GatedLog(it.runtime.event_log)
        it.runtime.tracker._log = log
        log.away = LogUnavailable("disk full")
        for path, body in ((f"{uid}/pin", {"span": "0:1"}), (f"{uid}/close", None)):
            answer = await it.admin.post(f"/kv/v1/contexts/{path}", json=body)
            assert answer.status_code == 503
            assert "retry-after" in answer.headers
        log.away = None


async def test_the_admin_listener_has_its_own_address(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, ready=False, admin=Listener("localhost", 0)) as it:
        port = it.up.admin_url.rpartition(":")[2]
        async with httpx.AsyncClient(base_url=f"http://localhost:{port}") as client:
            assert (await client.get("/livez")).status_code == 200
        assert (await it.data.get("/livez")).json() == {"path": "/livez"}
