"""What the commands say of a proxy that refuses, and of one that is not there."""

import asyncio

import pytest

from proxy.admin_client import AdminError, ask
from tests.proxy.scripted_upstream import Exchange, ScriptedUpstream


async def test_answers_are_decoded_and_refusals_told_in_words() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        assert exchange.header(b"authorization") == [b"Bearer k"]
        if exchange.target == b"/good?x=1":
            await exchange.respond_json({"fine": True})
        elif exchange.target == b"/problem":
            await exchange.respond_json({"detail": "not now"}, 409)
        else:
            await exchange.respond(500, b"?")

    async with ScriptedUpstream(script) as proxy:
        assert await asyncio.to_thread(ask, "GET", f"{proxy.url}/good", "k", {"x": "1"}) == {"fine": True}
        with pytest.raises(AdminError, match="409 not now"):
            await asyncio.to_thread(ask, "POST", f"{proxy.url}/problem", "k")
        with pytest.raises(AdminError, match="500"):
            await asyncio.to_thread(ask, "POST", f"{proxy.url}/other", "k")


def test_nobody_there() -> None:
    with pytest.raises(AdminError, match=r"127\.0\.0\.1:9"):
        ask("GET", "http://127.0.0.1:9/kv", "")
