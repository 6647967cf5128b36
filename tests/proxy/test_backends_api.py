"""Engines listed, drained and taken in again over the admin listener."""

from pathlib import Path

from lifecycle.core.events import CallArrived
from proxy.config import KeyConfig
from tests.proxy.several_engines import several_engines
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import assistant, lifecycle, user, whole_proxy


async def test_engines_are_shown_as_they_are(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        place = await it.served([user("hi")], lifecycle(ctx="c"))
        listed = {each["name"]: each for each in (await it.admin.get("/kv/v1/backends")).json()["items"]}
        assert listed.keys() == {"a", "b"}
        assert listed[place] == {
            "name": place,
            "url": it.engines[place].url,
            "state": "up",
            "reason": "",
            "models": [NAME],
            "calls": 0,
            "contexts": 1,
        }
        await it.engines["a"].kill()
        await it.until_seen(lambda: bool(it.backend("a").down))
        listed = {each["name"]: each for each in (await it.admin.get("/kv/v1/backends")).json()["items"]}
        assert (listed["a"]["state"], listed["b"]["state"]) == ("down", "up")
        assert listed["a"]["reason"]


async def test_a_drained_engine_is_left_and_taken_in_again(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        place = await it.served([user("hi")], lifecycle(ctx="c"))
        said = (await it.admin.post(f"/kv/v1/backends/{place}/drain")).json()
        assert (said["state"], said["contexts"]) == ("draining", 1)
        longer = [user("hi"), assistant("ok"), user("more")]
        assert await it.served(longer, lifecycle(ctx="c")) != place
        said = (await it.admin.post(f"/kv/v1/backends/{place}/resume")).json()
        assert (said["state"], said["contexts"]) == ("up", 0)
        placed = [e.placed for e in await it.events(CallArrived)]
        assert placed == ["by its root", f"{place} takes no calls now"]


async def test_an_engine_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        answer = await it.admin.post("/kv/v1/backends/nobody/drain")
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"
        assert "there are a, b" in answer.json()["detail"]


async def test_only_the_admin_scope_drains(tmp_path: Path) -> None:
    sha = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    async with several_engines(tmp_path, api_keys=(KeyConfig(tenant="t", key_sha256=sha),)) as it:
        assert (await it.admin.post("/kv/v1/backends/a/drain")).status_code == 401
        assert not it.backend("a").draining


async def test_one_engine_is_shown_too_and_cannot_be_drained(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, models=(), ready=False) as it:
        (shown,) = (await it.admin.get("/kv/v1/backends")).json()["items"]
        assert (shown["name"], shown["url"], shown["state"]) == ("", it.engine.url, "up")
        assert (await it.admin.post("/kv/v1/backends/a/drain")).status_code == 404
