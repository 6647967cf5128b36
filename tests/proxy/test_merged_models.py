"""One list of models for several engines; with one engine its own bytes."""

from pathlib import Path

from tests.proxy.scripted_upstream import Exchange
from tests.proxy.several_engines import several_engines
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import whole_proxy


async def test_everything_that_anybody_serves_stands_there_once(tmp_path: Path) -> None:
    async with several_engines(tmp_path, ("a", "b", "c")) as it:
        it.engines["b"].models = ["adapter", NAME]
        it.engines["c"].models = ["another"]
        listed = (await it.data.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [(m["id"], m["owned_by"]) for m in listed["data"]] == [
            (NAME, "a"),
            ("adapter", "b"),
            ("another", "c"),
        ]
        await it.engines["a"].kill()
        listed = (await it.data.get("/v1/models")).json()
        assert [m["owned_by"] for m in listed["data"]] == ["b", "b", "c"]


async def test_calls_go_to_engines_that_serve_their_model(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        it.engines["b"].models = [NAME, "only-b"]
        # One that was away is asked again what it serves.
        it.runtime.backends.take_down(it.backend("b"), "tried")
        it.backend("b").suspected.set()
        await it.until_seen(lambda: it.backend("b").models == {NAME, "only-b"})
        await it.until_seen(lambda: not it.backend("b").down)
        for n in range(6):
            body = {"model": "only-b", "prompt": str(n)}
            await it.data.post("/v1/completions", json=body)
        assert len(it.engines["b"].calls()) == 6
        one = await it.data.get("/v1/models/only-b")
        assert one.status_code
        assert it.engines["b"].exchanges[-1].target == b"/v1/models/only-b"


async def test_what_an_engine_tells_one_client_changes_nothing_for_the_others(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:

        async def by_key(exchange: Exchange) -> None:
            if exchange.header(b"authorization"):
                await exchange.read_body()
                await exchange.respond_json({"object": "list", "data": []})
            else:
                await it.engines["b"].answer(exchange)

        it.engines["b"].script = by_key
        listed = (await it.data.get("/v1/models", headers={"authorization": "Bearer theirs"})).json()
        assert [m["owned_by"] for m in listed["data"]] == ["a"]
        assert it.backend("b").models == {NAME}


async def test_with_nobody_there_that_is_said(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        for engine in it.engines.values():
            await engine.kill()
        answer = await it.data.get("/v1/models")
        assert answer.status_code == 502
        assert answer.json()["error"]["type"] == "kvtether_upstream_unreachable"


async def test_where_no_engine_gives_a_list_an_engines_refusal_is_passed_on(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:

        async def refuse(exchange: object) -> None:
            await exchange.read_body()  # type: ignore[attr-defined]
            await exchange.respond(401, b'{"error": "no"}')  # type: ignore[attr-defined]

        for engine in it.engines.values():
            engine.script = refuse
        answer = await it.data.get("/v1/models")
        assert (answer.status_code, answer.json()) == (401, {"error": "no"})


async def test_one_engines_list_is_its_own(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        ours = await it.data.get("/v1/models")
        theirs = await it.data.get(f"{it.engine.url}/v1/models")
        assert ours.content == theirs.content
