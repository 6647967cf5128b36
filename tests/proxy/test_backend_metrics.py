"""What is exported of each engine, under the names of the configuration and no others."""

import re
from pathlib import Path

from tests.proxy.several_engines import several_engines
from tests.proxy.whole_proxy import lifecycle, user


async def test_every_engine_has_its_series_and_clients_make_none(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        place = await it.served([user("hi")], lifecycle(ctx="c"))
        other = "b" if place == "a" else "a"
        await it.data.get("/metrics", headers={"x-kv-backend": "made up"})
        await it.data.post("/v1/completions", json={"model": "made up"}, headers={"x-kv-backend": "made up"})

        async def value(name: str, backend: str) -> float:
            text = (await it.admin.get("/metrics")).text
            found = re.search(rf'^{name}{{backend="{backend}"}} (\S+)$', text, re.MULTILINE)
            assert found is not None, text
            return float(found[1])

        assert await value("kvtether_backend_contexts", place) == 1
        assert await value("kvtether_backend_contexts", other) == 0
        assert await value("kvtether_backend_calls_total", place) >= 1
        it.backend(other).draining = True
        assert await value("kvtether_backend_draining", other) == 1
        before = await value("kvtether_backend_losses_total", place)
        assert before == 0
        await it.engines[place].kill()
        await it.until_seen(lambda: bool(it.backend(place).down))
        assert await value("kvtether_backend_up", place) == 0
        assert await value("kvtether_backend_losses_total", place) == 1
        text = (await it.admin.get("/metrics")).text
        assert set(re.findall(r'backend="([^"]*)"', text)) == {"a", "b"}


async def test_one_engine_alone_has_no_series(tmp_path: Path) -> None:
    async with several_engines(tmp_path, ("only",)) as it:
        assert "kvtether_backend" not in (await it.admin.get("/metrics")).text
