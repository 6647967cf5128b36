"""uvicorn's HTTP/1.1 protocol, with what a proxy must do that an application's server need not.

Trailers never become headers, heads are bounded, a hang-up behind pipelined requests reaches the one that
runs, and what cannot be read is refused in the shape that the engine's API has, behind the answers to what
came before it. Requests for an upgrade are a matter of their own:

uvicorn either ends a WebSocket itself, or drops everything behind a request that asks for an upgrade, its
body included. Here a WebSocket handshake goes to the application as an ordinary request that carries a
`Handover`, by which the application may take the whole connection. Any other upgrade is ignored and the
request answered, as HTTP allows (Java's client sends `Upgrade: h2c` with its first POST) and as a proxy must:
what follows an upgrade that it does not understand would pass its checks unread.
"""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from proxy.errors import InvalidRequest
from proxy.problems import openai_error
from proxy.request_body import has_body
from proxy.tunnel import HANDOVER

MAX_HEAD_BYTES = 1024 * 1024
"""Of one request; more than any engine or proxy on the way is likely to take."""

MAX_WAITING_REQUESTS = 16
"""Pipelined requests above which a connection is not read any further, so that a hang-up goes unseen."""

LINGER_SECONDS = 2.0
"""How long a client may go on sending behind a refusal. Closed on at once, it would be reset and never read
why."""


class HandoverProtocol(HttpToolsProtocol):
    """One connection of a client. It is the `Handover` of the WebSocket handshake that came on it, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._num_head_bytes = 0
        self._deaf = False
        self._lingering: asyncio.TimerHandle | None = None
        self._cycles: tuple[RequestResponseCycle, ...] = ()
        self._deciding = True
        self._behind: bytearray | None = None
        """What came behind a WebSocket handshake: not HTTP any more, whoever gets it."""

    def data_received(self, data: bytes) -> None:
        """Bytes came. They are parsed as HTTP up to a WebSocket handshake."""
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        if self._behind is not None:
            self._hold(data)
            return
        try:
            self._read(memoryview(data))
        except httptools.HttpParserError:
            self.send_400_response("the request is not HTTP/1.1")
        if self._in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"the request's head is larger than {MAX_HEAD_BYTES} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: for every request that it waited for, not only for its last."""
        super().connection_lost(exc)
        if self._lingering is not None:
            self._lingering.cancel()
        self._give_up()

    def send_400_response(self, msg: str) -> None:
        """Refuse what came, and read no further. Requests that came whole are answered first."""
        if self._deaf or self.transport.is_closing():
            return
        self._deaf = True
        waiting = [cycle for cycle in self._cycles if not cycle.response_complete]
        if len(waiting) > 1 and waiting[-1].more_body:
            # It has not begun, and its answer would be in the place of another's.
            self.pipeline.popleft()
            waiting.pop()
        if waiting and not waiting[-1].more_body:
            waiting[-1].keep_alive = False
            return
        if waiting and waiting[-1].response_started:
            self.transport.close()
            return
        refusal = openai_error(InvalidRequest(msg))
        lines = [b"HTTP/1.1 400 Bad Request", b"connection: close"]
        lines += [name + b": " + value for name, value in refusal.headers]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + refusal.body)
        self._give_up()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._lingering = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _give_up(self) -> None:
        """For the application the client is gone."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def take_over(self, protocol: asyncio.Protocol) -> tuple[asyncio.Transport, bytes]:
        """Give the connection to `protocol`, with what came behind the handshake.

        For uvicorn the client has hung up: it sends no more. At the end `connection_lost` must be called.
        """
        behind = bytes(self._behind or b"")
        self.transport.set_protocol(protocol)
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        self.flow.resume_reading()
        return self.transport, behind

    def _read(self, data: memoryview) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            else:
                return
            if self._is_websocket_handshake():
                self._offer(data)
                return
            self._parse_without_upgrade()

    def _is_websocket_handshake(self) -> bool:
        upgrades = [value.strip().lower() for name, value in self.headers if name == b"upgrade"]
        return (
            self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and upgrades == [b"websocket"]
            and not has_body({"headers": self.headers})
        )

    def _offer(self, behind: memoryview) -> None:
        """Start the application. Unless it takes over, the connection ends with its answer."""
        self._behind = bytearray()
        self._deciding = False
        self.scope["extensions"] = {HANDOVER: self}  # type: ignore[dict-item]
        self.on_headers_complete()
        self.cycle.keep_alive = False
        self.on_message_complete()
        self._hold(behind)

    def _hold(self, data: bytes | memoryview) -> None:
        assert self._behind is not None
        self._behind += data
        if len(self._behind) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def _parse_without_upgrade(self) -> None:
        """The same request once more, as if it had not asked; its body is still to come."""
        method: bytes = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserInvalidMethodError("nobody is connected through here")
        head = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        head += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join(head) + b"\r\n\r\n")

    # -- llhttp's callbacks -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head = True
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:
            return
        self._cycles = (*(c for c in self._cycles if not c.response_complete), self.cycle)
        if 0 < len(self.pipeline) < MAX_WAITING_REQUESTS:
            self.flow.resume_reading()

    def _should_upgrade(self) -> bool:
        """uvicorn's question whether to leave a request that asks for an upgrade alone: until we decided."""
        return self._deciding
