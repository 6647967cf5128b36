"""Which engines may take a call, the way there, and what is counted on it."""

import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.affinity import Kinship, Placed
from proxy.backends import Backends
from proxy.config import BackendConfig, Config, InvalidConfig, UpstreamConfig
from proxy.errors import ConnectFailed, EngineFull, UpstreamBroken
from proxy.upstream import UpstreamRequest
from tests.proxy.scripted_upstream import Exchange, ScriptedUpstream, openai_like

ASKED = UpstreamRequest(
    method="GET", raw_target=b"/v1/models", headers=[(b"authorization", b"Bearer theirs")]
)
CALL = UpstreamRequest(method="POST", raw_target=b"/v1/chat/completions", headers=[], body=b"{}")
NOBODY = "http://127.0.0.1:9"


def several(upstream: UpstreamConfig | None = None, **urls: str) -> Backends:
    engines = tuple(BackendConfig(name=n, url=u) for n, u in urls.items())
    return Backends(Config(upstream=upstream or UpstreamConfig(), upstreams=engines))


def names(backends: Backends, model: str = "") -> list[str]:
    return [backend.name for backend in backends.usable(model)]


async def test_one_engine_is_named_by_nobody_and_takes_everything() -> None:
    backends = Backends(Config(upstream=UpstreamConfig(url=NOBODY)))
    assert not backends.several
    assert names(backends) == [""]
    assert backends.place(Kinship(root="r"), "m") == Placed("")
    with pytest.raises(ConnectFailed):
        await backends.anywhere().open(ASKED)
    assert backends.all[0].down == "", "one alone is tried again and again"


def test_who_may_take_a_call() -> None:
    backends = several(a=NOBODY, b=NOBODY, c=NOBODY)
    a, b, c = backends.all
    assert names(backends, "m") == ["a", "b", "c"]
    a.models, b.models, c.models = frozenset({"m"}), frozenset({"m", "n"}), frozenset({"n"})
    assert names(backends, "m") == ["a", "b"]
    assert names(backends, "unheard of") == ["a", "b", "c"], "that is for the engines to refuse"
    a.draining = True
    assert names(backends, "m") == ["b"]
    b.down = "gone"
    assert names(backends, "m") == ["a"], "better one that drains than one that is gone"
    a.down = "gone"
    assert names(backends, "m") == ["b"], "nobody is well, so it is tried"


async def test_where_no_connection_can_be_made_the_next_engine_is_asked() -> None:
    async with ScriptedUpstream(openai_like) as engine:
        backends = several(dead=NOBODY, alive=engine.url)
        heard: list[tuple[str, str]] = []
        backends.lost.append(lambda backend, reason: heard.append((backend.name, reason)))
        reached: list[str] = []
        route = backends.route(Placed("dead"), "r", "m", reached.append)
        response = await route.open(ASKED)
        assert response.status == 200
        assert (reached, route.taken_by) == (["alive"], "alive")
        assert [name for name, _ in heard] == ["dead"]
        dead, alive = backends.all
        assert dead.suspected.is_set()
        assert (dead.load, alive.load) == (0, 1)
        response.close()
        response.close()
        assert alive.load == 0
        assert names(backends) == ["alive"]
        await backends.close()


async def test_what_was_sent_is_never_sent_again() -> None:
    async def breaking(exchange: Exchange) -> None:
        await exchange.read_body()
        exchange.reset()

    async with ScriptedUpstream(breaking) as bad, ScriptedUpstream(openai_like) as good:
        backends = several(bad=bad.url, good=good.url)
        with pytest.raises(UpstreamBroken):
            await backends.route(Placed("bad"), "r", "m").open(ASKED)
        assert good.exchanges == []
        assert all(not b.down and not b.load for b in backends.all), "a bad answer says nothing"
        await backends.close()


async def test_with_nobody_there_the_last_refusal_is_told() -> None:
    backends = several(a=NOBODY, b=NOBODY)
    with pytest.raises(ConnectFailed):
        await backends.anywhere().open(ASKED)
    assert all(backend.down for backend in backends.all)
    await backends.close()


async def test_each_engine_gets_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_A", "secret-a")
    monkeypatch.setenv("KEY_ALL", "secret-all")
    async with ScriptedUpstream(openai_like) as a, ScriptedUpstream(openai_like) as b:
        upstreams = (BackendConfig(name="a", url=a.url, api_key_env="KEY_A"), BackendConfig("b", b.url))
        backends = Backends(Config(upstream=UpstreamConfig(api_key_env="KEY_ALL"), upstreams=upstreams))
        for backend in backends.all:
            (await backends.to(backend).open(ASKED)).close()
        assert [e.exchanges[0].header(b"authorization") for e in (a, b)] == [
            [b"Bearer secret-a"],
            [b"Bearer secret-all"],
        ]
        await backends.close()


async def test_without_a_key_of_its_own_the_engine_sees_the_clients() -> None:
    async with ScriptedUpstream(openai_like) as engine:
        backends = Backends(Config(upstream=UpstreamConfig(url=engine.url)))
        (await backends.anywhere().open(ASKED)).close()
        assert engine.exchanges[0].header(b"authorization") == [b"Bearer theirs"]
        await backends.close()


