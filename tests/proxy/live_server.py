"""An ASGI app behind a real uvicorn on a free loopback port, and a client that sees raw bytes."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from proxy.http_server import HandoverProtocol

SECONDS = 60.0
"""Bound of every wait: many megabytes on a machine that has much else to do."""


@asynccontextmanager
async def serve(app: Any, http: Any = HandoverProtocol) -> AsyncIterator[int]:
    """Serve `app` with the product's protocol class, or another; gives the port. Calls still open at the end
    are cancelled."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="critical",
        server_header=False,
        date_header=False,
        ws="none",
        http=http,
    )
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in list(state.connections):
            connection.shutdown()
        tasks = list(state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # who was accepted a moment ago
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.wait_for(server.wait_closed(), SECONDS)


@dataclass
class RawResponse:
    """A response as it came over the wire. `complete` is False when the transfer broke off."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    complete: bool

    def header(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int) -> "RawClient":
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=2**24))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def request(
        self,
        method: bytes,
        target: bytes,
        headers: Iterable[tuple[bytes, bytes]] = (),
        body: bytes | None = None,
    ) -> None:
        lines = [method + b" " + target + b" HTTP/1.1", b"Host: client.example"]
        lines += [name + b": " + value for name, value in headers]
        if body is not None:
            lines.append(b"Content-Length: %d" % len(body))
        await self.send(b"\r\n".join(lines) + b"\r\n\r\n" + (body or b""))

    async def read_head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        status_line, *lines = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        return int(status_line.split(b" ")[1]), headers

    async def read_chunk(self) -> bytes:
        """The next chunk of a chunked body, empty at its end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size)
        await self.reader.readexactly(2)
        return data

    async def response(self, *, head_only: bool = False) -> RawResponse:
        status, headers = await asyncio.wait_for(self.read_head(), SECONDS)
        found = {name.lower(): value for name, value in headers}
        pieces: list[bytes] = []
        complete = True
        try:
            if head_only or status in (204, 304):
                pass
            elif b"content-length" in found:
                pieces.append(await self.reader.readexactly(int(found[b"content-length"])))
            elif found.get(b"transfer-encoding") == b"chunked":
                while piece := await asyncio.wait_for(self.read_chunk(), SECONDS):
                    pieces.append(piece)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            pieces.append(getattr(error, "partial", b""))
            complete = False
        return RawResponse(status, headers, b"".join(pieces), complete)

    def hang_up(self) -> None:
        self.writer.transport.abort()

    def close(self) -> None:
        """End the connection now: what the peer did not take yet is not waited for."""
        if self.writer.transport.get_write_buffer_size():
            self.hang_up()
        else:
            self.writer.close()


async def fetch(
    port: int,
    method: bytes,
    target: bytes,
    headers: Iterable[tuple[bytes, bytes]] = (),
    body: bytes | None = None,
) -> RawResponse:
    """One request on a connection of its own."""
    client = await RawClient.connect(port)
    try:
        await client.request(method, target, headers, body)
        return await client.response(head_only=method == b"HEAD")
    finally:
        client.close()
