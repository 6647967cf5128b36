"""The body arrives whole, bounded, and its end is watched."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from proxy.errors import BodyTooLarge, ClientGone, InvalidRequest
from proxy.request_body import RequestFeed, check_framing, hang_up, has_body, read_body

DISCONNECT = {"type": "http.disconnect"}


def piece(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


class Client:
    """Gives its messages one by one, then stays connected in silence."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = list(messages)

    async def receive(self) -> MutableMapping[str, Any]:
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop(0)


def scope(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"headers": list(headers)}


async def test_a_body_in_pieces() -> None:
    client = Client(piece(b"ab"), piece(b""), piece(b"c", more=False))
    assert await read_body(scope(), client.receive) == b"abc"


async def test_a_client_that_leaves_while_it_sends() -> None:
    with pytest.raises(ClientGone):
        await read_body(scope(), Client(piece(b"ab"), DISCONNECT).receive)


async def test_a_body_over_the_cap_is_not_collected() -> None:
    client = Client(*(piece(b"x" * 10) for _ in range(100)))
    with pytest.raises(BodyTooLarge):
        await read_body(scope(), client.receive, 25)
    assert len(client.messages) == 97


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-length", b"1"), (b"transfer-encoding", b"chunked")],
        [(b"content-length", b"1"), (b"content-length", b"2")],
    ],
)
def test_contradicting_framing(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(InvalidRequest):
        check_framing(scope(*headers), 100)


def test_a_declared_length_over_the_cap() -> None:
    with pytest.raises(BodyTooLarge):
        check_framing(scope((b"content-length", b"101")), 100)
    check_framing(scope((b"content-length", b"100")), 100)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], False),
        ([(b"content-length", b"0")], False),
        ([(b"content-length", b"3")], True),
        ([(b"transfer-encoding", b"chunked")], True),
    ],
)
def test_whether_a_body_follows(headers: list[tuple[bytes, bytes]], expected: bool) -> None:
    assert has_body(scope(*headers)) is expected


async def test_a_streamed_body_and_the_hang_up_behind_it() -> None:
    client = Client(piece(b"ab"), piece(b"c", more=False), DISCONNECT)
    feed = RequestFeed(client.receive, 100)
    cause = await feed.pump()
    assert [p async for p in feed.pieces()] == [b"ab", b"c"]
    assert isinstance(cause, ClientGone)


async def test_a_streamed_body_over_the_cap() -> None:
    feed = RequestFeed(Client(piece(b"x" * 60), piece(b"x" * 60)).receive, 100)
    assert isinstance(await feed.pump(), BodyTooLarge)


async def test_a_reader_that_lags_stops_the_client_not_the_memory() -> None:
    client = Client(*(piece(b"x") for _ in range(1000)))
    feed = RequestFeed(client.receive, 10_000)
    pump = asyncio.ensure_future(feed.pump())
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(client.messages) > 900
    pump.cancel()


async def test_the_watch_sees_only_a_hang_up() -> None:
    assert isinstance(await hang_up(Client(piece(b""), DISCONNECT).receive), ClientGone)
