"""An engine is judged by itself and by nothing else, and its return is noticed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from proxy.backend_health import TRIES, BackendHealth
from proxy.backends import Backends
from proxy.config import BackendConfig, Config
from tests.lifecycle.fake_cache import FakeCache
from tests.proxy.several_engines import Engine, several_engines
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import lifecycle, user


class Watched:
    """Two engines, one of them watched closely, and what was told of them."""

    def __init__(self, a: Engine, b: Engine) -> None:
        self.a = a
        self.backends = Backends(
            Config(upstreams=(BackendConfig(name="a", url=a.url), BackendConfig(name="b", url=b.url)))
        )
        self.told: asyncio.Queue[str] = asyncio.Queue()
        self.backends.lost.append(lambda backend, reason: self.told.put_nowait(f"lost {backend.name}"))
        self.backends.found.append(lambda backend: self.told.put_nowait(f"found {backend.name}"))

    async def next(self) -> str:
        return await asyncio.wait_for(self.told.get(), 20)


@asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    async with Engine("a", FakeCache()) as a, Engine("b", FakeCache()) as b:
        it = Watched(a, b)
        running = asyncio.create_task(BackendHealth(it.backends, 0.02, 0.02).run())
        yield it
        running.cancel()
        await asyncio.wait([running])
        await it.backends.close()


async def test_who_refuses_connections_is_gone_and_comes_back() -> None:
    async with watched() as it:
        await it.a.kill()
        assert await it.next() == "lost a"
        assert it.backends.all[0].down
        assert [b.name for b in it.backends.usable()] == ["b"]
        it.a.models = [NAME, "adapter"]
        await it.a.revive()
        assert await it.next() == "found a"
        assert it.backends.all[0].models == {NAME, "adapter"}, "it is asked anew what it serves"


async def test_an_engine_that_says_it_is_ill_is_believed_after_some_looks() -> None:
    async with watched() as it:
        before = len(it.a.exchanges)
        it.a.health = 503
        assert await it.next() == "lost a"
        assert "503" in it.backends.all[0].down
        looks = [e for e in it.a.exchanges[before:] if e.target == b"/health"]
        assert len(looks) >= TRIES
        it.a.health = 200
        assert await it.next() == "found a"


async def test_an_engine_without_a_health_path_is_well() -> None:
    async with watched() as it:
        it.a.health = 404
        await it.a.kill()
        assert await it.next() == "lost a"
        await it.a.revive()
        assert await it.next() == "found a"


async def test_one_engine_alone_is_not_asked() -> None:
    async with Engine("", FakeCache()) as engine:
        backends = Backends(Config())
        await BackendHealth(backends).run()
        assert engine.exchanges == []


async def test_bad_requests_close_no_engine(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        for engine in it.engines.values():
            engine.fails = True
        for n in range(5):
            answer = await it.data.post("/v1/completions", json={"model": NAME, "n": n})
            assert answer.status_code == 500
        assert not any(backend.down for backend in it.runtime.backends.all)


async def test_a_call_that_reaches_nobody_has_the_engine_looked_at_at_once(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        name = await it.served([user("hi")], lifecycle(ctx="c", call="1"))
        other = "b" if name == "a" else "a"
        await it.engines[name].kill()
        assert await it.served([user("hi"), user("more")], lifecycle(ctx="c", call="2")) == other
        assert it.backend(name).down
        await it.engines[name].revive()
        await it.until_seen(lambda: not it.backend(name).down)
