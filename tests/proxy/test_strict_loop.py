"""What a test leaves open fails it; it does not hang it."""

import asyncio

import pytest

from tests.proxy.strict_loop import StrictLoop


def test_a_connection_that_is_left_open_is_named_and_closed() -> None:
    heard: list[bytes] = []

    class Kept(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            heard.append(b"made")

    async def leave() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Kept, "127.0.0.1", 0)
        await loop.create_connection(Kept, *server.sockets[0].getsockname())
        server.close()

    runner = asyncio.Runner(loop_factory=StrictLoop)
    runner.run(leave())
    with pytest.raises(ResourceWarning, match="TCPTransport"):
        runner.close()
    assert heard


def test_a_loop_with_nothing_open_closes_in_silence() -> None:
    with asyncio.Runner(loop_factory=StrictLoop) as runner:
        assert runner.run(asyncio.sleep(0, "done")) == "done"