def test_loss_and_return_are_told_once() -> None:
    backends = several(a=NOBODY, b=NOBODY)
    heard: list[str] = []
    backends.lost.append(lambda backend, reason: heard.append(f"lost {backend.name}"))
    backends.found.append(lambda backend: heard.append(f"found {backend.name}"))
    a = backends.all[0]
    backends.bring_back(a)
    backends.take_down(a, "gone")
    backends.take_down(a, "gone still")
    assert a.down == "gone still"
    backends.bring_back(a)
    backends.bring_back(a)
    assert heard == ["lost a", "found a"]


def test_what_shares_nothing_spreads_by_load() -> None:
    backends = several(a=NOBODY, b=NOBODY, c=NOBODY)
    backends.all[0].load = backends.all[2].load = 1
    for _ in range(5):
        assert next(iter(backends.anywhere()._order)).name == "b"


def test_an_address_that_is_none_is_named() -> None:
    with pytest.raises(InvalidConfig, match="upstreams, b: not an http"):
        several(a=NOBODY, b="ftp://h")
    with pytest.raises(InvalidConfig, match=r"upstream\.url: "):
        Backends(Config(upstream=UpstreamConfig(url="h:8000")))


LIFE = st.lists(
    st.tuples(
        st.sampled_from(["down", "up", "drain", "resume", "busy", "idle", "call"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(LIFE)
def test_over_any_life_of_engines_contexts_move_only_when_they_must(
    life: list[tuple[str, str, int]],
) -> None:
    backends = several(a=NOBODY, b=NOBODY, c=NOBODY)
    held: dict[int, str] = {}
    for what, name, number in life:
        backend = next(each for each in backends.all if each.name == name)
        match what:
            case "down":
                backends.take_down(backend, "gone")
            case "up":
                backends.bring_back(backend)
            case "drain" | "resume":
                backend.draining = what == "drain"
            case "busy" | "idle":
                backend.load = 50 if what == "busy" else 0
            case "call":
                usable = names(backends, "m")
                parent_on = held.get(number - 1, "") if number % 2 else ""
                kin = Kinship(root=f"r{number // 2}", held_by=held.get(number, ""), parent_on=parent_on)
                placed = backends.place(kin, "m")
                assert placed.backend in usable
                if number in held:
                    assert (placed.backend == held[number]) == (held[number] in usable)
                held[number] = placed.backend
                order = [each.name for each in backends.route(placed, kin.root, "m")._order]
                assert order[0] == placed.backend
                assert sorted(order) == sorted(usable)


async def test_a_full_engine_takes_the_next_call_when_one_is_over() -> None:
    async with ScriptedUpstream(openai_like) as engine:
        backends = Backends(Config(upstream=UpstreamConfig(url=engine.url, max_connections=2)))
        under_way = [await backends.anywhere().open(CALL) for _ in range(2)]
        waiting = [asyncio.ensure_future(backends.anywhere().open(CALL)) for _ in range(3)]
        # Whoever gives up while he waits costs nobody a turn.
        await asyncio.sleep(0)
        waiting[0].cancel()
        asked = await backends.anywhere().open(ASKED)
        assert asked.status == 200, "what is no call goes beside them"
        asked.close()
        assert [each.done() for each in waiting[1:]] == [False, False]
        assert backends.all[0].load == 2
        under_way[0].close()
        third = await waiting[1]
        assert not waiting[2].done()
        for answer in (under_way[1], third):
            answer.close()
        (await waiting[2]).close()
        assert backends.all[0].load == 0
        again = [await backends.anywhere().open(CALL) for _ in range(2)]
        for answer in again:
            answer.close()
        await backends.close()


async def test_a_call_that_found_no_connection_keeps_no_place() -> None:
    backends = Backends(Config(upstream=UpstreamConfig(url=NOBODY, max_connections=1)))
    for _ in range(3):
        with pytest.raises(ConnectFailed):
            await backends.anywhere().open(CALL)
    assert backends.all[0].load == 0


async def test_of_several_a_full_one_is_passed_over_and_where_all_are_the_chosen_one_is_waited_for() -> None:
    async with ScriptedUpstream(openai_like) as one, ScriptedUpstream(openai_like) as two:
        backends = several(UpstreamConfig(max_connections=1), one=one.url, two=two.url)
        to_one = partial(backends.route, Placed("one"), "r", "m")
        first, second = [await to_one().open(CALL) for _ in range(2)]
        assert [backend.load for backend in backends.all] == [1, 1]
        waits = to_one()
        third = asyncio.ensure_future(waits.open(CALL))
        await asyncio.sleep(0)
        second.close()
        (await backends.to(backends.all[1]).open(CALL)).close()
        assert not third.done()
        first.close()
        (await third).close()
        assert waits.taken_by == "one", "its cache is there"
        assert names(backends) == ["one", "two"], "nobody who is full is taken for dead"
        await backends.close()


async def test_a_full_engine_is_not_waited_for_without_end() -> None:
    async with ScriptedUpstream(openai_like) as engine:
        upstream = UpstreamConfig(url=engine.url, max_connections=1, connect_seconds=1.0)
        backends = Backends(Config(upstream=upstream))
        answer = await backends.anywhere().open(CALL)
        with pytest.raises(EngineFull, match="1 calls"):
            await backends.anywhere().open(CALL)
        answer.close()
        await backends.close()
