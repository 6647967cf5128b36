"""The scripted engine that every proxy of the comparison stands before. It must be faster than any of them.

A call that is not streamed is answered at once with the same few hundred bytes. A stream is 500 events, one
every 2 ms, each with the moment it was sent: the clock is the machine's, so whoever reads it on this machine
knows how long it travelled. A stream whose prompt says `HOLD` stops after its first event and stays open.
"""

import asyncio
import json
import re
import time
from multiprocessing.connection import Connection
from typing import cast

import uvloop

MODEL = "bench"
HOLD = "HOLD"
NUM_EVENTS = 500
EVENT_GAP_SECONDS = 0.002

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_STREAMED = re.compile(rb'"stream" *: *true')
_LARGEST_STREAMED_BYTES = 8192
"""Requests for streams are small; larger bodies are not searched for the wish."""

_BACKLOG = 4096


def _answer(document: object) -> bytes:
    body = json.dumps(document).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


_COMPLETION = _answer(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "done"}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 200, "completion_tokens": 1, "total_tokens": 201},
    }
)
_MODELS = _answer({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]})
_ANYTHING = _answer(
    {
        "model_path": MODEL,
        "served_model_name": MODEL,
        "status": "ok",
        "version": "0",
        "dp_size": 1,
        "tp_size": 1,
    }
)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"bench",'
    b'"choices":[{"index":0,"delta":{"content":"@%d@ "},"finish_reason":null}]}\n\n'
)
_LAST_EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"bench",'
    b'"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":200,"completion_tokens":500,"total_tokens":700}}\n\ndata: [DONE]\n\n'
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class _Exchange(asyncio.Protocol):
    """One connection: requests one after the other, none before the answer to the one before it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._awaited = 0
        self._timer: asyncio.TimerHandle | None = None
        self._num_left = 0
        self._held = False
        self._due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._awaited:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            length = _LENGTH.search(self._buffer, 0, end)
            self._awaited = end + 4 + (int(length[1]) if length else 0)
        if len(self._buffer) >= self._awaited:
            self._respond()
            self._buffer.clear()
            self._awaited = 0

    def _respond(self) -> None:
        assert self._transport is not None
        request = self._buffer
        if request.startswith(b"GET /v1/models"):
            self._transport.write(_MODELS)
        elif not request.startswith(b"POST /v1/chat/completions"):
            self._transport.write(_ANYTHING)
        elif len(request) < _LARGEST_STREAMED_BYTES and _STREAMED.search(request):
            self._held = HOLD.encode() in request
            self._num_left = 1 if self._held else NUM_EVENTS
            self._due = asyncio.get_running_loop().time()
            self._transport.write(_STREAM_HEAD)
            self._send_event()
        else:
            self._transport.write(_COMPLETION)

    def _send_event(self) -> None:
        if self._transport is None:
            return
        event = _chunk(_EVENT % time.monotonic_ns())
        self._num_left -= 1
        if self._num_left:
            self._transport.write(event)
            # Behind time it catches up, one event a turn of the loop.
            self._due += EVENT_GAP_SECONDS
            self._timer = asyncio.get_running_loop().call_at(self._due, self._send_event)
        elif self._held:
            self._transport.write(event)
        else:
            self._transport.write(event + _chunk(_LAST_EVENT) + b"0\r\n\r\n")


def run_engine(ready: Connection) -> None:
    """Serve until killed; sends the port first."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(_Exchange, "127.0.0.1", 0, backlog=_BACKLOG)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(serve())
