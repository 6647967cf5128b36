"""Both listeners: who may use them, when they refuse to start, and how they end."""

import asyncio
import socket
from pathlib import Path

import httpx
import pytest

from lifecycle.core.events import CallEnded
from lifecycle.store.sql import SqlEventLog
from lifecycle.vocabulary import CallEnd
from proxy.app import serving
from proxy.auth import KeyScope
from proxy.config import Config, InvalidConfig, KeyConfig, Listener, UpstreamConfig
from proxy.keys import create_key, revoke_key
from tests.proxy.live_server import RawClient
from tests.proxy.scripted_upstream import Exchange, chat_chunks
from tests.proxy.whole_proxy import lifecycle, user, whole_proxy

NOWHERE = UpstreamConfig(url="http://127.0.0.1:9")


@pytest.mark.parametrize("listener", ["data", "admin"])
async def test_an_address_that_everybody_reaches_needs_keys(listener: str) -> None:
    open_ = {"data": Listener(port=0), "admin": Listener(port=0), listener: Listener("0.0.0.0", 0)}
    with pytest.raises(InvalidConfig, match="api_keys"):
        async with serving(Config(upstream=NOWHERE, log_url="memory:", **open_)):  # type: ignore[arg-type]
            pass


async def test_told_otherwise_it_is_served_to_everybody(tmp_path: Path) -> None:
    everywhere = Listener("0.0.0.0", 0)
    async with whole_proxy(
        tmp_path, ready=False, data=everywhere, admin=everywhere, keyless_network=True
    ) as it:
        port, admin = (url.rpartition(":")[2] for url in (it.up.data_url, it.up.admin_url))
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/v1/models")).status_code == 200
            by_address, by_name = {"host": f"10.1.2.3:{admin}"}, {"host": f"rebound.example:{admin}"}
            tiers = f"http://127.0.0.1:{admin}/kv/v1/tiers"
            assert (await client.get(tiers, headers=by_address)).status_code == 200
            assert (await client.get(tiers, headers=by_name)).status_code == 403


async def test_a_keys_file_in_which_no_key_is_valid_serves_nobody_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    record, key, _ = create_key(path, "t", frozenset({KeyScope.ADMIN}), 1)
    revoke_key(path, record.id, 1)
    everywhere = Listener("0.0.0.0", 0)
    async with whole_proxy(tmp_path, ready=False, data=everywhere, keys_file=str(path)) as it:
        port = it.up.data_url.rpartition(":")[2]
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as client:
            assert (await client.get(f"http://127.0.0.1:{port}/v1/models")).status_code == 401


async def test_with_keys_it_may_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "k")
    keys = (KeyConfig(tenant="t", key_env="A_KEY"),)
    async with whole_proxy(tmp_path, ready=False, data=Listener("0.0.0.0", 0), api_keys=keys) as it:
        port = it.up.data_url.rpartition(":")[2]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/v1/models")).status_code == 401


async def test_an_address_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = Config(data=Listener(port=port), admin=Listener(port=0), upstream=NOWHERE, log_url="memory:")
        with pytest.raises(InvalidConfig, match=f"{port} cannot be bound"):
            async with serving(config):
                pass


async def test_a_key_that_is_not_in_the_environment_is_said() -> None:
    keys = (KeyConfig(tenant="t", key_env="NOT_SET_ANYWHERE"),)
    config = Config(
        data=Listener(port=0), admin=Listener(port=0), upstream=NOWHERE, log_url="memory:", api_keys=keys
    )
    with pytest.raises(InvalidConfig, match="tenant 't'"):
        async with serving(config):
            pass


async def test_what_a_user_of_the_block_raises_comes_out_as_it_is() -> None:
    config = Config(data=Listener(port=0), admin=Listener(port=0), upstream=NOWHERE, log_url="memory:")
    with pytest.raises(ZeroDivisionError):
        async with serving(config):
            raise ZeroDivisionError


async def test_the_end_waits_for_streams_and_records_them_and_does_not_wait_for_watchers(
    tmp_path: Path,
) -> None:
    going_on = asyncio.Event()
    log_url = f"sqlite:///{tmp_path / 'log.db'}"
    chunks = chat_chunks(["a", "b"])

    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        if exchange.target != b"/v1/chat/completions":
            await exchange.respond_json({"data": [{"id": "toy"}], "version": "1"})
            return
        await exchange.start_stream()
        await exchange.chunk(chunks[0] + chunks[1])
        await going_on.wait()
        for chunk in chunks[2:]:
            await exchange.chunk(chunk)
        await exchange.end_stream()

    received = b""
    watched = b""

    async def talk(url: str, streaming: asyncio.Event) -> None:
        nonlocal received
        body = {"model": "toy", "messages": [user("hi")], "stream": True}
        async with (
            httpx.AsyncClient(timeout=20) as client,
            client.stream(
                "POST", f"{url}/v1/chat/completions", json=body, headers=lifecycle(ctx="a")
            ) as answer,
        ):
            async for piece in answer.aiter_raw():
                streaming.set()
                received += piece

    async def watch(url: str, watching: asyncio.Event) -> None:
        nonlocal watched
        async with (
            httpx.AsyncClient(timeout=20) as client,
            client.stream("GET", f"{url}/kv/v1/events?after=0") as answer,
        ):
            async for piece in answer.aiter_raw():
                watched += piece
                watching.set()

    streaming, watching = asyncio.Event(), asyncio.Event()
    async with whole_proxy(tmp_path, script=script, log_url=log_url) as it:
        talking = asyncio.ensure_future(talk(it.up.data_url, streaming))
        await asyncio.wait_for(streaming.wait(), 10)
        looking = asyncio.ensure_future(watch(it.up.admin_url, watching))
        await asyncio.wait_for(watching.wait(), 10)
        asyncio.get_running_loop().call_later(0.1, going_on.set)
    await asyncio.wait_for(asyncio.gather(talking, looking), 10)
    assert received == b"".join(chunks)
    assert b"context_created" in watched
    log = await SqlEventLog.open(log_url)
    ends = [r.event.end async for r in log.read_all() if isinstance(r.event, CallEnded)]
    await log.close()
    assert ends == [CallEnd.COMPLETED]


async def test_nothing_of_ours_still_runs_behind_the_end(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with whole_proxy(tmp_path) as it:
        await it.chat([user("hi")], lifecycle(ctx="a"))
        client = await RawClient.connect(int(it.up.data_url.rpartition(":")[2]))
        assert len(asyncio.all_tasks()) > len(before)
    client.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before
    assert it.cache.closed
