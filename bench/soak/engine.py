"""The engine of the soak, in a process that is killed and started again on its port."""

import asyncio
import contextlib
import hashlib
import json
from multiprocessing.connection import Connection

import uvloop

from bench.soak.answers import DIGEST_HEADER, NUMBER_HEADER, OUR_FIELDS, answer
from tests.proxy.scripted_upstream import Exchange

DAMAGED_STATUS = 599
"""Answered to a request that did not arrive as its client says it sent it."""


def digest(document: object) -> str:
    """Of a request body less the members that the proxy may add and remove."""
    if isinstance(document, dict):
        document = {name: value for name, value in document.items() if name not in OUR_FIELDS}
    return hashlib.blake2b(json.dumps(document).encode(), digest_size=16).hexdigest()


async def chat(exchange: Exchange, body: bytes) -> None:
    """Answer one call as its number says."""
    number = int(exchange.header(NUMBER_HEADER.encode())[0])
    document = json.loads(body)
    if exchange.header(DIGEST_HEADER.encode())[0].decode() != digest(document):
        await exchange.respond_json({"error": "damaged"}, DAMAGED_STATUS)
        return
    said = answer(number, document.get("stream") is True)
    if not said.streamed:
        await asyncio.sleep(said.gap_seconds)
        if said.breaks:
            length = len(said.body) + 20
            await exchange.head(
                200, [(b"Content-Type", b"application/json"), (b"Content-Length", b"%d" % length)]
            )
            await exchange.write(said.body)
            exchange.reset()
        else:
            await exchange.respond(200, said.body, [(b"Content-Type", b"application/json")])
        return
    await exchange.start_stream()
    for piece in said.pieces:
        await exchange.chunk(piece)
        await asyncio.sleep(said.gap_seconds)
    if said.breaks:
        exchange.cut()
    else:
        await exchange.end_stream()


async def script(exchange: Exchange) -> None:
    """Everything that is asked of it."""
    path = exchange.target.split(b"?")[0]
    body = await exchange.read_body()
    if path == b"/v1/chat/completions":
        await chat(exchange, body)
    elif path == b"/v1/models":
        await exchange.respond_json({"object": "list", "data": [{"id": "toy", "object": "model"}]})
    elif path == b"/version":
        await exchange.respond_json({"version": "0.0.1"})
    else:
        await exchange.respond_json({"detail": "Not Found"}, 404)


def run_engine(ready: Connection, port: int) -> None:
    """Serve on `port` (0: a free one) until killed; sends the port first."""

    async def serve() -> None:
        connections: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            with contextlib.suppress(Exception):
                await _converse(reader, writer)
            writer.close()
            connections.discard(task)

        server = await asyncio.start_server(connected, "127.0.0.1", port, limit=2**20, reuse_address=True)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(serve())


async def _converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        request_line, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        method, target, _ = request_line.split(b" ")
        headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        exchange = Exchange(method.decode(), target, headers, reader, writer, 0)
        await script(exchange)
        if not exchange.keep_alive:
            return
