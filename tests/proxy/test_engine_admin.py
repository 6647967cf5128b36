"""Every route of the engines: it passes as it came, and with keys in force some need the admin scope.

The lists in `engine_routes` are the engines' own routes, each with our verdict. vLLM's is compared with the
installed engine by an end-to-end test; in SGLang's every route that asks for its admin key needs ours.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lifecycle.vocabulary import Mode
from proxy.engine_admin import is_engine_admin
from tests.proxy.api_keys import KEYS, bearer, keys
from tests.proxy.live_server import RawClient, RawResponse
from tests.proxy.scripted_upstream import Exchange
from tests.proxy.whole_proxy import whole_proxy

ROUTES = Path(__file__).parent / "engine_routes"
ENGINES = ("vllm-0.32.0", "sglang-0.5.23")
BODY = b'{"prompt" : "\\ud800 \xc3\xa9", "x":1e400,"x":[ 1.0 ] }'
ANSWER = b'{ "odd":1e2,"odd" :null}\n'
HANDSHAKE = [
    (b"Connection", b"Upgrade"),
    (b"Upgrade", b"websocket"),
    (b"Sec-WebSocket-Version", b"13"),
    (b"Sec-WebSocket-Key", b"dGhlIHNhbXBsZSBub25jZQ=="),
]


@dataclass(frozen=True)
class Route:
    """`kind` is `call`, `inference` or `admin`."""

    method: str
    path: str
    kind: str

    @property
    def target(self) -> bytes:
        """With something awkward in place of each parameter, and a query."""
        return re.sub(r"\{[^}]+\}", "a%20b%3F", self.path).encode() + b"?q=%2f&q=&%71"


def routes(engine: str) -> list[Route]:
    lines = (ROUTES / f"{engine}.txt").read_text().splitlines()
    return [Route(*line.split(" ")) for line in lines]


class Engine:
    """Answers everything with the same bytes and keeps what clients asked."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes, bytes]] = []

    async def __call__(self, exchange: Exchange) -> None:
        body = await exchange.read_body()
        if exchange.header(b"user-agent"):  # the proxy's own questions
            await exchange.respond(503)
            return
        self.seen.append((exchange.method, exchange.target, body))
        if exchange.header(b"upgrade"):
            await exchange.head(101, [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")])
            await exchange.write(ANSWER)
            exchange.cut()
        else:
            sized = [(b"Content-Length", b"%d" % len(ANSWER)), (b"X-Odd", b"1"), (b"X-Odd", b"2")]
            await exchange.head(207, sized)
            await exchange.write(b"" if exchange.method == "HEAD" else ANSWER)


@asynccontextmanager
async def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[int, Engine]]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    engine = Engine()
    async with whole_proxy(
        tmp_path, Mode.OBSERVE, script=engine, ready=False, models=(), api_keys=keys()
    ) as it:
        yield int(it.up.data_url.rpartition(":")[2]), engine


async def ask(port: int, route: Route, key: str, json: bytes = BODY) -> RawResponse:
    headers = [(name.encode(), value.encode()) for name, value in bearer(key).items()]
    client = await RawClient.connect(port)
    try:
        if route.method == "WEBSOCKET":
            await client.request(b"GET", route.target, [*headers, *HANDSHAKE])
            status, answered = await asyncio.wait_for(client.read_head(), 10)
            return RawResponse(status, answered, await asyncio.wait_for(client.reader.read(), 10), True)
        body = None if route.method in ("GET", "HEAD") else json
        await client.request(route.method.encode(), route.target, headers, body)
        return await client.response(head_only=route.method == "HEAD")
    finally:
        client.hang_up()


@pytest.mark.parametrize("engine_name", ENGINES)
async def test_every_route_passes_as_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_name: str
) -> None:
    async with guarded(tmp_path, monkeypatch) as (port, engine):
        for route in routes(engine_name):
            answer = await ask(port, route, "admin" if route.kind == "admin" else "a")
            method, body = route.method, b"" if route.method in ("GET", "HEAD", "WEBSOCKET") else BODY
            asked = ("GET" if method == "WEBSOCKET" else method, route.target, body)
            assert engine.seen[-1] == asked, route
            assert answer.body == (b"" if method == "HEAD" else ANSWER), route
            if method != "WEBSOCKET":
                assert (answer.status, answer.header(b"x-odd")) == (207, [b"1", b"2"]), route


@pytest.mark.parametrize("engine_name", ENGINES)
async def test_what_changes_the_engine_for_everybody_needs_the_admin_scope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_name: str
) -> None:
    async with guarded(tmp_path, monkeypatch) as (port, engine):
        admin = [route for route in routes(engine_name) if route.kind == "admin"]
        assert admin
        for route in admin:
            assert (await ask(port, route, "a")).status == 403, route
            assert (await ask(port, route, "nobody")).status == 401, route
        assert engine.seen == []


@pytest.mark.parametrize("engine_name", ENGINES)
async def test_no_route_that_generates_lets_a_parameter_through_that_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_name: str
) -> None:
    deadly = b'{"kv_transfer_params": {"lmcache.max_offload_tokens": "x"}, "prompt": "p"}'
    async with guarded(tmp_path, monkeypatch) as (port, engine):
        inference = [route for route in routes(engine_name) if route.kind == "inference"]
        assert inference
        for route in inference:
            await ask(port, route, "a", deadly)
            assert b"max_offload_tokens" not in engine.seen[-1][2], route


@pytest.mark.parametrize("engine_name", ENGINES)
def test_the_verdicts_are_those_of_the_lists(engine_name: str) -> None:
    for route in routes(engine_name):
        assert is_engine_admin(route.path) == (route.kind == "admin"), route


@pytest.mark.parametrize(
    "path",
    ["//sleep", "/./sleep", "/x/../sleep", "/sleep/", "/sleep//", "/v1/../sleep", "///sleep", "/hicache"],
)
def test_odd_spellings_do_not_get_round_it(path: str) -> None:
    assert is_engine_admin(path)


@pytest.mark.parametrize(
    "path", ["/", "/v1/models", "/v1/chat/completions", "/v1/sleep", "/is_sleeping", "/x/sleep"]
)
def test_other_paths_are_everybodys(path: str) -> None:
    assert not is_engine_admin(path)


async def test_an_escaped_path_is_the_same_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(tmp_path, monkeypatch) as (port, engine):
        assert (await ask(port, Route("POST", "/%73leep", "admin"), "a")).status == 403
        assert engine.seen == []
